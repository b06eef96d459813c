"""The Kafka wire protocol of a node: codec, listener and the handlers of each key.

Everything here speaks to the node through NodeApi alone, on native offsets: it stores nothing, and nothing is
translated. Only the composition root imports `listener`; the rest is this package's own business.
"""
