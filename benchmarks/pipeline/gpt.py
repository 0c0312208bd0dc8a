"""The stages of a small GPT in fp32, and our executor over them; gradients go to `.grad`."""

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import settings
from benchmarks.live_bytes import LiveBytes
from megalite.config.model import ModelConfig
from megalite.models.gpt import GPTStage
from megalite.parity.pool import RankContext, RankPool
from megalite.pipeline.executor import Executor, Tracer
from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.generators.registry import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.validate import validate
from megalite.tensor_parallel.deferred_weight_gradients import DeferredWeightGradients
from megalite.tensor_parallel.parameter import ParameterFactory, attach_deferred
from megalite.topology.group import Group
from megalite.topology.topology import Topology

SEQ, MICRO = 128, 2
MODEL = ModelConfig(
    **settings("num_layers=8 hidden_size=256 num_attention_heads=8 vocab_size=512 tie_embeddings=false"),
    max_position_embeddings=SEQ,
)


class Part(torch.nn.Module):
    """One stage: tokens [b, s] or [s, b, h] -> [s, b, h], or on the last stage logits [s, b, V]."""

    def __init__(self, stage: GPTStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage(x, self.stage.context())


def build_part(stage: int, num_stages: int) -> Part:
    """Layers of a stage, in fp32, the same weights wherever it is built."""
    each = MODEL.num_layers // num_stages
    factory = ParameterFactory(tp=Group.solo("tp"), seed=3, dtype=torch.float32, device=torch.device("cpu"))
    place = {"first_layer": stage * each, "last_layer": (stage + 1) * each, "seq_length": SEQ}
    ends = {"has_embedding": stage == 0, "has_head": stage == num_stages - 1}
    return Part(GPTStage(MODEL, **place, **ends, factory=factory).eval())


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the microbatch's losses: logits [s, b, V], labels [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="sum")


def batch_of(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [b, s] of all microbatches."""
    draws = torch.Generator().manual_seed(1)
    shape = (2, microbatches * MICRO, SEQ)
    tokens, labels = torch.randint(0, int(MODEL.vocab_size or 0), shape, generator=draws)
    return tokens, labels


def build_ours(schedule: Schedule, topology: Topology, *, tracer: Tracer | None = None) -> Executor:
    """The executor over this rank's stages."""
    rank, last = topology.pp.rank, schedule.num_stages - 1
    stages = schedule.stages_of(rank)
    parts = {stage: build_part(stage, schedule.num_stages) for stage in stages}
    deferred = {stage: DeferredWeightGradients() for stage in parts}
    for stage, part in parts.items():
        attach_deferred(part, deferred[stage])
    tokens, labels = (whole.split(MICRO) for whole in batch_of(schedule.num_microbatches))

    def forward(stage: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        y = parts[stage](tokens[microbatch] if x is None else x)
        return loss_of(y, labels[microbatch]) if stage == last else y

    program = lower(schedule)
    validate(program)
    return Executor(
        program, rank=rank, edges=topology.edges, forward=forward, activation_shape=(SEQ, MICRO, MODEL.hidden_size),
        dtype=torch.float32, device=torch.device("cpu"), reducer=None, deferred=deferred, tracer=tracer,
    )  # fmt: skip


RANKS = 2
SCHEDULES = ("gpipe", "1f1b")


class HeldBytes(LiveBytes):
    """A tracer that keeps the most that is alive at the end of any computation: what is held, without temporaries."""

    held = 0

    def start(self, action: Action) -> None:
        """Nothing is noted when a computation starts."""

    def end(self, action: Action) -> None:
        """It has ended: its temporaries are gone."""
        self.held = max(self.held, self.now)


def graph_bytes(stage: int) -> int:
    """What one microbatch's graph of a stage holds, its input included, its output not if that is sent on."""
    part, last = build_part(stage, RANKS), stage == RANKS - 1
    tokens = torch.zeros(MICRO, SEQ, dtype=torch.int64)
    with LiveBytes() as live:
        x = torch.zeros(SEQ, MICRO, MODEL.hidden_size).requires_grad_() if stage else tokens
        y = part(x)
        loss = y.float().logsumexp(-1).sum() if last else y
        held = live.now - (0 if last else y.untyped_storage().nbytes())
    del loss
    return held


def run_rank(context: RankContext, name: str, microbatches: int) -> tuple[int, int]:
    """Bytes held after any computation, and with temporaries, in a step after the first."""
    schedule = build_schedule(name, num_ranks=RANKS, num_chunks=1, num_microbatches=microbatches)
    live = HeldBytes()
    executor = build_ours(schedule, context.topology(pp=RANKS), tracer=live)
    executor.run()  # gradients exist from here on
    live.held = 0
    with live:
        executor.run()
    return live.held, live.peak


def bench_memory(pool: RankPool, *, microbatches: int) -> dict[str, Any]:
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
        program = lower(build_schedule(name, num_ranks=RANKS, num_chunks=1, num_microbatches=microbatches))
        graphs, replay = memory_peaks(program, units), memory_peaks(program, sizes)
        for rank, (held, peak) in enumerate(pool.run(RANKS, run_rank, name, microbatches)):
            numbers = {"graphs": graphs[rank].size, "formula_bytes": replay[rank].size, "measured_bytes": held}
            row = {"schedule": name, "rank": rank, **numbers, "measured_bytes_with_temporaries": peak}
            rows.append(row)
    return {
        "microbatches": microbatches,
        "graph_bytes": sizes.activation,
        "message_bytes": sizes.message,
        "rows": rows,
        "ratio_on_rank_0": {key: rows[2][key] / rows[0][key] for key in ("graphs", "formula_bytes", "measured_bytes")},
    }


def memory_table(result: dict[str, Any]) -> list[list[str]]:
    header = "schedule|rank|graphs|replay, MiB|measured, MiB|measured / replay|with temporaries, MiB"
    table = [header.split("|")]
    keys = ("formula_bytes", "measured_bytes", "measured_bytes_with_temporaries")
    for row in result["rows"]:
        replay, measured, most = (f"{row[key] / 2**20:.2f}" for key in keys)
        share = f"{row['measured_bytes'] / row['formula_bytes']:.3f}"
        table.append([row["schedule"], str(row["rank"]), f"{row['graphs']:g}", replay, measured, share, most])
    table.append(["1f1b / gpipe", "0", *(f"{value:.4f}" for value in result["ratio_on_rank_0"].values()), "", ""])
    return table
