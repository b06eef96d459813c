"""Communication between nodes: messages, frames, connections."""
