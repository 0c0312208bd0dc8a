"""1-bit optimizers continue from checkpoints of any phase to the bit, and from other numbers of replicas as they should."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.errors import CheckpointError, ConfigError
from megalite.training.resume import load
from megalite.training.saving import save
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

STEPS = 9
SETTINGS: dict[str, Any] = {"num_layers": 1, "global_batch_size": 4, "precision": "fp32", "lr": 1e-3, "freeze_step": 3}
ZERO_ONE = {"optimizer": "zero-one-adam", "variance_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 4}
"""Signs of gradients are exchanged in step 3, those of steps in 4, 5 and 7; 6, 8 and 9 are local."""
AUTO = {"freeze_step": None, "adam_beta2": 0.5, "freeze_threshold": 0.3, "lr_warmup_iters": 1}
"""The second moment is looked at every 2 steps."""


def silent(line: str) -> None:
    """For load."""


def bits(runner: Runner) -> dict[str, bytes]:
    """All that this rank has."""
    strategy, optimizer = runner.replica.strategy, runner.replica.optimizer
    tensors = {f"{state.name} {index}": state.values for index, state in enumerate(strategy.states())}
    for index, shard in enumerate(strategy.shards):
        tensors |= {f"weight {index}": shard.bucket.data, f"main {index}": shard.main_param.data}
        tensors |= {f"{name} {index}": each for name, each in optimizer.state(shard.main_param).items()}
    tensors |= {f"{state} of {name}": each for (state, name), each in optimizer.tensor_state().items()}
    found = {
        name: each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()
    }
    found["counters"] = repr((strategy.counters(), optimizer.counters(), optimizer.updates)).encode()
    return found


def weights(runner: Runner) -> list[bytes]:
    return [value for name, value in sorted(bits(runner).items()) if name.startswith("weight ")]


def interrupted(
    context: RankContext, world: int, settings: dict[str, Any], folder: str, stops: list[int]
) -> list[list[bytes]]:
    """A run that saves after some steps, and runs that continue from each of them; the weights after each step."""
    torch.set_num_threads(1)
    config = tiny_config(world, **{**SETTINGS, **settings})
    runner, plain = Runner(build(context, config)), Runner(build(context, config))
    results, found = [], []
    for step in range(1, STEPS + 1):
        results.append(runner.step())
        plain.step()
        if step in stops:
            save(runner.replica, Path(folder, str(step)), runner.progress, tokenizer=None)
        found.append(weights(runner))
    whole = bits(runner)
    assert bits(plain) == whole, "saving changes nothing"
    for stop in stops:
        replica = build(context, config)
        progress = load(replica, Path(folder, str(stop)), tokenizer=None, log=silent)
        again = Runner(replica, progress)
        for step in range(stop, STEPS):
            ours, other = again.step(), results[step]
            assert (ours.loss, ours.grad_norm, ours.phase) == (other.loss, other.grad_norm, other.phase)
            assert weights(again) == found[step], f"from {stop}: step {step + 1}"
        after = bits(again)
        assert [name for name in whole if after[name] != whole[name]] == [], f"from {stop}"
    return found


CASES: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "adam": (2, {"dp": 2, "optimizer": "onebit-adam"}, [2, 3, 4, 6]),
    "lamb": (2, {"dp": 2, "optimizer": "onebit-lamb"}, [2, 3, 4, 6]),
    "lamb-bf16-bucket": (
        2,
        {"dp": 2, "optimizer": "onebit-lamb", "precision": "bf16", "onebit_scale": "bucket"},
        [2, 4],
    ),
    "zero-one": (2, {"dp": 2, **ZERO_ONE}, [2, 3, 4, 6, 8]),
    "zero-one-bf16": (2, {"dp": 2, **ZERO_ONE, "precision": "bf16"}, [3, 6]),
    "auto": (2, {"dp": 2, "optimizer": "onebit-adam", **AUTO}, [2, 3, 4, 5]),
    "adam-tp": (4, {"dp": 2, "tp": 2, "sequence_parallel": True, "optimizer": "onebit-adam"}, [5]),
    "lamb-pp": (4, {"dp": 2, "pp": 2, "num_layers": 2, "optimizer": "onebit-lamb"}, [5]),
    "zero-one-tp": (4, {"dp": 2, "tp": 2, **ZERO_ONE}, [6]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_it_goes_on_to_the_bit(case: str, tmp_path: Path) -> None:
    world, settings, stops = CASES[case]
    runs = run_ranks(world, interrupted, world, settings, str(tmp_path), stops)
    if world == 2:
        equal = [runs[0][step] == runs[1][step] for step in range(STEPS)]
        local = (6, 8, 9) if "zero-one" in case else ()
        assert equal == [step not in local for step in range(1, STEPS + 1)]


def owed(runner: Runner, name: str) -> dict[str, torch.Tensor]:
    """One of the strategy's states by tensor, 0 where it is another rank's."""
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


def begun(context: RankContext, folder: str, settings: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    runner = Runner(build(context, tiny_config(4, dp=4, **{**SETTINGS, **settings})))
    for _ in range(6):
        runner.step()
    save(runner.replica, Path(folder), runner.progress, tokenizer=None)
    return both(runner)


def gone_on(context: RankContext, folder: str, settings: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    replica = build(context, tiny_config(2, dp=2, **{**SETTINGS, **settings}))
    runner = Runner(replica, load(replica, Path(folder), tokenizer=None, log=silent))
    loaded, first = both(runner), weights(runner)
    phases = [runner.step().phase for _ in range(2)]
    return loaded, first, phases, weights(runner)


@pytest.mark.parametrize("settings", [{"optimizer": "onebit-lamb"}, ZERO_ONE])
def test_fewer_replicas_owe_what_more_did(settings: dict[str, Any], tmp_path: Path) -> None:
    """Each gets the mean of what the old ones owed; servers take over each other's chunks."""
    four = run_ranks(4, begun, str(tmp_path), settings)
    two = run_ranks(2, gone_on, str(tmp_path), settings)
    for name in two[0][0]["onebit_error"]:
        wanted = sum(rank["onebit_error"][name].double() for rank in four) / 4
        assert wanted.abs().max() > 0
        for loaded, *_ in two:
            assert torch.equal(loaded["onebit_error"][name], wanted.float()), name
        whole = sum(loaded["onebit_server_error"][name] for loaded, *_ in two)
        assert torch.equal(whole, sum(rank["onebit_server_error"][name] for rank in four)), name
    assert two[0][1] == two[1][1], "they start alike"
    assert two[0][2] == ["momentum"] * 2
    if settings is not ZERO_ONE:
        assert two[0][3] == two[1][3]


