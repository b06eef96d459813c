"""The handlers of replicated commands: each takes the state and one command, and returns the reply. Pure."""
