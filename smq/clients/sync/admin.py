"""The blocking admin client.

Owns no rule: every method is that of `Admin`, which says what it does. Users import it through `smq.clients`.
"""

from collections.abc import Iterable, Mapping
from typing import Unpack

from smq.clients.admin import Admin, AdminOptions
from smq.clients.metadata import Servers
from smq.clients.positions import Start
from smq.clients.sync.background_loop import BlockingClient, documented_as
from smq.clients.types import (
    Acl,
    AclDecision,
    AppSummary,
    ClusterDescription,
    ClusterSetting,
    CommittedOffset,
    GroupDescription,
    GroupSummary,
    Isolation,
    ListedOffset,
    NodeStatus,
    PartitionRange,
    Quota,
    TopicDescription,
    TopicPartition,
    TransactionDescription,
    TransactionSummary,
    User,
)


@documented_as(Admin)
class SyncAdmin(BlockingClient):
    """`with SyncAdmin("host:port") as a: a.create_topic("t", 6)`. Options as Admin's."""

    def __init__(self, bootstrap: Servers | None = None, **options: Unpack[AdminOptions]) -> None:
        super().__init__()
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: Servers | None, options: AdminOptions) -> None:
        self._admin = Admin(bootstrap, **options)
        await self._admin.__aenter__()

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        replication_factor: int = 0,
        config: Mapping[str, str] | None = None,
        start_offset: int = 0,
    ) -> bytes:
        return self._run(
            self._admin.create_topic(
                name, partitions, replication_factor=replication_factor, config=config, start_offset=start_offset
            )
        )

    def delete_topic(self, name: str) -> None:
        self._run(self._admin.delete_topic(name))

    def add_partitions(self, name: str, partition_count: int) -> None:
        self._run(self._admin.add_partitions(name, partition_count))

    def alter_topic(self, name: str, *, set: Mapping[str, str] | None = None, unset: Iterable[str] = ()) -> None:
        self._run(self._admin.alter_topic(name, set=set, unset=unset))

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        return self._run(self._admin.delete_records(topic, partition, before_offset))

    def set_node_drained(self, node: int, drained: bool) -> None:
        self._run(self._admin.set_node_drained(node, drained))

    def describe_cluster(self, topics: Iterable[str] = (), *, is_linearizable: bool = True) -> ClusterDescription:
        return self._run(self._admin.describe_cluster(topics, is_linearizable=is_linearizable))

    def list_topics(self) -> list[TopicDescription]:
        return self._run(self._admin.list_topics())

    def describe_topic(self, name: str) -> TopicDescription:
        return self._run(self._admin.describe_topic(name))

    def node_status(self, node: int | str, *, with_digest: bool = False, with_replicas: bool = True) -> NodeStatus:
        return self._run(self._admin.node_status(node, with_digest=with_digest, with_replicas=with_replicas))

    def partition_range(self, topic: str, partition: int) -> PartitionRange:
        return self._run(self._admin.partition_range(topic, partition))

    def list_offsets(
        self,
        starts: Mapping[TopicPartition, Start],
        *,
        group: str | None = None,
        reset_if_gone: bool = False,
        isolation: Isolation = "read_committed",
    ) -> dict[TopicPartition, ListedOffset]:
        return self._run(
            self._admin.list_offsets(starts, group=group, reset_if_gone=reset_if_gone, isolation=isolation)
        )

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int | CommittedOffset]) -> None:
        self._run(self._admin.commit_offsets(group, offsets))

    def fetch_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        return self._run(self._admin.fetch_offsets(group, partitions))

    def delete_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._run(self._admin.delete_offsets(group, partitions))

    def list_groups(self) -> list[GroupSummary]:
        return self._run(self._admin.list_groups())

    def list_transactions(self) -> list[TransactionSummary]:
        return self._run(self._admin.list_transactions())

    def describe_transaction(self, transactional_id: str) -> TransactionDescription:
        return self._run(self._admin.describe_transaction(transactional_id))

    def abort_transaction(self, transactional_id: str) -> None:
        self._run(self._admin.abort_transaction(transactional_id))

    def list_apps(self) -> list[AppSummary]:
        return self._run(self._admin.list_apps())

    def describe_group(self, name: str, *, with_sizes: bool = False) -> GroupDescription:
        return self._run(self._admin.describe_group(name, with_sizes=with_sizes))

    def delete_group(self, name: str) -> None:
        self._run(self._admin.delete_group(name))

    def cluster_config(self) -> list[ClusterSetting]:
        return self._run(self._admin.cluster_config())

    def alter_cluster_config(self, *, set: Mapping[str, str] | None = None, unset: Iterable[str] = ()) -> None:
        self._run(self._admin.alter_cluster_config(set=set, unset=unset))

    def list_users(self) -> list[User]:
        return self._run(self._admin.list_users())

    def create_user(self, name: str, password: str) -> None:
        self._run(self._admin.create_user(name, password))

    def change_password(self, name: str, password: str) -> None:
        self._run(self._admin.change_password(name, password))

    def list_acls(self) -> list[Acl]:
        return self._run(self._admin.list_acls())

    def alter_acls(self, *, add: Iterable[Acl] = (), remove: Iterable[Acl] = ()) -> None:
        self._run(self._admin.alter_acls(add=add, remove=remove))

    def test_acl(self, user: str, operation: str, resource: str, name: str, *, host: str = "127.0.0.1") -> AclDecision:
        return self._run(self._admin.test_acl(user, operation, resource, name, host=host))

    def list_quotas(self) -> list[Quota]:
        return self._run(self._admin.list_quotas())

    def alter_quotas(self, quotas: Iterable[Quota]) -> None:
        self._run(self._admin.alter_quotas(quotas))

    def delete_user(self, name: str) -> None:
        self._run(self._admin.delete_user(name))

    def close(self) -> None:
        self._run(self._admin.close())
