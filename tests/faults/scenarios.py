"""Runs to kill: layouts and ways to save."""

from dataclasses import dataclass
from math import gcd

STEPS = 12
SIZES = ["--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--num-layers", "2"]
TRAINING = [
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "3e-3", "--lr-warmup-iters", "2"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--log-interval", "1"),
    *("--train-iters", str(STEPS), "--device", "cpu"),
]


@dataclass(frozen=True)
class Layout:
    """A number of ranks and their layout.

    Args:
        then: layouts of the run's second, third, ... life; empty: the same. Otherwise losses are equal to 1e-9 only."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    then: tuple["Layout", ...] = ()

    def of_life(self, number: int) -> "Layout":
        """The layout of life `number`, from 0."""
        every = (self, *self.then)
        return every[number % len(every)]


def _layout(name: str, ranks: int, flags: str, *then: Layout) -> Layout:
    return Layout(name, ranks, tuple(flags.split()), then)


_FP64 = "--precision fp64"
LAYOUTS = (
    _layout("tp2", 2, "--tp 2 --sequence-parallel"),
    _layout("dp2 bf16 distributed optimizer", 2, "--dp 2 --dp-strategy distributed-optimizer --precision bf16"),
    _layout("pp2 zb-h1", 2, "--pp 2 --pipeline-schedule zb-h1"),
    _layout("ep2 distributed optimizer", 2, "--dp 2 --ep 2 --num-experts 4 --dp-strategy distributed-optimizer"),
    _layout(
        *("tp2, then pp2, dp2", 2, f"--tp 2 {_FP64}"),
        _layout("pp2", 2, f"--pp 2 {_FP64}"),
        _layout("dp2", 2, f"--dp 2 --dp-strategy distributed-optimizer {_FP64}"),
    ),
    _layout("tp2 pp2", 4, "--tp 2 --pp 2"),
    _layout("dp2 cp2", 4, "--dp 2 --cp 2 --dp-strategy distributed-optimizer"),
)
"""Layouts of two ranks are first: a short check only uses them."""


@dataclass(frozen=True)
class Saving:
    """Frequency and method of saving, and the checkpoints at the end.

    Args:
        keeps: number of newest checkpoints to keep; None: all.
        for_ever: also keep every step that is a multiple of it."""

    name: str
    interval: int
    flags: tuple[str, ...]
    keeps: int | None = None
    for_ever: int | None = None

    @property
    def is_async(self) -> bool:
        return "--async-save" in self.flags

    def left(self, last: int) -> set[int]:
        """Steps of the checkpoints that exist after the save of step `last`."""
        steps = [step for step in range(1, last + 1) if step % self.interval == 0 or step == STEPS]
        kept = steps[-self.keeps :] if self.keeps else steps
        return {step for step in steps if step in kept or (self.for_ever and step % self.for_ever == 0)}


SAVINGS = (
    Saving("sync", 3, ()),
    Saving("async", 2, ("--async-save",)),
    Saving("sync, keeps 2", 2, ("--keep-latest", "2"), keeps=2),
    Saving(
        *("async, keeps 2 and every 6th", 2, ("--async-save", "--keep-latest", "2", "--keep-every", "6")),
        keeps=2,
        for_ever=6,
    ),
)
assert gcd(len(LAYOUTS), len(SAVINGS)) == 1, "so that successive runs cover every pair"

KILLS = (2, 1, 2, 1, 1, 2, 1)
"""Number of kills of a run, by its number."""
