"""What all interfaces share: awaitable calls to the node, positions, look-ups and budgets. Knows no wire format."""