def moved(context: RankContext, folder: str) -> str:
    """A freeze step that is past in the checkpoint, changed."""
    settings = {**SETTINGS, "optimizer": "onebit-lamb", "freeze_step": 5}
    replica = build(context, tiny_config(2, dp=2, **settings))
    with pytest.raises(ConfigError) as caught:
        load(replica, Path(folder), tokenizer=None, log=silent)
    return str(caught.value)


def test_a_warm_up_that_is_over_cannot_be_moved(tmp_path: Path) -> None:
    run_ranks(4, begun, str(tmp_path), {"optimizer": "onebit-lamb"})
    for message in run_ranks(2, moved, str(tmp_path)):
        assert message.startswith("freeze_step is 5") and "after step 3" in message


def another(context: RankContext, folder: str, settings: dict[str, Any], to: dict[str, Any]) -> Any:
    """Four steps with one optimizer, then four with another one; its notes, and its states as they were taken up."""
    torch.set_num_threads(1)
    common = {**SETTINGS, "clip_grad": 0.0, "freeze_step": None}
    first = Runner(build(context, tiny_config(2, dp=2, **{**common, **settings})))
    for _ in range(4):
        first.step()
    save(first.replica, Path(folder), first.progress, tokenizer=None)
    replica = build(context, tiny_config(2, dp=2, **{**common, **to}))
    notes: list[str] = []
    progress = load(replica, Path(folder), tokenizer=None, log=notes.append)
    main = replica.strategy.shards[0].main_param
    begun = {name: values.clone() for name, values in replica.optimizer.state(main).items()}
    before = {name: values.clone() for name, values in first.replica.optimizer.state(main_of(first)).items()}
    runner = Runner(replica, progress)
    start = main.detach().clone()
    results = [runner.step() for _ in range(4)]
    assert all(math.isfinite(result.loss) for result in results)
    moved = float((main.detach() - start).abs().max())
    states = {key: float(value) for key, value in replica.optimizer.tensor_state().items()}
    return notes, before, begun, [result.phase for result in results], moved, states


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
def test_states_that_another_optimizer_does_not_have_start_anew(name: str, tmp_path: Path) -> None:
    """With a line in the log; the moments continue, and steps of the right size follow."""
    settings, to, fresh = SWITCHES[name]
    for notes, before, begun, phases, moved, states in run_ranks(2, another, str(tmp_path), settings, to):
        for state in fresh:
            assert sum(f"has no {state} for this run: it starts from 0" in note for note in notes) == 1
            assert not begun[state].any()
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(begun[state], before[state])
        assert phases == (["gradients"] * 2 + ["momentum"] * 2 if to["freeze_step"] == 6 else ["momentum"] * 4)
        assert 1e-3 < moved < 0.1
        for (state, tensor), value in states.items():
            assert 0.01 <= value <= 10.0, (state, tensor)
            assert state != "trust_factor" or 0.5 <= value < 1.5, "v' continues from v, not from 0"


