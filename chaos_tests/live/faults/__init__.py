"""What can be done to a live cluster: the kinds of faults, their names and their plan."""
