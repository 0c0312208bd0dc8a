"""Start the project's programs as a user does, and read their results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
MOCKED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 96 --mock-data "
    "--micro-batch-size 1 --device cpu"
)
"""A small model on data that needs no file."""
TRAINING = ["--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "3e-3", "--log-interval", "1"]


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    jsonl: Path
    tokenizer: Path
    prefix: Path
    """Prefix of the token files."""

    @property
    def flags(self) -> list[str]:
        return [*("--data-path", str(self.prefix), "--split", "90,10,0"), *("--tokenizer-model", str(self.tokenizer))]


@dataclass(frozen=True)
class Outcome:
    """Result of a program."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    def require_success(self) -> "Outcome":
        assert self.status == 0, f"status {self.status}\n{self.out}\n{self.err}"
        return self


def start(command: Sequence[str | Path]) -> subprocess.Popen[str]:
    """Start a program in the root of the repository, with one thread per process because many share few cores."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=REPOSITORY,
        env={**inherited, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], *, seconds: float) -> Outcome:
    """Wait for a program to end.

    Raises:
        AssertionError: it was still running after `seconds`; it is stopped, and the message has its output."""
    started = time.monotonic()
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun then stops its ranks
        try:
            out, err = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s\n{out}\n{err}") from None
    return Outcome(process.returncode, out, err, time.monotonic() - started)


def run(*command: str | Path, seconds: float = 60) -> Outcome:
    return finish(start(command), seconds=seconds)


def train_command(ranks: int, *flags: str | Path) -> list[str | Path]:
    """Command of `pretrain_gpt.py` on some ranks; on one rank, without torchrun."""
    launch: list[str | Path] = [*TORCHRUN, "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
    return [*launch, "pretrain_gpt.py", *flags]


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def reached(run_dir: Path, step: int) -> bool:
    """Whether the step is in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and f'"kind": "train", "step": {step},' in path.read_text()


def ranks_of(torchrun: "subprocess.Popen[Any]") -> dict[int, int]:
    """Rank -> process id of the children that torchrun has started so far."""
    found: dict[int, int] = {}
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
    for child in map(int, children.read_text().split()):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(variable[5:]): child for variable in variables if variable.startswith(b"RANK=")}
    return found


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, training loss) in the order of metrics.jsonl."""
    return [(record["step"], record["loss"]) for record in records(run_dir, "train")]
