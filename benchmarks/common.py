"""Shared by all benchmarks: command lines, machine facts, subprocesses, rounds, medians, tables, results."""

import argparse
import datetime
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


def parser(text: str | None, *, json_help: str = "write the results here") -> argparse.ArgumentParser:
    """A program's parser with its docstring as help, and the option --json."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help=json_help)
    return made


def settings(text: str) -> dict[str, Any]:
    """`lr=1e-3 tie_embeddings=false activation=swiglu` -> {"lr": 0.001, "tie_embeddings": False, "activation": "swiglu"}."""

    def value(word: str) -> Any:
        try:
            return json.loads(word)
        except ValueError:
            return word

    return {name: value(word) for name, _, word in (pair.partition("=") for pair in text.split())}


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name, or the architecture if Linux does not report it."""
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    """Facts of the machine, for the JSON file."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def command(program: str, words: Sequence[str] | None = None) -> str:
    """`python -m benchmarks.PROGRAM WORDS`, by default with the words of this process."""
    return shlex.join(["python", "-m", f"benchmarks.{program}", *(sys.argv[1:] if words is None else words)])


def write_json(path: Path | None, program: str, words: Sequence[str] | None, result: Mapping[str, Any]) -> None:
    """Write command, machine and results if a file is given, and create its folder."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"command": command(program, words), **machine(), **result}
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def set_policy(policy: int) -> None:
    """Set Linux's scheduling policy of all threads of this process; later threads inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def environment(**more: str) -> dict[str, str]:
    """Environment of a program: one thread, this repository importable, this interpreter's programs first in PATH."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": programs, **more}


def python(*words: str, ranks: int = 1) -> list[str]:
    """Command that runs these words with this interpreter, under torchrun for several ranks."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launch, *words]


def run_python(*words: str, ranks: int = 1, **more: str) -> str:
    """Run `python(*words)` in the repository's root. Returns its stdout.

    Raises:
        SystemExit: it failed; has the command and its output."""
    line = python(*words, ranks=ranks)
    done = subprocess.run(line, cwd=ROOT, env=environment(**more), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def shuffled(items: Sequence[T], rounds: int, seed: int = 0) -> Iterator[list[T]]:
    """Yield the order of each round, shuffled so that other load on the machine affects all alike."""
    draws = random.Random(seed)
    for _ in range(rounds):
        yield draws.sample(list(items), len(items))


def take_turns(works: Mapping[T, Callable[[], object]], *, rounds: int, warm_up: int = 1) -> dict[T, list[float]]:
    """Seconds of each function, one value per round; the first `warm_up` rounds are not counted."""
    found: dict[T, list[float]] = {key: [] for key in works}
    for number, turns in enumerate(shuffled(list(works), warm_up + rounds)):
        for key in turns:
            seconds = seconds_of(works[key])
            if number >= warm_up:
                found[key].append(seconds)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round, in which both had the same load on the machine."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; the first row is the header."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
