"""NaN anywhere: all ranks take the same decision, the step changes nothing, and the origin is named."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.folders import candidates
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.training.non_finite import NonFiniteError, is_finite, remedy
from megalite.training.saving import Saver
from megalite.training.step import StepResult
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import changed, state_copies
from tests.support.tiny import Runner, build, tiny_config, words
from tests.training.test_found_inf import planted

Settings = dict[str, Any]

SMALL: Settings = words("num_layers=2 precision=fp32 hidden_dropout=0.1 lr_warmup_iters=0 lr_decay_style=constant")
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {"dp": 2}),
    "zero-2": (2, {"dp": 2, "dp_strategy": "distributed-optimizer", "shard_gradients": True}),
    "zero-3": (2, {"dp": 2, "dp_strategy": "fully-sharded"}),
    "local-sgd": (2, {"dp": 2, "dp_strategy": "local-sgd", "sync_interval": 2}),
    "onebit-adam": (2, {"dp": 2, "optimizer": "onebit-adam", "freeze_step": 1}),
    "tp2 pp2 bf16": (4, {"tp": 2, "pp": 2, "precision": "bf16"}),
    "dp2 fp16": (2, {"dp": 2, "precision": "fp16", "initial_loss_scale": 64.0}),
}


@contextmanager
def non_finite_output(runner: Runner, layer: int, microbatch: int, value: float) -> Iterator[None]:
    """Let the MLP of a layer on this rank return one NaN or infinity in a microbatch, at each computation."""
    calls = [0]
    mlps = [
        module
        for stage in runner.replica.stages.values()
        for name, module in stage.named_modules()
        if name == f"layers.{layer}.mlp"
    ]
    count = runner.replica.config.training.global_batch_size // runner.replica.topology.dp.size  # type: ignore[operator]

    def spoil(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if (calls[0] - 1) % count != microbatch:
            return output
        bad = torch.zeros_like(output)
        bad.view(-1)[3] = value
        return output + bad

    handles = [mlp.register_forward_hook(spoil) for mlp in mlps]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def bad_step(
    context: RankContext, world: int, settings: Settings, culprits: list[int], microbatch: int, layer: int
) -> tuple[str, list[str], list[str], list[bool]]:
    """Return the error or warning of a bad step, its changes, and the next step with and without it."""
    config = tiny_config(world, **{**SMALL, **settings})
    ends, moved, said, skipped = [], list[str](), "", list[bool]()
    for bad in (True, False):
        runner = Runner(build(context, config))
        runner.step()
        if bad:
            before = state_copies(runner.replica)
            culprit = layer if context.rank in culprits else -1
            with non_finite_output(runner, culprit, microbatch, math.nan if layer else math.inf):
                try:
                    result = runner.step()
                    said, skipped = str(result.fault), [result.skipped, math.isfinite(result.loss)]
                except NonFiniteError as error:
                    said = str(error)
                    step, samples = runner.progress.step, runner.progress.samples
                    runner.progress = Progress(step + 1, samples + 8)
            moved = changed(before, state_copies(runner.replica))
        else:
            runner.progress = Progress(runner.progress.step + 1, runner.progress.samples + 8)
        runner.step()
        ends.append(state_copies(runner.replica))
        runner.replica.strategy.close()
    return said, moved, changed(*ends), skipped


CASES = [
    # layout, policy, culprits, layer, microbatch, where it is found
    ("tp2", "stop", [0, 1], 1, 5, "layers.1.mlp, stage 0 on rank 0 (tp 0), microbatch 5 (sample 13)"),
    ("pp2", "skip", [0], 0, 3, "layers.0.mlp, stage 0 on rank 0 (pp 0), microbatch 3 (sample 11)"),
    ("dp2", "stop", [1], 0, 1, "layers.0.mlp, stage 0 on rank 1 (dp 1), microbatch 1 (sample 11)"),
    ("zero-2", "skip", [1], 1, 2, "layers.1.mlp, stage 0 on rank 1 (dp 1), microbatch 2 (sample 13)"),
    ("zero-3", "skip", [0], 1, 0, "layers.1.mlp, stage 0 on rank 0 (dp 0), microbatch 0 (sample 8)"),
    ("local-sgd", "skip", [1], 1, 0, "layers.1.mlp, stage 0 on rank 1 (dp 1), microbatch 0 (sample 9)"),
    ("onebit-adam", "skip", [1], 1, 0, "layers.1.mlp, stage 0 on rank 1 (dp 1), microbatch 0 (sample 9)"),
    ("dp2 fp16", "skip", [0], 1, 3, "layers.1.mlp, stage 0 on rank 0 (dp 0), microbatch 3 (sample 14)"),
    ("tp2 pp2 bf16", "stop", [2], 1, 4, "layers.1.mlp, stage 1 on rank 2 (tp 0, pp 1), microbatch 4 (sample 12)"),
]


@pytest.mark.parametrize(("name", "policy", "culprits", "layer", "microbatch", "where"), CASES)
def test_non_finite_output_is_located(
    name: str, policy: str, culprits: list[int], layer: int, microbatch: int, where: str
) -> None:
    world, layout = LAYOUTS[name]
    settings = {**layout, "on_non_finite": policy}
    found = run_ranks(world, bad_step, world, settings, culprits, microbatch, layer)
    said = found[0][0]
    for other, moved, differing, skipped in found:
        assert other == said
        assert moved == [] and differing == []
        assert skipped == ([] if policy == "stop" else [True, False])
    assert f"first in the output of {where}" in said, said
    assert "step 2: loss nan, gradient norm" in said and "(samples 8 to 15)" in said
    assert ("skipped (1 in a row)" if policy == "skip" else "stopped before the update") in said


def in_gradient(context: RankContext, settings: Settings, value: float) -> tuple[str, list[str]]:
    """Return the message on a bad gradient, and the changes by the step."""
    runner = Runner(build(context, tiny_config(2, **{**SMALL, **settings})))
    runner.step()
    before, said = state_copies(runner.replica), ""
    with planted(runner, here=context.rank == 1, value=value, place=-1):
        try:
            said = str(runner.step().fault)
        except NonFiniteError as error:
            said = str(error)
    return said, changed(before, state_copies(runner.replica))


@pytest.mark.parametrize(
    ("name", "policy", "value"), [("tp2", "skip", math.inf), ("pp2", "stop", math.nan), ("zero-2", "skip", math.nan)]
)
def test_non_finite_gradient_of_finite_outputs_is_located(name: str, policy: str, value: float) -> None:
    (said, moved), other = run_ranks(2, in_gradient, {**LAYOUTS[name][1], "on_non_finite": policy}, value)
    assert (said, moved) == other
    assert moved == [] and "step 2" in said and "gradient norm" in said
    first = "layers.1.attention.qkv.weight" if name == "pp2" else "embedding.word.weight"
    assert f"first in the gradient of {first}, stage {int(name == 'pp2')} on rank 1" in said, said
    assert "the outputs of all modules were finite in a second forward of the same batch" in said


def test_check_can_be_turned_off() -> None:
    for said, moved in run_ranks(2, in_gradient, {"dp": 2, "check_for_nan_in_loss_and_grad": False}, math.nan):
        assert said == "None" and moved


def in_weights(context: RankContext) -> str:
    runner = Runner(build(context, tiny_config(2, **SMALL, pp=2, on_non_finite="skip")))
    runner.step()
    if context.rank == 0:
        parameter = dict(runner.replica.stages[0].named_parameters())["layers.0.mlp.down.weight"]
        parameter.data.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        runner.step()
    return str(caught.value)


def test_non_finite_weights_stop_the_run_with_any_policy() -> None:
    said, other = run_ranks(2, in_weights)
    assert said == other
    assert "the weights layers.0.mlp.down.weight are not finite on rank 0 (pp 0), stage 0" in said
    assert said.endswith(
        "No checkpoint has been saved to continue from; start again with a lower --lr, and with --save-interval 100"
    )


def test_too_many_consecutive_skips_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(
        build(
            RankContext(0),
            tiny_config(**{**SMALL, "lr_warmup_iters": 10}, on_non_finite="skip", max_consecutive_skips=2),
        )
    )
    rates = []

    def step(*, bad: bool) -> StepResult:
        with planted(runner, here=bad):
            result = runner.step()
        rates.append(result.lr)
        return result

    for bad in (True, True, False, True):
        assert step(bad=bad).skipped is bad
    state = runner.replica.scaler.state()
    assert state == {"skipped_steps": 3, "skipped_samples": 24, "faults_in_a_row": 1}
    runner.replica.scaler.load_state({})
    runner.replica.scaler.load_state(state)  # a resumed run continues the count
    assert "skipped (2 in a row)" in str(step(bad=True).fault)
    with pytest.raises(NonFiniteError, match="max_consecutive_skips 2 steps before it were skipped too"):
        step(bad=True)
    assert runner.replica.optimizer.updates == 1
    assert runner.replica.scaler.state() == {"skipped_steps": 4, "skipped_samples": 32, "faults_in_a_row": 2}
    # Skipped steps do not count: the first good step has the learning rate of step 1, later ones that of step 2.
    assert rates == [1e-3] * 3 + [2e-3] * 2


FP16: Settings = {**SMALL, "precision": "fp16", "initial_loss_scale": 4.0, "hysteresis": 1}


def test_divergence_in_fp16_stops_the_run() -> None:
    """A non-finite loss is no overflow, since no loss scale would make it finite."""
    runner = Runner(build(RankContext(0), tiny_config(**{**FP16, "lr": 1e4})))
    with pytest.raises(NonFiniteError, match=r"loss nan.*stopped before the update"):
        for _ in range(20):
            runner.step()
    assert runner.replica.scaler.scale == 4.0


def test_overflows_at_the_minimum_loss_scale_stop_the_run() -> None:
    """Overflows above the minimum scale only halve it, and a good step resets the count."""
    runner = Runner(build(RankContext(0), tiny_config(**FP16, max_consecutive_skips=2)))

    def step(*, bad: bool) -> StepResult:
        with planted(runner, here=bad):
            return runner.step()

    assert [step(bad=True).skipped for _ in range(4)] == [True] * 4  # at 4, 2, 1, 1
    assert not step(bad=False).skipped
    assert [step(bad=True).loss_scale for _ in range(2)] == [1.0, 1.0]
    assert runner.replica.scaler.state()["overflows_in_a_row"] == 2
    with pytest.raises(NonFiniteError, match="loss scale is at its minimum, 1, and did in max_consecutive_skips 2"):
        step(bad=True)
    assert runner.replica.optimizer.updates == 1


def save_non_finite_state(
    context: RankContext, folder: str, state: str, check: bool, policy: str
) -> tuple[str, list[str]]:
    config = tiny_config(
        2,
        **{**SMALL, "precision": "bf16", "dp": 2, "dp_strategy": "distributed-optimizer", "save": folder},
        check_weights_before_save=check,
        on_save_error=policy,
    )
    runner, lines = Runner(build(context, config)), list[str]()
    saver = Saver(runner.replica, tokenizer=None, log=lines.append)
    runner.step()
    saver.begin(runner.progress)
    runner.step()
    strategy = runner.replica.strategy
    strategy.wait_for_parameters()
    if context.rank == 1:
        shard = strategy.shards[0]
        tensor = runner.replica.optimizer.state(shard.main_param)["exp_avg_sq"]
        target = {"exp_avg_sq": tensor, "main_param": shard.main_param.data}[state]
        target[0] = math.inf
    try:
        saver.begin(runner.progress)
        return "", lines
    except NonFiniteError as error:
        return str(error), lines


@pytest.mark.parametrize(("state", "policy"), [("exp_avg_sq", "stop"), ("main_param", "continue")])
def test_non_finite_state_is_not_saved(tmp_path: Path, state: str, policy: str) -> None:
    said, other = (found[0] for found in run_ranks(2, save_non_finite_state, str(tmp_path), state, True, policy))
    assert said == other
    assert said.startswith(f"step 2: {state} of ") and "are not finite on rank 1: no checkpoint is written" in said
    assert "the newest is of step 1" in said and "--no-check-weights-before-save" in said
    assert [candidate.step for candidate in candidates(tmp_path)] == [1]


def test_non_finite_state_is_saved_if_the_check_is_off(tmp_path: Path) -> None:
    for said, _ in run_ranks(2, save_non_finite_state, str(tmp_path), "exp_avg_sq", False, "stop"):
        assert said == ""
    assert [candidate.step for candidate in candidates(tmp_path)] == [2, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_is_finite(dtype: torch.dtype) -> None:
    values = torch.randn(1000).to(dtype)
    assert is_finite(values) and is_finite(values[:0]) and is_finite(torch.tensor(2.0, dtype=dtype))
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 500, 999):
            spoiled_values = values.clone()
            spoiled_values[place] = bad
            assert not is_finite(spoiled_values)
    assert is_finite(torch.arange(3))


def test_remedy_fits_the_config() -> None:
    config = replace(RunConfig(), init_method_std=50.0)
    assert remedy(config, 0, in_weights=False) == (
        "No step has been taken, so --lr is not the cause: look at --init-method-std (50) and at this batch"
    )
    loaded = remedy(replace(config, load="a"), 0, in_weights=True)
    assert loaded.endswith("look at the weights of --load and at this batch")
    assert remedy(config, 3, in_weights=False).startswith("Lower --lr, or raise --lr-warmup-iters")
    assert remedy(config, 3, in_weights=True).startswith("No checkpoint has been saved to continue from")
    saves = replace(config, save_interval=4)
    assert remedy(saves, 3, in_weights=True).startswith("No checkpoint has been saved to continue from")
    assert remedy(saves, 4, in_weights=True).startswith("Continue from a checkpoint of a step before it")
