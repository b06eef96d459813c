"""Groups with members: the coordinator's side of Kafka's classic group protocol.

Owns what need not outlive a group's coordinator: sessions, rounds of joining, waiting requests. Everything else is in
the replicated state, which only commands change. Knows neither sockets nor asyncio, so that the simulation can run it,
and no protocol's codes: it answers with outcomes of its own.
"""
