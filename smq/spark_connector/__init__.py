"""Spark DataSource V2 `format("smq")`."""
