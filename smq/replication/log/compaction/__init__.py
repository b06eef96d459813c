"""How the batches of a log are compacted: what one pass reads, and what it writes in their place."""
