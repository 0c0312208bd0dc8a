#!/usr/bin/env python3
"""The planner's memory beside what is published and what real runs hold on this machine.

    OMP_NUM_THREADS=1 python benchmarks/planner_memory.py [--solo] [--json FILE]

Published: the values of Korthikanti et al. 2022, figure 1, from the paper's own closed forms, and beside them what the
planner counts for the same models, with all that the forms leave out.
Measured: tiny GPTs of several families train a few steps on one or two gloo ranks. Bytes of weights, gradients and
optimizer state are those of the storages that the strategy and the optimizer hold; bytes of activations those of the
distinct storages that autograd's saved tensors keep alive at the peak of a step, parameters left out. The prediction is
what `--dry-run --rank` prints.
"""

import argparse
import json
import platform
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from planner_memory_cases import CASES, FIGURE_1, published_model, tiny

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.parity.pool import RankContext, RankPool
from megalite.parity.trajectory import Runner
from megalite.planner.held import held_buckets
from megalite.planner.memory import RankMemory, activation_peaks, rank_memory
from megalite.planner.pipeline import layout_of, plan_stages, schedule_of
from megalite.planner.published_memory import activation_bytes, parameter_and_optimizer_bytes
from megalite.training.replica import Replica, build_replica


class SavedBytes:
    """Bytes of the distinct storages that autograd's saved tensors hold, now and at the most; `besides` not counted."""

    def __init__(self, besides: Iterable[torch.Tensor]) -> None:
        self.now = self.peak = 0
        self._besides = {tensor.untyped_storage()._cdata for tensor in besides}
        self._holds: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: torch.Tensor) -> "_Held":
        held = _Held(tensor if tensor.is_leaf else tensor.detach())
        storage = tensor.untyped_storage()
        if storage._cdata not in self._besides:
            self._change(storage._cdata, 1, storage.nbytes())
            weakref.finalize(held, self._change, storage._cdata, -1, storage.nbytes())
        return held

    def _change(self, storage: int, by: int, size: int) -> None:
        before = self._holds.get(storage, 0)
        self._holds[storage] = before + by
        if 0 in (before, before + by):
            self.now += by * size
            self.peak = max(self.peak, self.now)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


