"""Memory that a CPU run frees stays with it: given back, it would come again as zeroed pages, one fault each."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of glibc's mallopt (malloc.h)."""


def keep_freed_memory() -> bool:
    """Have glibc's allocator reuse what is freed, whatever its size; False where the C library is another one.

    A tensor above 32 MiB, as logits are, is otherwise mapped anew at each allocation and unmapped when freed: in a step of
    a small GPT the kernel then clears tens of thousands of pages.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, -1))
