"""The environment of a live run's nodes: networks, disks and clocks that faults can strike."""
