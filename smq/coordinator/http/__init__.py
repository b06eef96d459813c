"""The HTTP port: health, readiness and metrics."""
