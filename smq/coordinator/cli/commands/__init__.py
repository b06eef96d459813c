"""The commands, one module each: `root` imports the one that is run."""
