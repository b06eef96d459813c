"""Lets the process keep the memory that it frees, within bounds.

Owns the settings of glibc's allocator. By default, glibc maps each block above 128 KiB separately and unmaps it when
it is freed, so the kernel clears pages for every block: for a batch of a megabyte that takes longer than copying it.
glibc raises the limit to the size of a block that was freed, but then returns the end of the heap after nearly every
one. Without glibc nothing changes. Only a program of our own may call it, never a library in someone else's process.
"""

import ctypes
import os
from typing import Final

MAPPED_MIN_BYTES: Final = 16 << 20  # blocks of this size are returned immediately: no frame or fetch is that large
KEPT_BYTES: Final = 32 << 20  # the free memory at the end of a heap above which it is returned
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Returns whether the allocator took the settings. If the environment sets one, both stay."""
    tunables = os.getenv("GLIBC_TUNABLES", "")
    is_set = any(f"MALLOC_{of}_THRESHOLD_" in os.environ for of in ("MMAP", "TRIM")) or "_threshold" in tunables
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_set or mallopt is None:
        return False
    return all((mallopt(_M_MMAP_THRESHOLD, MAPPED_MIN_BYTES), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)))
