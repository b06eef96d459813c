"""The disk of a node: LMDB, its free space, and the search for what has rotted."""
