"""One rank of one contender of peers.run: builds it, trains it, takes turns."""

import gc
import importlib
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.common import set_policy
from benchmarks.cpu import products
from benchmarks.peers.case import GPT2, LLAMA, Case, Contender, batch_of
from megalite.parity.pool import RankContext


class Entry(NamedTuple):
    """A contender: what builds it, and where it takes part."""

    build: str  # module:function
    layouts: tuple[str, ...]
    families: tuple[str, ...] = (GPT2,)
    bf16: bool = False  # it takes part in bf16 as well
    needs: str | None = None  # the option that says where it lies
    ours: bool = False  # megalite, as users may have it


MEGALITE = "megalite"
_ONE = ("1", "1.2threads")
_SPLIT = (*_ONE, "dp2", "tp2", "pp2")
CONTENDERS: dict[str, Entry] = {
    MEGALITE: Entry("megalite:build", (*_SPLIT, "pp2.vpp2"), (GPT2, LLAMA), bf16=True, ours=True),
    "megalite, zb-h2": Entry("megalite:build_zb_h2", ("pp2",), (GPT2, LLAMA), ours=True),
    "megalite, dualpipe-v": Entry("megalite:build_dualpipe_v", ("pp2.vpp2",), ours=True),
    "plain torch": Entry("pytorch:build_plain", _ONE, bf16=True),
    "Hugging Face GPT-2": Entry("huggingface:build", _ONE, bf16=True),
    "torch DDP": Entry("pytorch:build_ddp", ("dp2",)),
    "torch DDP, ZeRO-1": Entry("pytorch:build_zero", ("dp2",)),
    "torch DTensor": Entry("pytorch:build_dtensor", ("tp2",)),
    "torch 1F1B": Entry("pytorch:build_even", ("pp2",)),
    "torch 1F1B, cut as ours": Entry("pytorch:build_balanced", ("pp2",)),
    "torch Interleaved1F1B": Entry("pytorch:build_even", ("pp2.vpp2",)),
    "torch Interleaved1F1B, cut as ours": Entry("pytorch:build_balanced", ("pp2.vpp2",)),
    "torch InterleavedZeroBubble, cut as ours": Entry("pytorch:build_interleaved_zb", ("pp2.vpp2",)),
    "torch ZBVZeroBubble, cut as ours": Entry("pytorch:build_zb_v", ("pp2.vpp2",)),
    "torch DualPipeV, cut as ours": Entry("pytorch:build_dualpipe_v", ("pp2.vpp2",)),
    "megatron-core": Entry("megatron:build", (*_SPLIT, "pp2.vpp2"), needs="megatron-core"),
    "picotron": Entry("picotron:build", _SPLIT, (LLAMA,), needs="picotron"),
}


class _Seat(NamedTuple):
    name: str
    contender: Contender
    case: Case
    steps: list[float]  # the losses so far


_seat: list[_Seat] = []  # what this process trains


@contextmanager
def _warnings_of(name: str) -> Iterator[None]:
    """What peers warn of is not ours to fix."""
    with warnings.catch_warnings():
        if not CONTENDERS[name].ours:
            warnings.simplefilter("ignore")
        yield


def make(context: RankContext, name: str, case: Case) -> Contender:
    module, _, function = CONTENDERS[name].build.partition(":")
    with _warnings_of(name):
        return getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)(case, context)


def build(context: RankContext, name: str, case: Case) -> None:
    """Make a contender, in place of what was here."""
    _seat.clear()
    gc.collect()
    batch = CONTENDERS[name].ours or case.batch_peers
    # A pool's ranks are batch jobs, which is megalite's doing: peers run as their users start them, or as
    # `chrt --batch` before their command would have them.
    set_policy(os.SCHED_BATCH if batch else os.SCHED_OTHER)
    torch.set_num_threads(case.layout.threads)
    _seat.append(_Seat(name, make(context, name, case), case, []))


def train(context: RankContext, steps: int) -> list[float]:
    """This rank's parts of the losses of the next steps."""
    seat = _seat[0]
    first = len(seat.steps)
    with _warnings_of(seat.name):
        for index in range(first, first + steps):
            seat.steps.append(seat.contender.step(batch_of(seat.case.size, index)))
    return seat.steps[first:]


def turn(context: RankContext, steps: int) -> dict[str, float]:
    """The same timed: when it began and ended here (one clock for all processes), and CPU seconds."""
    gc.collect()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    train(context, steps)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    return {"start": start, "end": end, "cpu": cpu}


def leave(context: RankContext) -> None:
    """Free what was built; be what a pool's ranks are."""
    set_policy(os.SCHED_BATCH)
    _seat.clear()
    gc.collect()


def gemm_rate(context: RankContext, threads: int, bf16: bool, n: int, seconds: float) -> float:
    """FLOP/s of n³ matrix products on this rank."""
    return products.gemm_rate(n, torch.bfloat16 if bf16 else torch.float32, seconds=seconds, threads=threads)
