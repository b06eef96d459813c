"""What can go wrong in a simulated cluster: the kinds of faults, their targets and their schedule."""
