"""Running on an event loop: the production clock, deadlines, and long work in slices."""
