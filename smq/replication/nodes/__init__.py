"""Which nodes exist, which are alive, and which lead: registration, liveness, elections, balance."""
