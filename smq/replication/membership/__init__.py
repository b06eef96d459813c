"""Which nodes there are, which of them live, and which of them lead: registration, liveness, elections, balance."""
