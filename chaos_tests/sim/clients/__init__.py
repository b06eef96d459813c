"""Simulated clients: each a script over the node's real request handlers, each operation in the history."""
