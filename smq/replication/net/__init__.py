"""What nodes say to each other, and how it travels: messages, frames, connections."""
