"""The gRPC port: the services of `smq.v1`, and the limits on their clients."""
