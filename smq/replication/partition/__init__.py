"""One partition on one node: its replica, its followers' streams, reads, repair and hand-over."""
