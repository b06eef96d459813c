"""The test kit: clusters of real processes, fakes that answer like a cluster, and a virtual world to run nodes in."""
