"""smq: a Raft-replicated, partitioned log whose offsets are exact."""
