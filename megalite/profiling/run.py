"""The whole measurement: what is measured in which order, and for how long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megalite.config.errors import ConfigError
from megalite.profiling import collectives as between
from megalite.profiling import operations as pieces
from megalite.profiling import passes as stages
from megalite.profiling.timing import Timer
from megalite.topology.group import Group
from megalite.topology.topology import ProcessGroups

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_WEIGHTS = {"gemm": 0.2, "attention": 0.1, "memory": 0.1, "overheads": 0.05, "passes": 0.25, "collectives": 0.3}
"""Shares of the time; without a second rank, or on a GPU, the others share what is not measured there."""

_TURNS = 0.15  # of the time for what lies between ranks, where they outnumber the cores

_SAMPLES = 6
"""How often a measurement runs its operation at the least, warm-up included: what is longer than a sixth of its time is
not chosen."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    machine: between.Machine
    dtypes: tuple[str, ...]
    gemms: tuple[pieces.GemmTime, ...]
    attention: tuple[pieces.AttentionTime, ...]
    memory: tuple[pieces.MemoryTime, ...]
    overheads: stages.Overheads
    passes: tuple[stages.PassTime, ...]  # on a CPU: its rates depend on more than bytes
    collectives: tuple[between.CollectiveTime, ...]
    turns: between.TurnTime | None = None  # where ranks outnumber cores


def default_dtypes(device: torch.device) -> tuple[str, ...]:
    return ("bf16",) if device.type == "cuda" else ("fp32",)


def check_dtypes(names: Sequence[str], world: Group, device: torch.device) -> None:
    """Try a product of each type on every rank. Raises ConfigError: a rank's device does not have one; the same on
    every rank.

    Collectives: a gather over the world."""
    failed: ConfigError | None = None
    for name in names:
        try:
            x = torch.ones(16, 16, device=device).to(DTYPES[name])
            x @ x
            if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
                raise RuntimeError("only in emulation")
        except RuntimeError as error:
            works = next((known for known in ("fp32", "fp16") if known != name), "fp32")
            reason = str(error).splitlines()[0]
            failed = failed or ConfigError(
                f"--dtype {name} is not supported on {device.type} here ({reason}); use --dtype {works}"
            )
    world.agree(failed, device)


def measure(
    machine: between.Machine,
    timer: Timer,
    *,
    dtypes: Sequence[str],
    seconds: float,
    made: ProcessGroups | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Measurements:
    """Measure for about `seconds`. Every rank calls it at the same time; `made` is as for `Topology.create`.

    Collectives: those that are measured, and barriers and gathers over the timer's world."""
    left_out = set() if machine.ranks > 1 else {"collectives"}
    if machine.device_type != "cpu":
        left_out.add("passes")
    weights = {name: weight for name, weight in _WEIGHTS.items() if name not in left_out}
    share = {name: seconds * weight / sum(weights.values()) for name, weight in weights.items()}
    most_bytes = machine.memory_bytes / 8
    gemms: list[pieces.GemmTime] = []
    attention: list[pieces.AttentionTime] = []
    for name in dtypes:
        dtype = DTYPES[name]
        progress(f"matrix products in {name}")
        rate = pieces.first_rate(timer, dtype)
        budget = share["gemm"] / len(dtypes)
        # A tenth of a second for each of three products, or as many shapes as go with a quarter of that.
        count = max(4, min(16, int(budget / 0.3)))
        most = rate * budget / (3 * count * _SAMPLES)
        shapes = pieces.chosen_shapes(count=count, most_flops=most, most_bytes=most_bytes, itemsize=dtype.itemsize)
        gemms += pieces.measure_gemms(timer, dtype=dtype, name=name, shapes=shapes, seconds=budget)
        progress(f"attention in {name}")
        budget = share["attention"] / len(dtypes)
        # Attention reaches a fraction of the rate of plain products.
        most = rate * budget / (4 * 8 * _SAMPLES) / 2
        heads = pieces.attention_shapes(most_flops=most, most_bytes=most_bytes)
        attention += pieces.measure_attention(timer, dtype=dtype, name=name, shapes=heads, seconds=budget)
    progress("memory")
    # Four tensors of the largest size; 15 measurements at the most.
    most = pieces.first_bandwidth(timer) * share["memory"] / (15 * _SAMPLES * pieces.ADAM_BYTES)
    sizes = pieces.tensor_sizes(most_elements=min(most, most_bytes / 16))
    memory = list(pieces.measure_memory(timer, sizes=sizes, seconds=share["memory"]))
    progress("small operations")
    overheads = stages.measure_overheads(timer, dtype=DTYPES[dtypes[0]], seconds=share["overheads"])
    passes: list[stages.PassTime] = []
    if "passes" in share:
        progress("passes of small stages")
        name = dtypes[0]
        most = pieces.first_rate(timer, DTYPES[name]) * share["passes"] / (2 * len(stages.SHAPES) * _SAMPLES)
        passes += stages.measure_passes(timer, dtype=DTYPES[name], name=name, most_flops=most, seconds=share["passes"])
    collectives: list[between.CollectiveTime] = []
    turns: between.TurnTime | None = None
    if machine.ranks > 1:
        places = between.make_channels(machine, timer.world.rank, timer.device, made=made)
        seconds = share["collectives"]
        if machine.crowded and places[0].place == "inside":
            progress("what ranks that wait leave to others")
            turns = between.measure_turns(timer, places[0], seconds=_TURNS * seconds)
            seconds *= 1.0 - _TURNS
        collectives = _collectives(places, timer, seconds, most_bytes=most_bytes, progress=progress)
    return Measurements(
        machine=machine,
        dtypes=tuple(dtypes),
        gemms=tuple(gemms),
        attention=tuple(attention),
        memory=tuple(memory),
        overheads=overheads,
        passes=tuple(passes),
        collectives=tuple(collectives),
        turns=turns,
    )


def _collectives(
    places: Sequence[between.Channels],
    timer: Timer,
    seconds: float,
    *,
    most_bytes: float,
    progress: Callable[[str], None],
) -> list[between.CollectiveTime]:
    found: list[between.CollectiveTime] = []
    for channels in places:
        progress(f"collectives {channels.place} {'a node' if channels.place == 'inside' else 'nodes'}")
        budget = seconds / len(places)
        kinds = 1 + 4 * len(channels.groups)
        count = max(3, min(7, int(budget / kinds / 0.1)))
        largest = _largest_message(timer, channels, budget / kinds / count)
        sizes = between.message_sizes(largest=min(largest, int(most_bytes / 4), 1 << 28), count=count)
        found += between.measure_collectives(timer, channels, sizes=sizes, seconds=budget)
    return found


def _largest_message(timer: Timer, channels: between.Channels, seconds: float) -> int:
    """Bytes that an all-reduce over the largest group moves in a sixth of `seconds`; at least a mebibyte."""
    group, trial = channels.groups[-1], 1 << 20
    tensor = torch.zeros(trial // 4, device=timer.device)
    once = timer.over_ranks(timer.together(lambda: group.all_reduce(tensor), seconds=0.0)).seconds
    return max(trial, int(trial * seconds / (_SAMPLES * once)))
