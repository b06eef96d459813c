"""The console: pages about the cluster on every node's HTTP port, rendered here, without scripts, and read-only."""
