"""Keeps images as files and their order in smq: a topic with storage=external has offsets, and no records.

    python -m examples.offsets DIRECTORY image-1.png image-2.png

Each image gets an offset of its own, is written under that number, and can be read once the high water mark has passed
it. So readers on any machine that sees the files have one order and one end, and a group may commit its place.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from smq.clients import Admin, OffsetAssigner, TopicExists


class ImageLog:
    """One partition of a topic whose records are files. It has one writer, and any number of readers."""

    def __init__(self, directory: Path, topic: str, partition: int, admin: Admin, assigner: OffsetAssigner) -> None:
        self._directory = directory
        self._place = (topic, partition)
        self._admin = admin
        self._assigner = assigner
        self._settled: set[int] = set()  # offsets at or beyond `_end` that are written, or given up
        self._end = 0

    async def start_writing(self) -> None:
        """Offsets that an earlier writer got, and did not write, stay empty: readers pass over them. Call it again
        after an error of `append`, once no other task is in there."""
        self._settled.clear()
        self._end = (await self._admin.partition_range(*self._place)).next_offset
        await self._assigner.advance(*self._place, self._end)

    async def append(self, image: bytes) -> int:
        """The image's offset, once readers may have it or an earlier image is still being written. Any number of tasks
        may call it at the same time."""
        offset, _ = await self._assigner.assign(*self._place)
        try:
            await asyncio.to_thread(self._write, offset, image)
        finally:
            self._settled.add(offset)
        while self._end in self._settled:
            self._settled.remove(self._end)
            self._end += 1
        await self._assigner.advance(*self._place, self._end)
        return offset

    async def read(self, start: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        """Every image from `start` up to the present end, with its offset."""
        end = (await self._admin.partition_range(*self._place)).hwm
        for offset in range(start, end):
            with suppress(FileNotFoundError):
                yield offset, await asyncio.to_thread(self._path(offset).read_bytes)

    def _path(self, offset: int) -> Path:
        topic, partition = self._place
        return self._directory / f"{topic}-{partition}-{offset:012}"

    def _write(self, offset: int, image: bytes) -> None:
        """On disk before the mark passes it: a reader finds all of it, or nothing."""
        path = self._path(offset)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(image)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


async def main(servers: str, directory: Path, images: list[Path]) -> None:
    """Appends the images, all at once, and lists all images of the topic."""
    async with Admin(servers) as admin, OffsetAssigner(servers) as assigner:
        with suppress(TopicExists):
            await admin.create_topic("images", 1, config={"storage": "external"})
        log = ImageLog(directory, "images", 0, admin, assigner)
        await log.start_writing()
        offsets = await asyncio.gather(*(log.append(image.read_bytes()) for image in images))
        for image, offset in zip(images, offsets, strict=True):
            print(f"{image.name} has offset {offset}")
        async for offset, data in log.read():
            print(f"{offset}: {len(data)} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.offsets", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("images", type=Path, nargs="*")
    parser.add_argument("--servers", default="127.0.0.1:7401")
    given = parser.parse_args()
    given.directory.mkdir(exist_ok=True)
    asyncio.run(main(given.servers, given.directory, given.images))
