"""The folder of a run: whether it can be written, how much fits, and how fast it is on the disk."""

import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megalite.checkpoint.files import write_all
from megalite.config.byte_size import format_bytes
from megalite.doctor.host import Finding, finding

_found = partial(finding, "disk")
BYTES = 64 << 20
"""Written in one go; fewer where the disk is slow."""
SYNCS = 20
SECONDS = 2.0
"""That each of the two tests may take."""
LEAST_FREE = 1 << 30
SLOWEST_SYNC = 0.1
"""Seconds: metrics and checkpoints are synced by a thread or a rank that others wait for."""


def examine(
    folder: Path, *, seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Finding]:
    """Findings on the folder, or on the nearest one above it that is there. What is written is removed again.

    Args:
        folder: of a run; it need not be there yet.
        seconds: that each test may take.
        clock: seconds; tests give their own.
    """
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    data = {"folder": str(folder), "tested": str(place)}
    if not place.is_dir():
        yield _found("folder", f"{place} is a file", data, "give a folder with --run-dir", "error")
        return
    try:
        with _scratch(place) as descriptor:
            yield _space(place, folder, data)
            yield _locks(descriptor)
            yield from _speed(descriptor, seconds, clock)
    except OSError as error:
        remedy = "give a folder that can be written to with --run-dir, or make room there"
        yield _found("folder", f"cannot write to {place}: {error.strerror or error}", data, remedy, "error")


@contextmanager
def _scratch(place: Path) -> Iterator[int]:
    """A file in the folder that loses its name at once: nothing is left behind, however this ends."""
    descriptor, name = tempfile.mkstemp(prefix=".megalite-doctor-", dir=place)
    try:
        Path(name).unlink()
        yield descriptor
    finally:
        os.close(descriptor)


def _space(place: Path, folder: Path, data: dict[str, str]) -> Finding:
    usage = shutil.disk_usage(place)
    there = "" if place == folder.absolute() else f" (of {place}: {folder} is not there yet)"
    text = f"{folder}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}{there}"
    remedy = "make room: a checkpoint takes 12 to 18 bytes a parameter, and two are kept while one is written"
    sizes = {**data, "free": usage.free, "bytes": usage.total}
    return _found("folder", text, sizes, remedy if usage.free < LEAST_FREE else None)


def _locks(descriptor: int) -> Finding:
    """Two runs must not save to one folder; a lock stops the second."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        remedy = "take care that no two runs save to one folder: nothing can stop them here"
        return _found("locks", f"this file system locks no files ({error.strerror})", {"work": False}, remedy)
    return _found("locks", "a second run in a folder is noticed", {"work": True})


def _speed(descriptor: int, seconds: float, clock: Callable[[], float]) -> Iterator[Finding]:
    """Rate of a large write with its sync, and time of a small one."""
    block = memoryview(os.urandom(1 << 20))  # no zeros, which some disks do not store
    written, start = 0, clock()
    while written < BYTES and clock() - start < seconds / 2:
        write_all(descriptor, block)
        written += len(block)
    os.fsync(descriptor)
    rate = written / max(clock() - start, 1e-9)
    text = f"{rate / 1e6:,.0f} MB/s to the disk ({format_bytes(written)} and a sync)"
    yield _found("writing", text, {"bytes_per_second": rate})
    times: list[float] = []
    start = clock()
    while len(times) < 3 or (len(times) < SYNCS and clock() - start < seconds):
        before = clock()
        os.pwrite(descriptor, block[:4096], 0)
        os.fsync(descriptor)
        times.append(clock() - before)
    median, longest = statistics.median(times), max(times)
    text = f"{1e3 * median:.1f} ms, at most {1e3 * longest:.1f} ms, for 4 KiB"
    remedy = "ranks wait for it: keep --run-dir on a faster disk, or save less often"
    data = {"seconds": median, "longest": longest}
    yield _found("fsync", text, data, remedy if median > SLOWEST_SYNC else None)
