"""Planted bugs: changes of production code, one at a time, to prove that the simulation notices them."""
