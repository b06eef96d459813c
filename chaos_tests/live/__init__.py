"""Real clusters of real processes under real faults, judged by the checkers of the simulation."""
