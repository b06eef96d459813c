"""The `smq` command: one file per group of commands."""
