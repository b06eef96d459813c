"""The way of a command on this node: proposed to the Raft leader, applied to the state, answered; and read indexes."""
