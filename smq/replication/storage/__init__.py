"""The Disk port's stores, LMDB and SQLite, and whether the disk has space and writes. Knows no row's meaning."""
