"""`make demo`: real flights, a killed leader, and everything back through Spark."""
