"""One rank of one contender of peers.run: build it, train it, time it."""

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
    """How to build a contender, and the layouts and families that it supports."""

    build: str  # module:function
    layouts: tuple[str, ...]
    families: tuple[str, ...] = (GPT2,)
    bf16: bool = False  # also supports bf16
    needs: str | None = None  # option with the folder of its package
    ours: bool = False  # a variant of megalite


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


class _Built(NamedTuple):
    name: str
    contender: Contender
    case: Case
    steps: list[float]  # losses so far


_seat: list[_Built] = []  # the contender of this process, if any


@contextmanager
def _without_peer_warnings(name: str) -> Iterator[None]:
    """Ignore warnings of peers: they are not megalite's to fix."""
    with warnings.catch_warnings():
        if not CONTENDERS[name].ours:
            warnings.simplefilter("ignore")
        yield


def make(context: RankContext, name: str, case: Case) -> Contender:
    module, _, function = CONTENDERS[name].build.partition(":")
    with _without_peer_warnings(name):
        return getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)(case, context)


def build(context: RankContext, name: str, case: Case) -> None:
    """Build a contender in place of the previous one."""
    _seat.clear()
    gc.collect()
    batch = CONTENDERS[name].ours or case.batch_peers
    # Ranks of a pool run under SCHED_BATCH, which megalite sets. Peers run as their users start them or, with
    # `--batch-peers`, as under `chrt --batch`.
    set_policy(os.SCHED_BATCH if batch else os.SCHED_OTHER)
    torch.set_num_threads(case.layout.threads)
    _seat.append(_Built(name, make(context, name, case), case, []))


def train(context: RankContext, steps: int) -> list[float]:
    """Train some steps. Returns this rank's parts of their losses."""
    seat = _seat[0]
    first = len(seat.steps)
    with _without_peer_warnings(seat.name):
        for index in range(first, first + steps):
            seat.steps.append(seat.contender.step(batch_of(seat.case.size, index)))
    return seat.steps[first:]


def turn(context: RankContext, steps: int) -> dict[str, float]:
    """Time `train`: start and end by a clock that all processes share, and CPU seconds."""
    gc.collect()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    train(context, steps)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    return {"start": start, "end": end, "cpu": cpu}


def leave(context: RankContext) -> None:
    """Free the contender and restore the scheduling policy of a pool's ranks."""
    set_policy(os.SCHED_BATCH)
    _seat.clear()
    gc.collect()


def gemm_rate(context: RankContext, threads: int, bf16: bool, n: int, seconds: float) -> float:
    """FLOP/s of n³ matrix products on this rank."""
    return products.gemm_rate(n, torch.bfloat16 if bf16 else torch.float32, seconds=seconds, threads=threads)
