"""Consensus: pysyncobj behind one adapter, and the journal, roles and messages around it."""