class _Held:
    """A saved tensor; its death is the hold's end."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def state_bytes(replica: Replica) -> int:
    """Bytes of the storages that hold weights, gradients and optimizer state between two steps."""
    strategy, tensors = replica.strategy, []
    for shard in strategy.shards:
        assert shard.main_param.grad is not None
        tensors += [strategy.weights(shard).values, shard.bucket.data, shard.bucket.grad]
        tensors += [shard.main_param.data, shard.main_param.grad]
        tensors += replica.optimizer.state(shard.main_param).values()
    tensors += [state.values for state in strategy.states()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measure(context: RankContext, name: str) -> dict[str, float]:
    """On this rank, what is held and what was predicted."""
    config = tiny(name)
    runner = Runner(build_replica(config, context.topology_of(config)))
    replica = runner.replica
    runner.step()
    state = state_bytes(replica)
    besides: list[torch.Tensor] = [p for stage in replica.stages.values() for p in stage.parameters()]
    # Tables of positions are made once a run.
    micro_batch = tuple(range(config.training.micro_batch_size))
    for stage in replica.stages.values():
        stage_context = stage.context(micro_batch)
        besides += [stage_context.positions, *(stage_context.rope or ())]
    with SavedBytes(besides) as saved:
        runner.step()
    replica.strategy.close()
    rank = replica.topology.rank
    return {**predicted(config, rank), "state_bytes": state, "activation_bytes": saved.peak}


def predicted(config: RunConfig, rank: int) -> dict[str, float]:
    """What `--dry-run --rank` says."""
    schedule = schedule_of(config, microbatch_counts(config)[-1])
    buckets = held_buckets(config, rank)
    state = sum(held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes for held in buckets)
    place = layout_of(config).coordinate(rank).pp
    peak = activation_peaks(config, plan_stages(config), schedule)[place]
    return {"predicted_state_bytes": state, "predicted_activation_bytes": peak}


def measured_rows(pool: RankPool | None, names: Iterable[str]) -> list[dict[str, Any]]:
    """One row a case: of its ranks the one whose prediction is furthest off."""
    rows = []
    for name in names:
        size = CASES[name][0]
        if size == 1:
            ranks = [measure(RankContext(0), name)]
        else:
            assert pool is not None
            ranks = pool.run(size, measure, name)
        found = [{"case": name, "ranks": size, "rank": rank, **row} for rank, row in enumerate(ranks)]
        for row in found:
            held = row["state_bytes"] + row["activation_bytes"]
            row["error"] = (row["predicted_state_bytes"] + row["predicted_activation_bytes"]) / held - 1
            row["activation_error"] = row["predicted_activation_bytes"] / row["activation_bytes"] - 1
        rows.append(max(found, key=lambda row: abs(row["activation_error"])))
    return rows


def published_rows() -> list[dict[str, Any]]:
    """Figure 1, the paper's forms, and our count, in GiB on the first rank."""
    rows = []
    for name, (shape, batch, published) in FIGURE_1.items():
        forms = (
            parameter_and_optimizer_bytes(shape),
            activation_bytes(shape, sequence_parallel=False, recompute="none"),
            activation_bytes(shape, sequence_parallel=True, recompute="selective"),
        )
        counted = [first_rank(published_model(shape, batch, plain)) for plain in (True, False)]
        state = counted[0].parameter_bytes + counted[0].gradient_bytes + counted[0].optimizer_bytes
        count = (state, *(each.activation_bytes for each in counted))
        what = ("parameters and optimizer", "activations", "activations, sequence parallel, selective")
        for kind, value, form, own in zip(what, published, forms, count, strict=True):
            row = {
                "model": name,
                "what": kind,
                "published": value,
                "form": form / 2**30,
                "counted": own / 2**30,
            }
            rows.append(row)
    return rows


def first_rank(config: RunConfig) -> RankMemory:
    """The memory of the first pipeline rank as the dry run counts it."""
    stages = plan_stages(config)
    peaks = activation_peaks(config, stages, schedule_of(config, microbatch_counts(config)[-1]))
    return rank_memory(config, [plan for plan in stages if plan.rank == 0], peaks[0])


def show(published: list[dict[str, Any]], measured: list[dict[str, Any]]) -> None:
    """Both tables."""
    print(f"{'model':<6}{'GiB on the first rank':<44}{'published':>10}{'form':>10}{'counted':>10}")
    for row in published:
        print(
            f"{row['model']:<6}{row['what']:<44}{row['published']:>10.2f}{row['form']:>10.2f}{row['counted']:>10.2f}"
        )
    worst = max(abs(row["form"] - row["published"]) for row in published)
    print(f"the forms are off by {worst:.4f} GiB at most, of values in two digits\n")
    print(f"{'case':<42}{'ranks':>6}{'state, KiB':>22}{'activations, KiB':>22}{'error':>9}")
    print(f"{'':<42}{'':>6}{'predicted':>11}{'held':>11}{'predicted':>11}{'held':>11}{'of all':>9}")
    for row in measured:
        keys = ("predicted_state_bytes", "state_bytes", "predicted_activation_bytes", "activation_bytes")
        cells = "".join(f"{row[key] / 1024:>11.1f}" for key in keys)
        print(f"{row['case']:<42}{row['ranks']:>6}{cells}{row['error']:>+9.2%}")
    total = max(abs(row["error"]) for row in measured)
    activations = max(abs(row["activation_error"]) for row in measured)
    print(f"largest error: {total:.2%} of all that is held, {activations:.2%} of the activations alone")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solo", action="store_true", help="cases of one rank alone")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    published = published_rows()
    if arguments.solo:
        measured = measured_rows(None, [name for name, (size, _) in CASES.items() if size == 1])
    else:
        with RankPool(2) as pool:
            measured = measured_rows(pool, CASES)
    show(published, measured)
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        found = {**versions, "published": published, "measured": measured}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
