"""The configuration of one server process: node.toml, the environment, and addresses as an operator writes them."""
