"""The process of a node: its composition root, and what it is to its machine. Only `cli` and tests import it."""
