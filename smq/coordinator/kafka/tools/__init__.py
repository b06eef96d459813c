"""Keys of the Kafka protocol that administrators' tools call, and that producers and consumers never need.

Each file has the handlers of the keys in its first line. `handlers` imports them; they import what all handlers share.
"""
