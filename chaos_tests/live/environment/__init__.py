"""What the nodes of a live run stand on: networks, disks and clocks that faults can strike."""
