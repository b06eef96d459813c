"""What 10,000 partitions and 1,000 groups cost: long passes of a node's loop, snapshots, retention, memory."""
