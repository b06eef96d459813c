"""Which cache remembers the reply to a request.

Owns the kinds of cache. A retry is recognised until as many other requests of its own kind have come as a cache keeps.
Commits over the Kafka port have ids that nodes choose; they push out no reply to a client's own request. And a client's
commits, of which there are many, do not push out the rare changes that are dangerous to repeat, such as a deletion. It
must never look at more than the command. `machine` and the proposer use it.
"""

import enum

from smq.raft_state.commands import AllocateProducerId, CommitBatch, Coordinated, Request
from smq.raft_state.state import ClusterState, ReplyCache


class Kind(enum.IntEnum):
    """Who numbered the request, and what it is about. The value is the cache's place in the state."""

    BY_NODE = 0
    GROUPS_AND_PRODUCERS = 1
    ADMINISTRATION = 2


def kind_of(request: Request) -> Kind:
    if request.is_from_node:
        return Kind.BY_NODE
    is_frequent = isinstance(request, Coordinated | AllocateProducerId | CommitBatch)
    return Kind.GROUPS_AND_PRODUCERS if is_frequent else Kind.ADMINISTRATION


def cache_of(state: ClusterState, request: Request) -> ReplyCache:
    """The cache that remembers the reply to this request."""
    return state.replies[kind_of(request)]
