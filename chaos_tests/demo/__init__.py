"""`make demo`: publishes real flights, kills a leader, and reads everything back with Spark."""
