"""Promise 3 on one layout: a resumed run has the same bits as an uninterrupted one, with dropout."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.checkpoint.save import save_checkpoint
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group, Work
from megalite.training import saving
from megalite.training.saving import Saver
from megalite.training.step import StepResult
from tests.checkpoint.plain_reader import PlainCheckpoint, differing, read_plainly
from tests.data_parallel.replicas import FRAGMENTS, GOSSIP, LOCAL
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, hashes, interrupted, save_run, silent
from tests.support.tiny import BIASED, LLAMA, MOE, Z1, Runner, build, tiny_config, words

Settings = dict[str, Any]

BEFORE = 2
"""Steps before the checkpoint."""

DROPOUT: Settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RAMP: Settings = {"rampup_batch_size": [4, 2, 12]}
"""Batches of 4, 4, 6, 8, 8, 8: the checkpoint falls into the ramp-up."""

LONGER: Settings = {"seq_length_warmup": [4, 5]}
"""Sequences of 4, 4, 8, 8, 12 and 16 tokens."""

PAIRS: Settings = {"micro_batch_size": 2}
"""Half as many microbatches, for strategies with many collectives per microbatch."""

LAYOUTS: dict[str, tuple[int, Settings]] = {
    "tp2-pp2-sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, **PAIRS}),
    "dp2-zero": (2, Z1),
    "dp2": (2, {"log_gradient_noise_scale": True}),
    "dp4-instances": (4, {**Z1, "shard_gradients": True, "dp_instances": 2, **PAIRS, "global_batch_size": 16}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2, "num_layers": 4, "pipeline_compression": "topk:0.2"}),
    "cp2": (2, {"cp": 2, **LLAMA, **PAIRS}),
    "ep2": (2, {"ep": 2, **MOE, **BIASED, **PAIRS}),
    "pp2-ramp": (2, {"pp": 2, **RAMP, **LONGER}),
}

PRECISIONS: dict[str, Settings] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    # An overflow at the start, then good ones, of which every second one doubles the scale until it overflows again. At
    # the checkpoint one of two good steps is counted: a scaler that lost it would use another scale later.
    "fp16": {"precision": "fp16", "initial_loss_scale": 2.0**20, "hysteresis": 1, "loss_scale_window": 2},
    # At the checkpoint two of three overflows are counted: without them the scale would fall too late.
    "fp16-counting": {"precision": "fp16", "initial_loss_scale": 2.0**20, "hysteresis": 3, "loss_scale_window": 1},
}


@dataclass(frozen=True)
class Moment:
    """A step, and hashes of this rank's state after it."""

    result: StepResult
    progress: Progress
    state: dict[str, str]


def steps(runner: Runner, count: int) -> list[Moment]:
    return [Moment(runner.step(), runner.progress, hashes(runner.replica)) for _ in range(count)]


def config_of(layout: str, precision: str, **more: Any) -> Any:
    world, settings = LAYOUTS[layout]
    return tiny_config(world, **{"num_layers": 2, **DROPOUT, **settings, **PRECISIONS[precision], **more})


def after(layout: str, precision: str) -> int:
    """Return the steps after the checkpoint: a loss scale or a ramp-up needs more of them."""
    return 4 if "fp16" in precision or "ramp" in layout else 2


def three_runs(context: RankContext, layout: str, precision: str, folder: str) -> dict[str, list[Moment]]:
    """Return an uninterrupted run, and two that resume from its direct and its background save."""
    background = str(Path(folder, "background"))
    runner = Runner(build(context, config_of(layout, precision, save=background, async_save=True)))
    before = steps(runner, BEFORE)
    save_run(runner, Path(folder, "direct"))
    saver = Saver(runner.replica, tokenizer=None, log=silent)
    saver.begin(runner.progress)
    count = after(layout, precision)
    found = {"before": before, "uninterrupted": steps(runner, count)}
    saver.wait()
    for how in ("direct", "background"):
        path = str(Path(folder, how))
        found[how] = steps(continued(context, config_of(layout, precision, load=path), path), count)
    return found


