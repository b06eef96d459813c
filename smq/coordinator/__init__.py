"""The server: services over a node, CLI, composition root."""
