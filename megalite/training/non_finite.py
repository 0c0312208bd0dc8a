"""Locates the origin of NaN and infinities, and keeps them out of checkpoints."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megalite.config.errors import NON_FINITE
from megalite.config.run import RunConfig
from megalite.data.loader import Microbatch
from megalite.data_parallel.buckets import has_memory
from megalite.topology.group import Group
from megalite.training.replica import Replica

_WEIGHTS, _OUTPUT, _LOSS, _GRADIENT = range(4)  # kinds of findings: the lowest is nearest to the cause

Finding = list[Any]  # JSON: [kind, three numbers that order findings of a kind, description]


class NonFiniteError(RuntimeError):
    """Loss, gradient or weights are NaN or infinite, and the run must stop."""

    exit_code = NON_FINITE


def is_finite(values: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, in one pass without a copy."""
    if values.numel() == 0 or not values.is_floating_point():
        return True
    return bool(torch.stack(torch.aminmax(values.detach())).isfinite().all())


def remedy(config: RunConfig, steps: int, *, in_weights: bool) -> str:
    """Suggest what may help against a non-finite loss, gradient or weight after `steps` steps of the run."""
    c = config.checkpoint
    if steps == 0:
        std = f"--init-method-std ({config.model.init_method_std:g})"
        origin = std if c.load is None else "the weights of --load"
        return f"No step has been taken, so --lr is not the cause: look at {origin} and at this batch"
    if not in_weights:
        return "Lower --lr, or raise --lr-warmup-iters, or look at this batch; --on-non-finite skip would leave it out"
    if c.load is not None or (c.save_interval is not None and steps >= c.save_interval):
        return "Continue from a checkpoint of a step before it, with --load and --ckpt-step"
    return "No checkpoint has been saved to continue from; start again with a lower --lr, and with --save-interval 100"


class OutputWatch:
    """Records the first non-finite output of a module, and its microbatch, inside `watching`.

    Submodules come before the modules that contain them. Forward-only programs run microbatches in order."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._microbatch: dict[int, int] = {}
        self._calls = 0
        self.found: tuple[int, int, int, str] | None = None
        """Microbatch, stage, number of this output on this rank, and the module's name."""

    @contextmanager
    def watching(self) -> Iterator["OutputWatch"]:
        handles = []
        for number, stage in self._replica.stages.items():
            handles.append(stage.register_forward_pre_hook(partial(self._begin, number)))
            for name, module in stage.named_modules():
                handles.append(module.register_forward_hook(partial(self._after, number, name or "the whole stage")))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, stage: int, module: torch.nn.Module, inputs: object) -> None:
        self._microbatch[stage] = self._microbatch.get(stage, -1) + 1

    def _after(self, stage: int, name: str, module: torch.nn.Module, inputs: object, output: object) -> None:
        self._calls += 1
        if isinstance(output, torch.Tensor) and not is_finite(output):
            bad = (self._microbatch.get(stage, 0), stage, self._calls, name)
            self.found = bad if self.found is None else min(self.found, bad)


def locate(
    replica: Replica, losses: Sequence[torch.Tensor], microbatches: Sequence[Microbatch], outputs: OutputWatch | None
) -> tuple[str, bool]:
    """Describe where a step's NaN or infinity appears first, the same on every rank; and whether weights contain it.

    Checks in this order: the weights, the outputs of a second forward, the losses, and the current gradients, summed
    over the data-parallel ranks; within each in the order of microbatches and of the network. `outputs` is None if
    there was no second forward.

    Collectives: a gather over the strategy's scope."""
    own = next(_findings(replica, losses, microbatches, outputs), None)
    everyone = replica.strategy.scope.gather_json(own)
    first = min((one for one in everyone if one is not None), key=lambda one: one[:4], default=None)
    if first is None:
        return "in no tensor that still exists", False
    kind, words = first[0], first[4]
    if kind in (_LOSS, _GRADIENT) and outputs is not None:
        words += "; the outputs of all modules were finite in a second forward of the same batch"
    return words, kind == _WEIGHTS


