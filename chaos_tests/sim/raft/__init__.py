"""Raft groups alone: engines without partitions, over the simulated network and disks, with bugs planted in them."""
