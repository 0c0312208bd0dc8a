"""The complete state of a run on one rank, and comparison of runs that resume from checkpoints."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.config.run import RunConfig
from megalite.training.replica import Replica, consensus
from megalite.training.resume import load
from megalite.training.saving import save
from megalite.training.state_tensors import flat_states, matrix_states, tensor_states
from tests.support.ranks import RankContext
from tests.support.tiny import Runner, build, tiny_config


def silent(line: str) -> None:
    """Discard log lines."""


def state_copies(replica: Replica) -> dict[str, torch.Tensor]:
    """Copy weights, main parameters, states and counters."""
    strategy, optimizer = replica.strategy, replica.optimizer
    found: dict[str, torch.Tensor] = {}
    for number, shard in enumerate(strategy.shards):
        found[f"{number} weights"] = strategy.weights(shard).values
        found[f"{number} main"] = shard.main
        for state in flat_states(replica, shard):
            found[f"{number} {state.name}"] = state.values
    for number, state in enumerate(strategy.states()):
        found[f"state {number} {state.name}"] = state.values
    for number, whole in enumerate(tensor_states(replica)):
        found[f"tensor state {number} {whole.name}"] = whole.values
    for name, spec, values in matrix_states(replica):
        found[f"matrix state {name} {spec.name} {spec.slice}"] = values
    for buffer in replica.buffers:
        found[f"buffer {buffer.info.spec.name}"] = buffer.data
    strategy.wait_for_parameters()
    found = {name: values.clone() for name, values in found.items()}
    numbers = str((strategy.counters(), optimizer.counters(), optimizer.updates))
    found["counters"] = torch.frombuffer(bytearray(numbers.encode()), dtype=torch.uint8)
    return found


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name, values in before.items() if not torch.equal(after[name], values)]


def hashed(values: torch.Tensor) -> str:
    return hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def hashes(replica: Replica) -> dict[str, str]:
    """Hash all of `state_copies` and the loss scaler's state. Omits states that matter only when an outer mean arrives, as its
    time of arrival varies."""
    late = ("outer_mean", "sync_change", *(["anchor"] if replica.config.parallel.dp_strategy == "local-sgd" else []))
    found = {name: hashed(values) for name, values in state_copies(replica).items() if not name.endswith(late)}
    return found | {"scaler": str(replica.scaler.state())}


def continued(
    context: RankContext, config: RunConfig, folder: str | Path, log: Callable[[str], None] = silent
) -> Runner:
    """Resume from the checkpoint in a folder."""
    replica = build(context, config)
    return Runner(replica, load(replica, Path(folder), tokenizer=None, log=log))


def save_run(runner: Runner, folder: str | Path) -> Path:
    return save(runner.replica, Path(folder), runner.progress, tokenizer=None)


def interrupted(
    context: RankContext, world: int, settings: dict[str, Any], folder: str, steps: int, stops: Sequence[int]
) -> list[str]:
    """Compare runs with an uninterrupted one and list differences: a run that evaluates and saves at `stops`, and runs that
    resume from its checkpoints. For run_ranks."""
    plain = Runner(build(context, tiny_config(world, **settings)))
    saving = Runner(build(context, tiny_config(world, **settings)))
    wanted: list[tuple[str, dict[str, str]]] = []
    faults: list[str] = []

    def step(runner: Runner) -> tuple[str, dict[str, str]]:
        result = runner.step()
        numbers = (result.loss, result.grad_norm, result.lr, result.loss_scale, result.skipped, result.phase)
        return repr(numbers), hashes(runner.replica)

    def compare(name: str, found: tuple[str, dict[str, str]], at: int) -> None:
        numbers, state = wanted[at - 1]
        differing = [key for key in state if found[1].get(key) != state[key]]
        if differing or found[0] != numbers:
            faults.append(f"{name} at step {at}: {found[0]}, not {numbers}; {differing}")

    for at in range(1, steps + 1):
        wanted.append(step(plain))
        numbers, _ = step(saving)
        if at in stops:
            with consensus(saving.replica):
                saving.evaluate()
            save_run(saving, folder)
        compare("the run that saves", (numbers, hashes(saving.replica)), at)
    for stop in stops:
        runner = continued(context, tiny_config(world, **settings, load=folder, ckpt_step=stop), folder)
        compare(f"loaded from {stop}", (wanted[stop - 1][0], hashes(runner.replica)), stop)
        for at in range(stop + 1, steps + 1):
            compare(f"from {stop}", step(runner), at)
        runner.replica.strategy.close()
    for runner in (plain, saving):
        runner.replica.strategy.close()
    return faults
