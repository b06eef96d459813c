"""The public test kit: clusters of real processes, an in-process fake, and a virtual world to run nodes in.

docs/testing.md shows how to use it. It may import all of smq; within smq, no other package may import it.
"""
