"""Makes the state machine run: consensus engine, journal, log store, record replication, node loop."""
