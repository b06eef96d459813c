"""The blocking offset assigner.

Owns no rule: every method is that of `OffsetAssigner`. Users import it through `smq.clients`.
"""

from typing import Unpack

from smq.clients.admin import AdminOptions
from smq.clients.metadata import Servers
from smq.clients.offset_assigner import OffsetAssigner
from smq.clients.sync.background_loop import BlockingClient, documented_as


@documented_as(OffsetAssigner)
class SyncOffsetAssigner(BlockingClient):
    """`with SyncOffsetAssigner("host:port") as a: base, last = a.assign("t", 0, 5)`. Options as OffsetAssigner's."""

    def __init__(self, bootstrap: Servers | None = None, **options: Unpack[AdminOptions]) -> None:
        super().__init__()
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: Servers | None, options: AdminOptions) -> None:
        self._assigner = OffsetAssigner(bootstrap, **options)
        await self._assigner.__aenter__()

    def assign(
        self,
        topic: str,
        partition: int,
        count: int = 1,
        *,
        request_id: bytes | None = None,
        not_before: int | None = None,
    ) -> tuple[int, int]:
        return self._run(self._assigner.assign(topic, partition, count, request_id=request_id, not_before=not_before))

    def advance(self, topic: str, partition: int, offset: int) -> int:
        return self._run(self._assigner.advance(topic, partition, offset))

    def close(self) -> None:
        self._run(self._assigner.close())
