"""Crash images: what a disk may hold after a power loss in the middle of real LMDB commits."""
