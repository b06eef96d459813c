"""A consumer as a member of a group: joining, assignments, heartbeats; `smq.clients.consumer` is what users see."""
