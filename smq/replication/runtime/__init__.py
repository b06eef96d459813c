"""Running on an event loop: the production clock and loop, deadlines, long work in slices."""
