"""Measurements of a real cluster on this machine (`make bench`). No test asserts them, and nothing may import them."""
