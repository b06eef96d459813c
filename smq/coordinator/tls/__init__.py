"""Certificates: their layout on disk, the authority that signs them, and the contexts of the listeners."""
