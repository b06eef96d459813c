"""One node's store alone, without a cluster: rounds, stores beside one another, and kinds of offsets."""
