"""Each of eight layouts resumes from the checkpoint of every other, bit for bit.

Each layout trains two steps, saves and trains on. Then each loads the checkpoints of all eight, alternating between one
model in fp32 and another in fp16 (its own checkpoint in both), and its state is compared with the writer's state in memory. In
fp16 it also saves what it has loaded from the next layout, and both checkpoints are compared without megalite's reader. (Losses
of later steps are compared in `tests/parity` and `tests/e2e/test_continued_elsewhere.py`.)"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.optimizers.schedules import Progress
from megalite.parity.trajectory import Part
from megalite.training import state_tensors
from megalite.training.replica import Replica
from megalite.training.resume import load
from megalite.training.saving import save
from tests.checkpoint.layouts import GPT_MOE, LAYOUTS, LLAMA_MOE, Settings
from tests.checkpoint.plain_reader import PlainCheckpoint, differing, read_plainly
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, assemble, build, local_parts, tiny_config

BEFORE = 2
"""Steps before the checkpoint."""

KINDS = ("weight", "main_param", "exp_avg", "exp_avg_sq")

RUNS: dict[str, Settings] = {
    "fp32": {"precision": "fp32"},
    # Neither step overflows: the scale has doubled at the checkpoint.
    "fp16": {"precision": "fp16", "initial_loss_scale": 2.0**8, "loss_scale_window": 2},
}
"""fp16 has main parameters separate from the model's."""

MODELS: dict[str, Settings] = {"fp32": LLAMA_MOE, "fp16": GPT_MOE}

NAMES = list(LAYOUTS)


def sources_of(run: str, target: str) -> list[str]:
    """The layout itself and every second one: fp32 has those that fp16 omits."""
    number, turn = NAMES.index(target), 0 if run == "fp32" else 1
    return [name for other, name in enumerate(NAMES) if name == target or (number + other) % 2 == turn]


def saved_again_from(target: str) -> str:
    """The layout of the checkpoint that `target` loads and saves again; one is enough, since all give the same state."""
    return NAMES[(NAMES.index(target) + 1) % len(NAMES)]


@dataclass(frozen=True)
class Written:
    state: dict[str, dict[str, Part]]
    loss: float
    """Loss of the step after the checkpoint."""
    updates: int
    scaler: dict[str, float]


def fresh(context: RankContext, run: str, layout: str) -> Replica:
    world, settings = LAYOUTS[layout]
    return build(context, tiny_config(world, **{**MODELS[run], **RUNS[run], **settings}))


def write(context: RankContext, layout: str, folder: str) -> dict[str, Written]:
    found = {}
    for run in RUNS:
        runner = Runner(fresh(context, run, layout))
        replica = runner.replica
        for _ in range(BEFORE):
            runner.step()
        state = {kind: local_parts(replica, kind) for kind in KINDS}
        updates, scaler = replica.optimizer.updates, replica.scaler.state()
        save_split(replica, Path(folder, run, layout), runner.progress)
        found[run] = Written(state, runner.step().loss, updates, scaler)
    return found


def save_split(replica: Replica, folder: Path, progress: Progress) -> None:
    """Save with small matrices divided over the ranks that hold a copy, as large ones are."""
    with mock.patch.object(state_tensors, "SPLIT_ELEMENTS", 300):
        save(replica, folder, progress, tokenizer=None)


def spoil(replica: Replica) -> None:
    """Overwrite the state, so that only the load can restore it."""
    for shard in replica.strategy.shards:
        shard.bucket.data.fill_(torch.nan)
        shard.main_param.data.fill_(torch.nan)
        for values in replica.optimizer.state(shard.main_param).values():
            values.fill_(torch.nan)
    replica.optimizer.updates = 99
    if replica.scaler.dynamic:
        replica.scaler.scale = 3.0


def read(context: RankContext, layout: str, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Load the checkpoints one after the other and save one again. Returns results by run and source."""
    found = {}
    for run in RUNS:
        replica = fresh(context, run, layout)
        for source in sources_of(run, layout):
            spoil(replica)
            progress = load(replica, Path(folder, run, source), tokenizer=None, log=lambda line: None)
            result: dict[str, Any] = {
                "progress": progress,
                "updates": replica.optimizer.updates,
                "scaler": replica.scaler.state(),
                "differing": differing_here(replica, Path(folder, f"{run}-{source}.safetensors")),
            }
            if (run, source) == ("fp16", saved_again_from(layout)):
                save_split(replica, Path(folder, run, layout, source), progress)
            if source == layout:
                result["loss"] = Runner(replica, progress).step().loss
            found[run, source] = result
    return found


def differing_here(replica: Replica, reference: Path) -> list[str]:
    """Tensors of which this rank's part differs in any bit from the full tensor in a file."""
    found = []
    full = load_file(reference)
    for kind in KINDS:
        for name, (shape, bounds, values) in local_parts(replica, kind).items():
            whole = full[f"{kind} {name}"].numpy()
            wanted = whole[tuple(slice(start, stop) for start, stop in bounds)]
            # float64 represents all values of the narrower types; comparing bytes distinguishes signed zeros
            same = wanted.tobytes() == values.astype(np.float64).tobytes()
            if whole.shape != shape or not same:
                found.append(f"{kind} {name}")
    return found


Sources = dict[tuple[str, str], tuple[Written, PlainCheckpoint]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def sources(folder: Path) -> Sources:
    """Train in all layouts, and write each writer's full state in memory in addition to its checkpoints."""
    found = {}
    for layout, (world, _) in LAYOUTS.items():
        ranks = run_ranks(world, write, layout, str(folder))
        for run in RUNS:
            full = {
                f"{kind} {name}": torch.from_numpy(values)
                for kind in KINDS
                for name, values in assemble([rank[run].state[kind] for rank in ranks]).items()
            }
            moments = {key: values for key, values in full.items() if key.startswith("exp_avg")}
            assert all(bool(values.any()) for values in moments.values()), "moments must not be zero"
            save_file(full, folder / f"{run}-{layout}.safetensors")
            found[run, layout] = ranks[0][run], read_plainly(folder / run / layout / "step-0000002")
    return found


@pytest.mark.parametrize("target", NAMES)
def test_each_layout_loads_the_checkpoints_of_all_layouts(target: str, folder: Path, sources: Sources) -> None:
    world, _ = LAYOUTS[target]
    ranks = run_ranks(world, read, target, str(folder))
    for run in RUNS:
        for source in sources_of(run, target):
            written, checkpoint = sources[run, source]
            what = f"{run}: {target} takes up {source}"
            for rank in ranks:
                result = rank[run, source]
                assert result["differing"] == [], what
                assert result["progress"] == Progress(BEFORE, BEFORE * 12), what
                assert (result["updates"], result["scaler"]) == (BEFORE, written.scaler), what
            if (run, source) == ("fp16", saved_again_from(target)):
                again = read_plainly(folder / run / target / source / "step-0000002")
                assert differing(checkpoint, again) == [], what
            if source == target:
                assert ranks[0][run, source]["loss"] == written.loss, what
