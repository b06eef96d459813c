"""Changes that an operator plans, sees and then makes: the same for the command line and for the console."""