def _findings(
    replica: Replica, losses: Sequence[torch.Tensor], microbatches: Sequence[Microbatch], outputs: OutputWatch | None
) -> Iterator[Finding]:
    """Yield this rank's findings, nearest to the cause first."""
    place = place_of(replica)
    bad = _first_bad(replica, weights=True)
    if bad is not None:
        stage, index, name = bad
        words = f"the weights {name} are not finite on {place}, stage {stage}, and were not before the step either"
        yield [_WEIGHTS, stage, index, 0, words]
    if outputs is not None and outputs.found is not None:
        microbatch, stage, calls, name = outputs.found
        words = f"first in the output of {name}, stage {stage} on {place}, microbatch {microbatch}"
        yield [_OUTPUT, microbatch, stage, calls, words + _samples(microbatches, microbatch)]
    for microbatch, loss in enumerate(losses):
        if not is_finite(loss):
            words = f"the loss of microbatch {microbatch} on {place} is {float(loss)}"
            yield [_LOSS, microbatch, 0, 0, words + _samples(microbatches, microbatch)]
    bad = _first_bad(replica, weights=False)
    if bad is not None:
        stage, index, name = bad
        yield [_GRADIENT, stage, index, 0, f"first in the gradient of {name}, stage {stage} on {place}"]


def place_of(replica: Replica) -> str:
    """Return the rank and its coordinates: `rank 3 (tp 1, pp 1, dp 0)`."""
    topology = replica.topology
    axes = [axis for axis in ("tp", "cp", "pp", "dp") if getattr(topology, axis).size > 1]
    shown = ", ".join(f"{axis} {getattr(topology.coordinate, axis)}" for axis in axes)
    return f"rank {topology.rank}" + (f" ({shown})" if shown else "")


def _samples(microbatches: Sequence[Microbatch], microbatch: int) -> str:
    if microbatch >= len(microbatches):
        return ""
    ids = microbatches[microbatch].sample_ids
    return f" (sample {ids[0]})" if len(ids) == 1 else f" (samples {ids[0]} to {ids[-1]})"


def _first_bad(replica: Replica, *, weights: bool) -> tuple[int, int, str] | None:
    """Return stage, index in the stage and name of this rank's first parameter with non-finite weights or gradients."""
    bad: dict[torch.nn.Parameter, str] = {}
    for shard in replica.strategy.shards:
        # The reduced gradients that this rank owns, or, if it owns none, its unreduced gradients.
        values, first = shard.grad, shard.start
        if weights:
            state = replica.strategy.weights(shard)
            values, first = state.values, state.start
        elif shard.start >= shard.stop:
            values, first = shard.bucket.grad, 0
            if not has_memory(values):
                continue
        for placed, start, stop in shard.bucket.within(first, first + values.numel()):
            if not is_finite(values[start - first : stop - first]):
                bad[placed.parameter] = placed.parameter.info.spec.name
    for number, stage in sorted(replica.stages.items()):
        for index, parameter in enumerate(stage.parameters()):
            if parameter in bad:
                return number, index, bad[parameter]
    return None


def require_finite(saved: Sequence[Any], step: int, *, newest: str, world: Group) -> None:
    """Raise NonFiniteError on all ranks if any tensor to be saved is not finite.

    Reading all tensors once takes a small part of the time of writing them.

    Collectives: a gather over `world`."""
    floats = [(entry, values) for entry, values in saved if values.is_floating_point() and values.numel()]
    bad: str | None = None
    if floats:
        # Wait for the device once, not once per tensor.
        finite = torch.stack([torch.stack(torch.aminmax(values)).isfinite().all() for _, values in floats])
        with world.heartbeat.synchronise():
            flags = finite.tolist()
        names = [f"{entry.state or 'weights'} of {entry.spec.name}" for entry, _ in floats]
        bad = next((name for name, good in zip(names, flags, strict=True) if not good), None)
    for rank, name in enumerate(world.gather_json(bad)):
        if name is not None:
            raise NonFiniteError(
                f"step {step}: {name} are not finite on rank {rank}: no checkpoint is written, {newest}; continue from "
                "there, with a lower --lr or without the bad data (--no-check-weights-before-save would save it anyway)"
            )