def lacking(context: RankContext, folder: str) -> str:
    """SGD has left no moments for Adam."""
    settings = {**SETTINGS, "freeze_step": None}
    first = Runner(build(context, tiny_config(1, **settings, optimizer="sgd")))
    first.step()
    save(first.replica, Path(folder), first.progress, tokenizer=None)
    replica = build(context, tiny_config(1, **settings))
    with pytest.raises(CheckpointError) as caught:
        load(replica, Path(folder), tokenizer=None, log=silent)
    return str(caught.value)


def test_an_optimizer_that_needs_what_another_has_not_left(tmp_path: Path) -> None:
    message = lacking(RankContext(0), str(tmp_path))
    assert "was written with optimizer sgd and has no exp_avg, which adam needs" in message
    assert message.endswith("use --optimizer sgd, or --finetune to start over from the weights")


def apart(context: RankContext, folder: str) -> dict[str, torch.Tensor]:
    """Replicas of 0/1 Adam in a local step: the mean of their main parameters, by tensor."""
    torch.set_num_threads(1)
    runner = Runner(build(context, tiny_config(2, dp=2, **{**SETTINGS, **ZERO_ONE, "precision": "bf16"})))
    for _ in range(6):
        runner.step()
    save(runner.replica, Path(folder), runner.progress, tokenizer=None)
    found = {}
    for shard in runner.replica.strategy.shards:
        mean = runner.replica.strategy.gather(shard, shard.main_param.data).clone()
        runner.replica.topology.dp.all_reduce(mean)
        assert not torch.equal(mean / 2, shard.main_param.data), "they are apart"
        for placed in shard.bucket.placed:
            found[placed.parameter.info.spec.name] = mean[placed.start : placed.stop] / 2
    return found


def mains(context: RankContext, folder: str) -> dict[str, torch.Tensor]:
    """All-reduce and Adam continue from it: main parameters by tensor."""
    replica = build(context, tiny_config(2, dp=2, **{**SETTINGS, "freeze_step": None, "precision": "bf16"}))
    load(replica, Path(folder), tokenizer=None, log=silent)
    return {
        placed.parameter.info.spec.name: shard.main_param.data[placed.start : placed.stop].clone()
        for shard in replica.strategy.shards
        for placed in shard.bucket.placed
    }


def test_replicas_that_are_apart_leave_the_mean_with_all_its_digits(tmp_path: Path) -> None:
    wanted = run_ranks(2, apart, str(tmp_path))[0]
    for found in run_ranks(2, mains, str(tmp_path)):
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert torch.equal(found[name], values), name
