"""A fake cluster and the command line on it."""

import os
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from smq.coordinator.cli.root import cli
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread

Smq = Callable[..., Result]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with cluster_in_thread(1, t=3) as found:
        yield found


@pytest.fixture
def smq(cluster: FakeCluster) -> Smq:
    """`smq("topic", "list", input="...")`: one command on the cluster."""
    environment = {"SMQ_BOOTSTRAP": cluster.nodes[1].address}

    def run(*arguments: object, input: str | None = None) -> Result:
        return CliRunner(env=environment).invoke(cli, [str(a) for a in arguments], input=input)

    return run


@pytest.fixture
def environment(cluster: FakeCluster) -> dict[str, str]:
    """For a command that runs in a process of its own."""
    return {**os.environ, "SMQ_BOOTSTRAP": cluster.nodes[1].address}
