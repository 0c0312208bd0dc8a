"""Shared by tests of `megalite inspect`: checkpoints, and the command with its output."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.save import preamble, save_checkpoint
from megalite.cli.inspect import BAD_INPUT
from megalite.cli.model_commands import INSPECT as main
from megalite.parity.pool import RankContext
from megalite.training.saving import save
from tests.checkpoint.samples import Scheme, on_threads, plan_of, rows
from tests.support.tiny import LLAMA, Runner, build, tiny_config

Captured = pytest.CaptureFixture[str]
Tensors = dict[tuple[str, str, str], torch.Tensor]
WEIGHTS = "weights-00000.safetensors"


def train(folder: Path) -> None:
    runner = Runner(build(RankContext(0), tiny_config(1, precision="bf16", **LLAMA)))
    for _ in range(2):
        runner.step()
        save(runner.replica, folder, runner.progress, tokenizer="ab" * 32)


def save_tensors(folder: Path, tensors: Tensors, *, ranks: int = 1, scheme: Scheme = rows, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "step": 1,
        "counters": {},
        "config": {"model": {"num_layers": 2}},
        "layout": {},
        "tokenizer": None,
        "kernels": {"rmsnorm": "torch", "adam": "triton"},
    }

    def write(group: Any) -> None:
        plan, data = plan_of(tensors, scheme, group.rank, group.size)
        save_checkpoint(folder, preamble(**{**settings, **changes}), plan=plan, tensors=data, world=group)

    assert on_threads(ranks, write) == [None] * ranks
    return folder / "step-0000001"


def inspect(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def said(capsys: Captured) -> str:
    """Return stdout; stderr must be empty."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: Captured, *arguments: str | Path) -> str:
    """Return the error: one line, and no other output."""
    assert inspect(*arguments) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def flip_last_bit(path: Path) -> None:
    """Change a single bit."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
