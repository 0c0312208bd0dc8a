import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.preprocess import workers
from megalite.preprocess.workers import WorkerPool
from tests.preprocess.test_processes import PATIENCE_SECONDS, ROOT


class Doubler:
    """Doubles numbers, with some special cases. If the kind is a path, 0 waits until that file exists."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, number: int) -> tuple[int, int]:
        if self._kind.startswith("/") and number == 0:
            end = time.monotonic() + 60
            while not Path(self._kind).exists() and time.monotonic() < end:
                time.sleep(0.01)  # the other worker continues meanwhile, up to its limit
        if self._kind == "refuses" and number in (20, 21):
            raise ConfigError(f"{number} is refused")
        if self._kind == "memory" and number == 20:
            raise MemoryError
        if self._kind == "dies" and number == 20:
            os._exit(3)
        return 2 * number, os.getpid()


def run(kind: str, numbers: Iterator[int], on_result: Callable[[int], None] = lambda number: None) -> list[int]:
    """Return the results of two workers until an exception."""
    pids, found = set(), []
    with WorkerPool[str, int, tuple[int, int]](2, Doubler, kind, remedy="take two") as pool:
        for number, (double, pid) in pool.map(numbers, lambda number: 1):
            assert double == 2 * number
            pids.add(pid)
            found.append(number)
            on_result(number)
    assert pids and os.getpid() not in pids
    return found


def test_results_are_in_order_with_bounded_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_IN_FLIGHT_PER_WORKER", 5)
    drawn = []

    def numbers() -> Iterator[int]:
        for number in range(300):
            drawn.append(number)
            if len(drawn) == 2 * 5:
                (tmp_path / "go").touch()
            yield number

    def check(number: int) -> None:
        assert len(drawn) <= number + 2 * 5
        if number == 0:  # it was slow: the other worker has processed all available pieces
            assert len(drawn) == 2 * 5

    assert run(str(tmp_path / "go"), numbers(), check) == list(range(300))


def test_bytes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_IN_FLIGHT_BYTES", 100)
    drawn: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(30):
            drawn.append(number)
            yield number

    # A large piece is alone, small ones are in flight together.
    with WorkerPool[str, int, tuple[int, int]](2, Doubler, "doubles", remedy="") as pool:
        for number, _ in pool.map(numbers(), lambda number: 1000 if number < 10 else 40):
            assert len(drawn) <= number + (1 if number < 9 else 3)


def test_this_process_takes_pieces_too() -> None:
    with WorkerPool[str, int, tuple[int, int]](1, Doubler, "doubles", remedy="") as pool:
        found = list(pool.map(iter(range(1000)), lambda number: 1, Doubler("doubles")))
    assert [(number, double) for number, (double, _) in found] == [(number, 2 * number) for number in range(1000)]
    assert len({pid for _, (_, pid) in found}) == 2


def test_fault_of_this_process_is_raised_after_earlier_results(tmp_path: Path) -> None:
    """Piece 0, which a worker has begun, waits until this process has failed."""
    done: list[int] = []

    def here(number: int) -> tuple[int, int]:
        if number == 0:
            return 0, 0
        (tmp_path / "go").touch()
        raise ConfigError(f"{number} is refused")

    with (
        WorkerPool[str, int, tuple[int, int]](1, Doubler, str(tmp_path / "go"), remedy="") as pool,
        pytest.raises(ConfigError) as raised,
    ):
        for number, _ in pool.map(iter(range(8)), lambda number: 1, here):
            done.append(number)
    assert str(raised.value).startswith(f"{len(done)} ") and done == list(range(len(done)))


def die(kind: str) -> Callable[[bytes], int]:
    return lambda piece: os.kill(os.getpid(), signal.SIGKILL) or len(piece)


def tokenize_until_a_worker_dies() -> None:
    with WorkerPool[str, bytes, int](1, die, "", remedy="take fewer") as pool:
        for _ in pool.map(iter([bytes(2 << 20)] * 100), len, lambda piece: time.sleep(0.1) or len(piece)):
            pass


def test_process_ends_after_a_worker_has_died() -> None:
    """Large pieces wait in the pipe to the worker; threads of the executor must not keep the process alive."""
    words = [sys.executable, "-c", f"from {__name__} import *; tokenize_until_a_worker_dies()"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ConfigError: a worker process died (out of memory?); take fewer\n")
    assert ended.stderr.count("Traceback") == 1


def test_input_error_is_raised_after_earlier_results() -> None:
    done: list[int] = []

    def numbers() -> Iterator[int]:
        yield from range(10)
        raise ConfigError("no more")

    with pytest.raises(ConfigError, match=r"^no more$"):
        run("doubles", numbers(), done.append)
    assert done == list(range(10))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("refuses", ConfigError, "^20 is refused$"),
        ("memory", ConfigError, "^a process is out of memory; take two$"),
        ("dies", ConfigError, "^a worker process died .*; take two$"),
    ],
)
def test_worker_errors_are_raised_in_order(kind: str, error: type[Exception], message: str) -> None:
    done: list[int] = []
    with pytest.raises(error, match=message):
        run(kind, iter(range(100)), done.append)
    assert done == list(range(20)) if kind != "dies" else len(done) <= 20
