"""The mirror: another cluster's topics and group commits, copied here with their offsets."""
