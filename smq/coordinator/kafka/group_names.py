"""The names of groups: group g of Kafka is group kafka-cg-g of the cluster, with one set of offsets for both.

Owns the prefix, and which names a group can have. Pure.
"""

from typing import Final

from smq.raft_state.limits import GROUP_NAME_BYTES_MAX

PREFIX: Final = "kafka-cg-"


def is_group(name: str) -> bool:
    """Whether a group can have this name. A longer one need not travel through Raft to be refused."""
    return bool(name) and len((PREFIX + name).encode()) <= GROUP_NAME_BYTES_MAX
