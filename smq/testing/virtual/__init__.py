"""A virtual world to run nodes in: clock, random source, disks and network, all under one seed."""
