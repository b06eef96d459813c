"""Judges of histories: one checker per family of anomalies."""
