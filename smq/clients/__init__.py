"""Python producer, consumer and admin, and the wire contract. Carries only grpcio, protobuf and the record codec."""
