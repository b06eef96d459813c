"""One partition's log on disk: its rows, its recovery, its idempotence table and its lineage."""
