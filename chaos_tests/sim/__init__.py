"""Whole clusters of the production code in one process under a seed."""
