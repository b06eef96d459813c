"""The sink of `format("smq")`: tasks stage their rows, and the driver makes all of them visible by one call, once."""
