"""The disk of a node: LMDB, its free space, the scrubber, and repairs."""
