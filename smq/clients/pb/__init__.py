"""Generated stubs of smq.v1 (`make proto`). Owns nothing by hand; everybody who speaks gRPC may import it."""
