"""Groups with members: the coordinator's side of Kafka's classic group protocol.

Owns what of a group need not outlive its coordinator: sessions, rounds of joining, who waits for what. Everything else
is in the replicated state, which only commands change. Knows neither sockets nor asyncio, so that the simulation can
run it.
"""
