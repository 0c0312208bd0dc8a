"""1-bit optimizers resume with other numbers of replicas, and from states of other optimizers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.errors import CheckpointError
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, hashes, save_run
from tests.support.tiny import Runner, build, tiny_config

SETTINGS: dict[str, Any] = {"num_layers": 1, "global_batch_size": 4, "precision": "fp32", "lr": 1e-3, "freeze_step": 3}
ZERO_ONE = {"optimizer": "zero-one-adam", "variance_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 4}


def weights(runner: Runner) -> list[str]:
    return [value for name, value in hashes(runner.replica).items() if name.endswith(" weights")]


def owed(runner: Runner, name: str) -> dict[str, torch.Tensor]:
    """Return one of the strategy's states by tensor, 0 for other ranks' elements."""
    found = {}
    for state in runner.replica.strategy.states():
        for placed in state.bucket.placed if state.name == name else ():
            values = torch.zeros(placed.parameter.numel())
            start, stop = max(placed.start, state.start), min(placed.stop, state.stop)
            if start < stop:
                part = state.values[start - state.start : stop - state.start]
                values[start - placed.start : stop - placed.start] = part
            found[placed.parameter.info.spec.name] = values
    return found


def both(runner: Runner) -> dict[str, dict[str, torch.Tensor]]:
    return {name: owed(runner, name) for name in ("onebit_error", "onebit_server_error")}


def first_run(context: RankContext, folder: str, settings: dict[str, Any]) -> Any:
    runner = Runner(build(context, tiny_config(4, dp=4, **{**SETTINGS, **settings})))
    for _ in range(6):
        runner.step()
    save_run(runner, folder)
    return both(runner)


def resumed(context: RankContext, folder: str, settings: dict[str, Any]) -> Any:
    runner = continued(context, tiny_config(2, dp=2, **{**SETTINGS, **settings}), folder)
    loaded, first = both(runner), weights(runner)
    phases = [runner.step().phase for _ in range(2)]
    return loaded, first, phases, weights(runner)


@pytest.mark.parametrize("settings", [{"optimizer": "onebit-lamb"}, ZERO_ONE])
def test_errors_are_kept_with_fewer_replicas(settings: dict[str, Any], tmp_path: Path) -> None:
    """Each replica gets the mean of the old errors; servers take over each other's chunks."""
    four = run_ranks(4, first_run, str(tmp_path), settings)
    two = run_ranks(2, resumed, str(tmp_path), settings)
    for name in two[0][0]["onebit_error"]:
        wanted = sum(rank["onebit_error"][name].double() for rank in four) / 4
        assert wanted.abs().max() > 0
        for loaded, *_ in two:
            assert torch.equal(loaded["onebit_error"][name], wanted.float()), name
        whole = sum(loaded["onebit_server_error"][name] for loaded, *_ in two)
        assert torch.equal(whole, sum(rank["onebit_server_error"][name] for rank in four)), name
    assert two[0][1] == two[1][1], "they start with equal values"
    assert two[0][2] == ["momentum"] * 2
    if settings is not ZERO_ONE:
        assert two[0][3] == two[1][3]


def other_optimizer(context: RankContext, folder: str, settings: dict[str, Any], to: dict[str, Any]) -> Any:
    """Make four steps each with two optimizers; return notes and loaded states of the second."""
    common = {**SETTINGS, "clip_grad": 0.0, "freeze_step": None}
    first = Runner(build(context, tiny_config(2, dp=2, **{**common, **settings})))
    for _ in range(4):
        first.step()
    save_run(first, folder)
    notes: list[str] = []
    runner = continued(context, tiny_config(2, dp=2, **{**common, **to}), folder, notes.append)
    main, optimizer = main_of(runner), runner.replica.optimizer
    first_run = {name: values.clone() for name, values in optimizer.state(main).items()}
    before = {name: values.clone() for name, values in first.replica.optimizer.state(main_of(first)).items()}
    start = main.detach().clone()
    results = [runner.step() for _ in range(4)]
    assert all(math.isfinite(result.loss) for result in results)
    moved = float((main.detach() - start).abs().max())
    states = {key: float(value) for key, value in optimizer.tensor_state().items()}
    return notes, before, first_run, [result.phase for result in results], moved, states


def main_of(runner: Runner) -> torch.nn.Parameter:
    return runner.replica.strategy.shards[0].main_param


LAMB = {"optimizer": "onebit-lamb"}
SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "adam to a warm-up": ({"optimizer": "adam"}, {**LAMB, "freeze_step": 6}, ["exp_avg_sq_fresh"]),
    "lamb to frozen steps": ({"optimizer": "lamb"}, {**LAMB, "freeze_step": 4}, ["exp_avg_sq_fresh"]),
    "1-bit adam, frozen": (
        {"optimizer": "onebit-adam", "freeze_step": 3},
        {**LAMB, "freeze_step": 3},
        ["exp_avg_sq_fresh"],
    ),
    "adam to 0/1 adam": ({"optimizer": "adam"}, {**ZERO_ONE, "freeze_step": 4}, ["local_update", "synced_param"]),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_missing_optimizer_states_start_from_their_default(name: str, tmp_path: Path) -> None:
    """A log line says it; the moments continue, and steps have the right size."""
    settings, to, fresh = SWITCHES[name]
    for notes, before, first_run, phases, moved, states in run_ranks(2, other_optimizer, str(tmp_path), settings, to):
        for state in fresh:
            assert sum(f"has no {state} for this run: it starts from 0" in note for note in notes) == 1
            assert not first_run[state].any()
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(first_run[state], before[state])
        assert phases == (["gradients"] * 2 + ["momentum"] * 2 if to["freeze_step"] == 6 else ["momentum"] * 4)
        assert 1e-3 < moved < 0.1
        for (state, tensor), value in states.items():
            assert 0.01 <= value <= 10.0, (state, tensor)
            assert state != "trust_factor" or 0.5 <= value < 1.5, "v' continues from v, not from 0"


def missing_state_error(context: RankContext, folder: str) -> str:
    """SGD has no moments for Adam."""
    settings = {**SETTINGS, "freeze_step": None}
    first = Runner(build(context, tiny_config(1, **settings, optimizer="sgd")))
    first.step()
    save_run(first, folder)
    with pytest.raises(CheckpointError) as caught:
        continued(context, tiny_config(1, **settings), folder)
    return str(caught.value)


def test_missing_required_optimizer_state_is_an_error(tmp_path: Path) -> None:
    message = missing_state_error(RankContext(0), str(tmp_path))
    assert "was written with optimizer sgd and has no exp_avg, which adam needs" in message
    assert message.endswith("use --optimizer sgd, or --finetune to start over from the weights")