CASES = [
    *((layout, "bf16") for layout in ("dp2-zero", "cp2", "tp2-pp2-sp", "dp4-instances")),
    *((layout, "fp16") for layout in ("dp2", "pp2-vpp2", "pp2-ramp")),
    *(("dp2", "fp32"), ("ep2", "fp32"), ("dp2-zero", "fp16-counting")),
]


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_resume_on_the_same_layout_is_bitwise_equal(layout: str, precision: str, tmp_path: Path) -> None:
    (tmp_path / "background").mkdir()
    ranks = run_ranks(LAYOUTS[layout][0], three_runs, layout, precision, str(tmp_path))
    for rank in ranks:
        for how in ("direct", "background"):
            for ours, theirs in zip(rank[how], rank["uninterrupted"], strict=True):
                assert str(ours) == str(theirs)  # as text: the norm of an overflow is nan
    run = ranks[0]["before"] + ranks[0]["uninterrupted"]
    assert len({str(each.state) for each in run if not each.result.skipped}) == len(
        [each for each in run if not each.result.skipped]
    ), "every step must change something"
    if "fp16" in precision:
        assert {each.result.skipped for each in run} == {True, False}
        after = [each.result.loss_scale for each in ranks[0]["uninterrupted"]]
        assert len(set(after)) > 1, f"the scale must change after the checkpoint: {after}"
    if "ramp" in layout:
        ends = [each.progress.samples for each in run]
        assert [b - a for a, b in zip([0, *ends], ends, strict=False)] == [4, 4, 6, 8, 8, 8]


BF16: Settings = {"precision": "bf16"}
FP32: Settings = {"precision": "fp32"}
WIRE: Settings = {**BF16, "wire_dtype": "bf16"}
LOSSY: Settings = {**FP32, "compression_warmup_steps": 2}
ONEBIT: Settings = {**FP32, "num_layers": 1, "lr": 1e-3, "freeze_step": 3}
ADAM: Settings = {**ONEBIT, "optimizer": "onebit-adam"}
LAMB: Settings = {**ONEBIT, "optimizer": "onebit-lamb"}
ZERO_ONE: Settings = ONEBIT | words(
    "optimizer=zero-one-adam variance_update_scaler=2 local_step_scaler=1 local_step_clipper=4"
)
"""Signs of gradients are exchanged in step 3, signs of steps in 4, 5 and 7; 6, 8 and 9 are local."""
AUTO: Settings = {"freeze_step": None, "adam_beta2": 0.5, "freeze_threshold": 0.3, "lr_warmup_iters": 1}
"""The norm of the second moment is checked every 2 steps."""
EMA: Settings = {"ema_decay": 0.7, "eval_ema": True}
SCHEDULE_FREE: Settings = {"optimizer": "schedule-free-adamw", "lr_decay_style": "constant"}
SPLIT: Settings = {**Z1, "tp": 2, "micro_batch_size": 1}
SOME = [1, 3, 4]
"""Checkpoints before, at and between exchanges."""
NODES: Settings = {"dp": 4, "dp_instances": 2, "global_batch_size": 4}
TWO: Settings = {"num_layers": 2, "global_batch_size": 4}
CHOCO: Settings = {**GOSSIP, "gossip_algorithm": "choco-sgd"}

STRATEGIES: dict[str, tuple[int, Settings, int, Sequence[int]]] = {
    # ranks, settings, steps, the steps to continue from
    "zero-2": (2, {**Z1, **BF16, "shard_gradients": True}, 4, [2]),
    "fp16-wire": (2, {**Z1, **PRECISIONS["fp16"], **FP32, "wire_dtype": "fp16"}, 6, [2, 3]),
    "zero-3-sp": (4, {**BF16, "dp_strategy": "fully-sharded", "tp": 2, "sequence_parallel": True}, 4, [2]),
    "local-sgd": (2, {**LOCAL, **WIRE, "sync_warmup_steps": 1}, 6, SOME),
    "asynchronous": (2, {"dp_strategy": "local-sgd", **WIRE, "sync_interval": 3, "sync_delay": 2}, 6, [2, 3, 4]),
    "choco-sgd-nodes": (4, {**CHOCO, **FP32, **NODES}, 4, [3]),
    "diloco-bf16": (2, {**TWO, **FRAGMENTS, **WIRE}, 6, SOME),
    "d-psgd": (2, {**GOSSIP, **WIRE, "gossip_graph": "one-peer"}, 5, [1, 4]),
    "decentlam": (2, {**GOSSIP, **FP32, "gossip_algorithm": "decentlam", "optimizer": "sgd"}, 5, [3]),
    "choco-sgd-tp": (4, {**CHOCO, **BF16, "tp": 2, "sync_warmup_steps": 1}, 4, [1, 3]),
    "onebit": (2, {**LOSSY, "grad_compression": "onebit"}, 5, [1, 3]),
    "uint8": (2, {**LOSSY, "grad_compression": "uint8"}, 4, [3]),
    "topk": (2, {**LOSSY, "grad_compression": "topk", "topk_density": 0.1}, 4, [3]),
    "powersgd": (2, {**LOSSY, "grad_compression": "powersgd", "powersgd_rank": 2}, 4, [3]),
    "onebit-lamb-deepspeed": (2, {**LAMB, "onebit_rule": "deepspeed"}, 6, [4]),
    "zero-one": (2, ZERO_ONE, 8, [2, 6]),
    "auto": (2, {**ADAM, **AUTO}, 9, [3, 5]),
    "onebit-adam-tp": (4, {**ADAM, "tp": 2, "sequence_parallel": True}, 6, [2, 4]),
    "onebit-lamb-pp": (4, {**LAMB, **TWO, "pp": 2}, 5, [3]),
    "lamb": (4, {**SPLIT, "optimizer": "lamb"}, 4, [2]),
    "muon": (4, {**SPLIT, "optimizer": "muon"}, 4, [2]),
    "soap": (4, {**SPLIT, "optimizer": "soap", "soap_frequency": 2}, 4, [1]),
    "schedule-free-zero-3": (4, {**BF16, **SCHEDULE_FREE, "dp_strategy": "fully-sharded", "tp": 2}, 4, [2]),
    "ema-zero-3": (2, {**FP32, **EMA, "dp_strategy": "fully-sharded"}, 4, [2]),
    "ema-muon-split": (2, {**Z1, **BF16, **EMA, "optimizer": "muon", "main_params": "split"}, 4, [2]),
}


