"""A small cluster in this process, over real gRPC, for tests of clients: it fails on command.

`runner` starts it, `cluster` is what a test holds in its hand, `log` is a partition. The other modules are the gRPC
services. A real cluster is in smq.testing.cluster.
"""
