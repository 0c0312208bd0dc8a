"""Bytes of activations that gpipe and 1f1b hold, of a real GPT on two ranks, beside the validator's replay."""

import weakref
from typing import Any

import torch
from pipeline_gpt import MICRO, MODEL, SEQ, build_ours, build_part
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.parity.pool import RankContext, RankPool
from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.generators.registry import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, memory_peaks

RANKS, MICROBATCHES = 2, 16
SCHEDULES = ("gpipe", "1f1b")


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made while the mode was on and that nothing has freed.

    As a tracer it keeps the most that is alive at the end of any computation: what is held, without temporaries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.held = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            # A storage that came in is older than the mode, or counted.
            if storage._cdata not in inputs and storage._cdata not in self._alive and storage.nbytes():
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def start(self, action: Action) -> None:
        """Nothing is noted when a computation starts."""

    def end(self, action: Action) -> None:
        """It has ended: its temporaries are gone."""
        self.held = max(self.held, self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def graph_bytes(stage: int) -> int:
    """What one microbatch's graph of a stage holds, its input included, its output not if that is sent on."""
    part, last = build_part(stage, RANKS, plain=False), stage == RANKS - 1
    tokens = torch.zeros(MICRO, SEQ, dtype=torch.int64)
    with LiveBytes() as live:
        x = torch.zeros(SEQ, MICRO, MODEL.hidden_size).requires_grad_() if stage else tokens
        y = part(x)
        loss = y.float().logsumexp(-1).sum() if last else y
        held = live.now - (0 if last else y.untyped_storage().nbytes())
    del loss
    return held


def run_rank(context: RankContext, name: str) -> tuple[int, int]:
    """Bytes held after any computation, and with temporaries, in a step after the first."""
    schedule = build_schedule(name, num_ranks=RANKS, num_chunks=1, num_microbatches=MICROBATCHES)
    live = LiveBytes()
    system = build_ours(schedule, context.topology(pp=RANKS), tracer=live)
    system.run()  # gradients exist from here on
    live.held = 0
    with live:
        system.run()
    return live.held, live.peak


def bench_memory(pool: RankPool) -> dict[str, Any]:
    """Both schedules, measured and by the replay."""
    sizes = Sizes(
        activation=tuple(float(graph_bytes(stage)) for stage in range(RANKS)),
        deferred=(0.0,) * RANKS,
        kept_input=(0.0,) * RANKS,
        message=4.0 * SEQ * MICRO * MODEL.hidden_size,
    )
    units = Sizes.uniform(RANKS)
    rows = []
    for name in SCHEDULES:
        program = lower(build_schedule(name, num_ranks=RANKS, num_chunks=1, num_microbatches=MICROBATCHES))
        graphs, replay = memory_peaks(program, units), memory_peaks(program, sizes)
        for rank, (held, peak) in enumerate(pool.run(RANKS, run_rank, name)):
            rows.append(
                {
                    "schedule": name,
                    "rank": rank,
                    "graphs": graphs[rank].size,
                    "formula_bytes": replay[rank].size,
                    "measured_bytes": held,
                    "measured_bytes_with_temporaries": peak,
                }
            )
    return {
        "microbatches": MICROBATCHES,
        "graph_bytes": sizes.activation,
        "message_bytes": sizes.message,
        "rows": rows,
        "ratio_on_rank_0": {
            key: rows[2][key] / rows[0][key] for key in ("graphs", "formula_bytes", "measured_bytes")
        },
    }


def memory_table(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows."""
    table = [
        [
            "schedule",
            "rank",
            "graphs",
            "replay, MiB",
            "measured, MiB",
            "measured / replay",
            "with temporaries, MiB",
        ]
    ]
    for row in result["rows"]:
        table.append(
            [
                row["schedule"],
                str(row["rank"]),
                f"{row['graphs']:g}",
                f"{row['formula_bytes'] / 2**20:.2f}",
                f"{row['measured_bytes'] / 2**20:.2f}",
                f"{row['measured_bytes'] / row['formula_bytes']:.3f}",
                f"{row['measured_bytes_with_temporaries'] / 2**20:.2f}",
            ]
        )
    ratio = result["ratio_on_rank_0"]
    table.append(
        [
            *("1f1b / gpipe", "0", f"{ratio['graphs']:.4f}", f"{ratio['formula_bytes']:.4f}"),
            *(f"{ratio['measured_bytes']:.4f}", "", ""),
        ]
    )
    return table
