"""costs.json: what the stages of a pipeline cost and hold, as measured or estimated by whoever wrote the file.

```json
{"unit": "ms", "forward": 18.5, "input_grad": 18.1, "weight_grad": 9.3, "p2p": 0.6,
 "links": {"3->4": {"latency": 0.9, "seconds_per_message": 0.2}},
 "memory": {"activation": 3.2e9, "deferred": 1.1e9, "kept_input": 1.6e7, "message": 1.6e7}}
```
"""

import json
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.errors import ConfigError
from megalite.config.reading import read_text
from megalite.config.values import nearest
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.simulate import Costs, Link

PerStage = float | tuple[float, ...]
"""A number: of each rank's whole share of the model, divided evenly over its stages. A tuple: one number a rank (its
whole share, divided likewise), or one a virtual stage."""

UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds in each unit that a file may name."""

_LARGEST = 1e15
_TIMES = ("forward", "backward", "input_grad", "weight_grad", "recompute")
_KEYS = (*_TIMES, "p2p", "links", "memory", "unit")
_LINK_KEYS = ("latency", "seconds_per_message")
_MEMORY_KEYS = ("activation", "deferred", "kept_input", "message")


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of one microbatch; see `Sizes` for what is alive when."""

    activation: PerStage
    deferred: PerStage = 0.0
    kept_input: float = 0.0
    """Of each stage: a rank with more stages keeps more inputs."""
    message: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs before it is known how many stages a rank has: the same table serves schedules with one and with several.

    Without a file: forward, input gradient and weight gradient of a rank's share cost 1 each.
    """

    source: str = "default costs"
    """Where it comes from, for messages."""
    forward: PerStage = 1.0
    input_grad: PerStage | None = 1.0
    """None: the rest of `backward`."""
    weight_grad: PerStage | None = 1.0
    """None: half of `backward`."""
    backward: PerStage | None = None
    """None: the sum of its halves."""
    recompute: PerStage | None = None
    """None: nothing is recomputed, except in schedules with R actions, where each costs a forward."""
    p2p: float = 0.0
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    memory: MemoryTable | None = None
    unit: str | None = None
    """Of the times; None if the file does not say."""

    def costs(self, placement: tuple[int, ...], *, ahead: bool = False) -> Costs:
        """The costs of each stage of a pipeline.

        Args:
            placement: Per virtual stage, its rank.
            ahead: The schedule has R actions.

        Raises:
            ConfigError: a list has neither as many values as ranks nor as stages, a link is between ranks that do not
                exist, a weight gradient costs more than the backward of which it is a part, or all costs are 0.
        """
        forward = self._spread("forward", self.forward, placement)
        weight = None if self.weight_grad is None else self._spread("weight_grad", self.weight_grad, placement)
        if self.backward is not None:
            backward = self._spread("backward", self.backward, placement)
        else:
            assert self.input_grad is not None and weight is not None
            inputs = self._spread("input_grad", self.input_grad, placement)
            backward = tuple(map(sum, zip(inputs, weight, strict=True)))
        recompute = (forward if ahead else None) if self.recompute is None else None
        if self.recompute is not None:
            recompute = self._spread("recompute", self.recompute, placement)
        for stage, (part, whole) in enumerate(zip(weight or backward, backward, strict=True)):
            if part > whole:
                self._fail(
                    f"weight_grad of stage {stage} is {part:g}, more than its backward {whole:g}, of which it is a part; "
                    f"use at most {whole:g}, or give input_grad instead of backward"
                )
        if not any(forward) and not any(backward):
            self._fail("forward and backward are all 0, so no time passes; use e.g. forward 1, backward 2")
        num_ranks = max(placement) + 1
        for source, destination in self.links:
            if max(source, destination) >= num_ranks:
                self._fail(
                    f'links has "{source}->{destination}", but there are {num_ranks} ranks; use 0 to {num_ranks - 1}'
                )
        return Costs(
            forward=forward, backward=backward, weight_grad=weight, recompute=recompute, p2p=self.p2p, links=self.links
        )

    def sizes(self, placement: tuple[int, ...]) -> Sizes | None:
        """The bytes of each stage of a pipeline; None if the table has no memory.

        Raises:
            ConfigError: a list has neither as many values as ranks nor as stages.
        """
        if self.memory is None:
            return None
        return Sizes(
            activation=self._spread("memory.activation", self.memory.activation, placement),
            deferred=self._spread("memory.deferred", self.memory.deferred, placement),
            kept_input=(self.memory.kept_input,) * len(placement),
            message=self.memory.message,
        )

    def _spread(self, key: str, value: PerStage, placement: tuple[int, ...]) -> tuple[float, ...]:
        num_ranks, num_stages = max(placement) + 1, len(placement)
        if isinstance(value, tuple) and len(value) == num_stages:
            return value
        if isinstance(value, tuple) and len(value) != num_ranks:
            wanted = f"{num_stages}, one a stage"
            if num_ranks != num_stages:
                wanted += f", or {num_ranks}, one a rank"
            self._fail(
                f"{key} has {len(value)} values, {reprlib.repr(list(value))}, for {num_stages} stages on {num_ranks} "
                f"ranks; give {wanted}, or a single number"
            )
        of_ranks = value if isinstance(value, tuple) else (value,) * num_ranks
        stages_of = Counter(placement)
        return tuple(of_ranks[rank] / stages_of[rank] for rank in placement)

    def _fail(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {reason}")


def read_costs(path: Path) -> CostTable:
    """The table of a file.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds what `parse_costs` refuses.
    """
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}; give a JSON file with --costs") from None
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except _DoubledKey as error:
        raise ConfigError(f"{path}: it has {error} twice in one object; keep one of them") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'{path}: it is not JSON: {error}; expected e.g. {{"forward": 1, "input_grad": 1, "weight_grad": 1}}'
        ) from None
    return parse_costs(data, source=str(path))


def parse_costs(data: object, *, source: str = "costs") -> CostTable:
    """The table that parsed JSON spells.

    Keys: `forward`; `input_grad` and `weight_grad`, or `backward` (alone half of it is the weight gradient; neither:
    two forwards); `recompute`, `p2p`, `links`, `memory`, `unit`.

    Raises:
        ConfigError: unknown keys, values that are not numbers from 0 up, keys that contradict or miss one another.
    """
    table = _object(data, _KEYS, source, "the file")
    times = {key: _per_stage(table[key], source, key) for key in _TIMES if key in table}
    if "forward" not in times:
        raise ConfigError(
            f'{source}: there is no forward; add e.g. "forward": 1, the time of one microbatch through a rank'
        )
    if "backward" in times and "input_grad" in times:
        raise ConfigError(
            f"{source}: backward {_show(table['backward'])} and input_grad {_show(table['input_grad'])} are both given, "
            f"but backward is input_grad + weight_grad; keep input_grad and weight_grad, or backward"
        )
    if "backward" not in times and ("input_grad" in times) != ("weight_grad" in times):
        there, missing = sorted(("input_grad", "weight_grad"), key=lambda key: key not in times)
        raise ConfigError(
            f"{source}: {there} {_show(table[there])} is given without {missing}; add {missing}, or give backward, their "
            f"sum"
        )
    backward = times.get("backward")
    if backward is None and "input_grad" not in times:
        forward = times["forward"]
        backward = tuple(2 * part for part in forward) if isinstance(forward, tuple) else 2 * forward
    unit = table.get("unit")
    if unit is not None and (not isinstance(unit, str) or unit not in UNITS):
        raise ConfigError(f"{source}: unit is {_show(unit)}; use one of {', '.join(UNITS)}, or leave it out")
    return CostTable(
        source=source,
        forward=times["forward"],
        input_grad=times.get("input_grad"),
        weight_grad=times.get("weight_grad"),
        backward=backward,
        recompute=times.get("recompute"),
        p2p=_number(table.get("p2p", 0.0), source, "p2p"),
        links=_links(table.get("links", {}), source),
        memory=_memory(table["memory"], source) if "memory" in table else None,
        unit=unit,
    )


class _DoubledKey(Exception):
    """A key that occurs twice; Python's reader would silently keep the last."""


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    doubled = [key for key, count in counts.items() if count > 1]
    if doubled:
        raise _DoubledKey(doubled[0])
    return dict(pairs)


