"""The gRPC port: the services of `smq.v1`, and what bounds their clients."""