@pytest.mark.parametrize("name", sorted(STRATEGIES, key=lambda name: STRATEGIES[name][0]))
def test_every_strategy_resumes_from_any_step(name: str, tmp_path: Path) -> None:
    """The resumed run continues with the same bits; evaluating and saving change none."""
    world, settings, steps, stops = STRATEGIES[name]
    settings = {"num_layers": 1, "global_batch_size": 2, "lr_warmup_iters": None, "dp": 2, **settings}
    for faults in run_ranks(world, interrupted, world, settings, str(tmp_path), steps, stops):
        assert faults == []


REPEATS = 4
"""Direct and background saves take turns at coming first, and the last background save begins early."""


class Late:
    """Work that begins only when a thread waits for it."""

    def __init__(self, begin: Callable[[], Work]) -> None:
        self._begin = begin

    def wait(self) -> None:
        self._begin().wait()


def gather_late(group: Group, output: torch.Tensor, part: torch.Tensor) -> Work:
    return Late(lambda: real_gather(group, output, part))


real_gather = Group.all_gather_async


def save_both_ways(context: RankContext, folder: str) -> None:
    """Save every second step directly, and in the background by a thread that begins after the next step.

    (At every fourth step it may begin earlier.) Parameters that a step updates on other ranks are gathered as late as
    possible."""
    background = Path(folder, "background")
    runner = Runner(build(context, config_of("dp2-zero", "bf16", save=str(background), async_save=True)))
    saver = Saver(runner.replica, tokenizer=None, log=silent)
    may_write = threading.Event()

    def write_late(*arguments: Any, **named: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(60)
        return save_checkpoint(*arguments, **named)

    with mock.patch.object(saving, "save_checkpoint", write_late):
        for repeat in range(REPEATS):
            ways = [lambda: save_run(runner, Path(folder, "direct")), lambda: saver.begin(runner.progress)]
            with mock.patch.object(Group, "all_gather_async", gather_late):
                runner.step()
                ways.pop(repeat % 2)()
            ways.pop()()
            if repeat % 4 == 3:
                may_write.set()
            runner.step()
            may_write.set()
            saver.wait()
            may_write.clear()


def test_background_save_writes_the_state_of_its_step(tmp_path: Path) -> None:
    for name in ("direct", "background"):
        (tmp_path / name).mkdir()
    run_ranks(2, save_both_ways, str(tmp_path))
    former: PlainCheckpoint | None = None
    for step in range(1, 2 * REPEATS, 2):
        direct, background = (read_plainly(tmp_path / name / f"step-{step:07d}") for name in ("direct", "background"))
        assert differing(direct, background) == [], step
        for key, values in background.tensors.items():
            if key.startswith("weight:"):
                main = background.tensors[key.replace("weight:", "optimizer.main_param:")]
                assert torch.equal(values, main.to(torch.bfloat16)), f"{key} is older than its main parameter"
        if former is not None:
            assert len(differing(former, direct)) > len(direct.tensors) // 2, "steps must change the saved state"
        former = direct
