"""Changes through the console, if they are switched on: shown first, and then made as the command line makes them."""
