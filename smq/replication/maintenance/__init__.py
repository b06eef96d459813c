"""What a node does for its own disk while it runs: it scrubs it, repairs what it finds, and watches its space."""
