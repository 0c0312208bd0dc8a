"""costs.json: what the stages of a pipeline cost and hold, as measured or estimated.

```json
{"unit": "ms", "forward": 18.5, "input_grad": 18.1, "weight_grad": 9.3, "p2p": 0.6,
 "links": {"3->4": {"latency": 0.9, "seconds_per_message": 0.2}},
 "memory": {"activation": 3.2e9, "deferred": 1.1e9, "kept_input": 1.6e7, "message": 1.6e7}}
```
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.errors import ConfigError
from megalite.config.reading import read_text
from megalite.config.values import nearest
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.simulate import Costs, Link

PerStage = float | tuple[float, ...]
"""A number: of each rank's whole share of the model, divided evenly over its stages. A tuple: one number per rank (its
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
    kept_input: float = 0.0  # of each stage: ranks with more stages keep more inputs
    message: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs before it is known the number of stages per rank: the same table serves schedules with one and with several.

    Without a file: forward, input gradient and weight gradient of a rank's share cost 1 each.
    """

    source: str = "default costs"  # where it comes from, for messages
    forward: PerStage = 1.0
    input_grad: PerStage | None = 1.0  # None: the rest of `backward`
    weight_grad: PerStage | None = 1.0  # None: half of `backward`
    backward: PerStage | None = None  # None: the sum of its halves
    recompute: PerStage | None = None
    """None: nothing is recomputed, except in schedules with R actions, where each costs a forward."""
    p2p: float = 0.0
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    memory: MemoryTable | None = None
    unit: str | None = None
    """Of the times; None if the file does not say."""

    def costs(self, placement: tuple[int, ...], *, ahead: bool = False) -> Costs:
        """The costs of each stage of a pipeline; `placement`: the rank of each, `ahead`: the schedule has R actions."""
        spread = {
            key: self._spread(key, getattr(self, key), placement) for key in _TIMES if getattr(self, key) is not None
        }
        forward, weight = spread["forward"], spread.get("weight_grad")
        backward = spread.get("backward")
        if backward is None:
            backward = tuple(map(add, spread["input_grad"], spread["weight_grad"]))
        for stage, (part, whole) in enumerate(zip(weight or backward, backward, strict=True)):
            if part > whole:
                self._fail(
                    f"weight_grad of stage {stage} is {part:g}, more than its backward {whole:g}, of which it is a part; "
                    f"use at most {whole:g}, or give input_grad instead of backward"
                )
        if not any(forward) and not any(backward):
            self._fail("forward and backward are all 0, so no time passes; use e.g. forward 1, backward 2")
        last = max(placement)
        for source, destination in self.links:
            if max(source, destination) > last:
                self._fail(f'links has "{source}->{destination}", but there are {last + 1} ranks; use 0 to {last}')
        recompute = spread.get("recompute", forward if ahead else None)
        return Costs(
            forward=forward, backward=backward, weight_grad=weight, recompute=recompute, p2p=self.p2p, links=self.links
        )

    def sizes(self, placement: tuple[int, ...]) -> Sizes | None:
        """The bytes of each stage of a pipeline; None if the table has no memory."""
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
            wanted = f"{num_stages}, one per stage"
            if num_ranks != num_stages:
                wanted += f", or {num_ranks}, one per rank"
            self._fail(
                f"{key} has {len(value)} values, {reprlib.repr(list(value))}, for {num_stages} stages on {num_ranks} "
                f"ranks; give {wanted}, or a single number"
            )
        of_ranks = value if isinstance(value, tuple) else (value,) * num_ranks
        return tuple(of_ranks[rank] / placement.count(rank) for rank in placement)

    def _fail(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {reason}")


class _Mistake(ValueError):
    """What is wrong in the file; the name of the file comes before it."""


def read_costs(path: Path) -> CostTable:
    """The table of a file, or a ConfigError that names it."""
    try:
        data = json.loads(read_text(path, "utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a JSON file with --costs") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text; give a JSON file with --costs") from None
    except _Mistake as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'{path}: it is not JSON: {error}; expected e.g. {{"forward": 1, "input_grad": 1, "weight_grad": 1}}'
        ) from None
    return parse_costs(data, source=str(path))


def parse_costs(data: object, *, source: str = "costs") -> CostTable:
    """The table that parsed JSON spells, or a ConfigError.

    Keys: `forward`; `input_grad` and `weight_grad`, or `backward` (alone half of it is the weight gradient; neither:
    two forwards); `recompute`, `p2p`, `links`, `memory`, `unit`.
    """
    try:
        return _table(data, source)
    except _Mistake as mistake:
        raise ConfigError(f"{source}: {mistake}") from None


def _table(data: object, source: str) -> CostTable:
    table = _object(data, _KEYS, "the file")
    times = {key: _per_stage(table[key], key) for key in _TIMES if key in table}
    if "forward" not in times:
        raise _Mistake('there is no forward; add e.g. "forward": 1, the time of one microbatch through a rank')
    if "backward" in times and "input_grad" in times:
        raise _Mistake(
            f"backward {_show(table['backward'])} and input_grad {_show(table['input_grad'])} are both given, but "
            f"backward is input_grad + weight_grad; keep input_grad and weight_grad, or backward"
        )
    if "backward" not in times and ("input_grad" in times) != ("weight_grad" in times):
        there, missing = sorted(("input_grad", "weight_grad"), key=lambda key: key not in times)
        raise _Mistake(
            f"{there} {_show(table[there])} is given without {missing}; add {missing}, or give backward, their sum"
        )
    if "backward" not in times and "input_grad" not in times:
        forward = times["forward"]
        times["backward"] = tuple(2 * part for part in forward) if isinstance(forward, tuple) else 2 * forward
    unit = table.get("unit")
    if unit is not None and (not isinstance(unit, str) or unit not in UNITS):
        raise _Mistake(f"unit is {_show(unit)}; use one of {', '.join(UNITS)}, or leave it out")
    return CostTable(
        source=source,
        forward=times["forward"],
        input_grad=times.get("input_grad"),
        weight_grad=times.get("weight_grad"),
        backward=times.get("backward"),
        recompute=times.get("recompute"),
        p2p=_number(table.get("p2p", 0.0), "p2p"),
        links=_links(table.get("links", {})),
        memory=_memory(table["memory"]) if "memory" in table else None,
        unit=unit,
    )


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Python's own reader would silently keep the last of two equal keys."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Mistake(f"it has {key} twice in one object; keep one of them")
        found[key] = value
    return found


def _object(data: object, keys: Sequence[str], where: str, needed: str | None = None) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Mistake(f"{where} is {_show(data)}; expected an object with {', '.join(keys)}")
    unknown = next((key for key in data if key not in keys), None)
    if unknown is not None:
        raise _Mistake(f"{where} has an unknown key {unknown}{nearest(unknown, keys)} (keys: {', '.join(keys)})")
    if needed is not None and needed not in data:
        raise _Mistake(f'{where} has no {needed}; add e.g. "{needed}": 0.5')
    return data


def _links(data: object) -> dict[tuple[int, int], Link]:
    if not isinstance(data, dict):
        raise _Mistake(f'links is {_show(data)}; expected e.g. {{"0->1": {{"latency": 0.5}}}}')
    links = {}
    for name, values in data.items():
        ends = re.fullmatch(r"\s*([0-9]{1,8})\s*->\s*([0-9]{1,8})\s*", name)
        if ends is None:
            raise _Mistake(f'links has {_show(name)}; a link is named by two ranks, such as "0->1"')
        pair = int(ends[1]), int(ends[2])
        if pair[0] == pair[1] or pair in links:
            wrong = "leads from a rank to itself" if pair[0] == pair[1] else "is given twice"
            raise _Mistake(f"link {_show(name)} {wrong}; give each pair of two ranks once")
        where = f"links {name}"
        values = _object(values, _LINK_KEYS, where, "latency")
        links[pair] = Link(*(_number(values.get(key, 0.0), f"{where} {key}") for key in _LINK_KEYS))
    return links


def _memory(data: object) -> MemoryTable:
    table = _object(data, _MEMORY_KEYS, "memory", "activation")
    return MemoryTable(
        activation=_per_stage(table["activation"], "memory.activation"),
        deferred=_per_stage(table.get("deferred", 0.0), "memory.deferred"),
        kept_input=_number(table.get("kept_input", 0.0), "memory.kept_input"),
        message=_number(table.get("message", 0.0), "memory.message"),
    )


def _per_stage(value: object, key: str) -> PerStage:
    if isinstance(value, list):
        return tuple(_number(part, f"{key}[{index}]") for index, part in enumerate(value))
    return _number(value, key)


def _number(value: object, key: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
        return float(value)
    raise _Mistake(f"{key} is {_show(value)}; use a number from 0 to {_LARGEST:g}")


def _show(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) and len(value) < 40 else reprlib.repr(value)