def _object(data: object, keys: Sequence[str], source: str, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: {where} is {_show(data)}; expected an object with {', '.join(keys)}")
    unknown = [key for key in data if key not in keys]
    if unknown:
        raise ConfigError(
            f"{source}: {where} has an unknown key {unknown[0]}{nearest(unknown[0], keys)} (keys: {', '.join(keys)})"
        )
    return data


def _links(data: object, source: str) -> dict[tuple[int, int], Link]:
    if not isinstance(data, dict):
        raise ConfigError(f'{source}: links is {_show(data)}; expected e.g. {{"0->1": {{"latency": 0.5}}}}')
    links = {}
    for name, values in data.items():
        ends = [end.strip() for end in name.split("->")]
        if len(ends) != 2 or not all(end.isascii() and end.isdigit() and len(end) < 9 for end in ends):
            raise ConfigError(f'{source}: links has {_show(name)}; a link is named by two ranks, such as "0->1"')
        pair = (int(ends[0]), int(ends[1]))
        if pair[0] == pair[1] or pair in links:
            wrong = "leads from a rank to itself" if pair[0] == pair[1] else "is given twice"
            raise ConfigError(f"{source}: link {_show(name)} {wrong}; give each pair of two ranks once")
        where = f"links {name}"
        values = _object(values, _LINK_KEYS, source, where)
        if "latency" not in values:
            raise ConfigError(f'{source}: {where} has no latency; add e.g. "latency": 0.5')
        links[pair] = Link(*(_number(values.get(key, 0.0), source, f"{where} {key}") for key in _LINK_KEYS))
    return links


def _memory(data: object, source: str) -> MemoryTable:
    table = _object(data, _MEMORY_KEYS, source, "memory")
    if "activation" not in table:
        raise ConfigError(
            f'{source}: memory has no activation; add e.g. "activation": 1e9, bytes of one microbatch on a rank'
        )
    return MemoryTable(
        activation=_per_stage(table["activation"], source, "memory.activation"),
        deferred=_per_stage(table.get("deferred", 0.0), source, "memory.deferred"),
        kept_input=_number(table.get("kept_input", 0.0), source, "memory.kept_input"),
        message=_number(table.get("message", 0.0), source, "memory.message"),
    )


def _per_stage(value: object, source: str, key: str) -> PerStage:
    if isinstance(value, list):
        return tuple(_number(part, source, f"{key}[{index}]") for index, part in enumerate(value))
    return _number(value, source, key)


def _number(value: object, source: str, key: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
        return float(value)
    raise ConfigError(f"{source}: {key} is {_show(value)}; use a number from 0 to {_LARGEST:g}")


def _show(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) and len(value) < 40 else reprlib.repr(value)
