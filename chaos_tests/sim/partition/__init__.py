"""One partition alone: production replicas over a Raft that is one list of commands."""
