"""What a beat costs: an action of the pipeline and a collective with its wait, watched and not. Seconds on one core."""

import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from megalite.watchdog.heartbeat import UNWATCHED, FileHeartbeat, Heartbeat

CALLS, RUNS = 300, 300
WORK = SimpleNamespace(wait=lambda: None)


def best(call: Callable[[], object]) -> str:
    """Microseconds a call, of the fastest run: other programs only make it slower."""
    return f"{1e6 * min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS:6.2f} us"


def measure(name: str, beats: Heartbeat) -> None:
    lane = beats.lane("tp", (0, 1))
    action = best(lambda: beats.act(b"2F0", 3))
    collective = best(lambda: lane.start(lambda: WORK, "all_reduce", 4096).wait())
    print(f"{name:<12}action {action}   collective and its wait {collective}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        watched = FileHeartbeat(Path(folder, "beat"), rank=0)
        watched.begin_step(1)
        measure("watched", watched)
    measure("not watched", UNWATCHED)


if __name__ == "__main__":
    main()
