"""Crash images: possible contents of a disk after a power loss in the middle of real LMDB commits."""
