"""Measurements of a real cluster on this machine (`make bench`). No test asserts them; nothing imports this."""
