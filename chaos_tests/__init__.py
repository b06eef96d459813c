"""Simulation, live faults, checkers and reports. Nothing imports it."""
