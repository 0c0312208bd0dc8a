"""Read costs.json: times and memory of pipeline stages, measured or estimated.

```json
{"unit": "ms", "forward": 18.5, "input_grad": 18.1, "weight_grad": 9.3, "p2p": 0.6,
 "links": {"3->4": {"latency": 0.9, "seconds_per_message": 0.2}},
 "memory": {"activation": 3.2e9, "deferred": 1.1e9, "kept_input": 1.6e7, "message": 1.6e7}}
```"""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.errors import ConfigError, shortened
from megalite.config.reading import build, number, read_json
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.simulate import Costs, Link

PerStage = float | tuple[float, ...]
"""Either one number per rank or one per virtual stage; a single number applies to every rank. The number of a rank is
divided evenly over its stages."""

UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Allowed units and their length in seconds."""

_TIMES = ("forward", "backward", "input_grad", "weight_grad", "recompute")
_AMOUNT = {"least": 0.0, "most": 1e15}


def _per_stage(value: Any, where: str) -> PerStage:
    if isinstance(value, list):
        return tuple(number(float, part, f"{where}[{index}]", _AMOUNT) for index, part in enumerate(value))
    return number(float, value, where, _AMOUNT)


def _links(value: Any, where: str) -> dict[tuple[int, int], Link]:
    if not isinstance(value, dict):
        raise ConfigError(f'{where} takes e.g. {{"0->1": {{"latency": 0.5}}}}, got {shortened(value)}')
    links: dict[tuple[int, int], Link] = {}
    for name, link in value.items():
        ends = re.fullmatch(r"\s*([0-9]{1,8})\s*->\s*([0-9]{1,8})\s*", name)
        if ends is None:
            raise ConfigError(f'{where} has {shortened(name)}; a link is named by two ranks, such as "0->1"')
        pair = int(ends[1]), int(ends[2])
        if pair[0] == pair[1] or pair in links:
            wrong = "joins the same rank twice" if pair[0] == pair[1] else "is listed twice"
            raise ConfigError(f"{where}: {name} {wrong}; list each pair of two ranks once")
        links[pair] = Link(**vars(build(_Link, link, f"{where}: {name}")))
    return links


_STAGES = {"read": _per_stage, "example": 1.0}


@dataclass(frozen=True, kw_only=True)
class _Link:
    """A `Link` as a file spells it."""

    latency: float = field(metadata=_AMOUNT)
    seconds_per_message: float = field(default=0.0, metadata=_AMOUNT)


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of one microbatch; `Sizes` defines when each is alive."""

    activation: PerStage = field(metadata=_STAGES)
    deferred: PerStage = field(default=0.0, metadata=_STAGES)
    kept_input: float = field(default=0.0, metadata=_AMOUNT)  # of each stage: ranks with more stages keep more inputs
    message: float = field(default=0.0, metadata=_AMOUNT)


@dataclass(frozen=True, kw_only=True)
class _CostsFile:
    forward: PerStage = field(metadata=_STAGES)
    input_grad: PerStage | None = field(default=None, metadata=_STAGES)  # None: the rest of `backward`
    weight_grad: PerStage | None = field(default=None, metadata=_STAGES)  # None: half of `backward`
    backward: PerStage | None = field(default=None, metadata=_STAGES)  # None: the sum of its halves
    recompute: PerStage | None = field(default=None, metadata=_STAGES)
    """None: nothing is recomputed, except in schedules with R actions, where each costs a forward."""
    p2p: float = field(default=0.0, metadata=_AMOUNT)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, metadata={"read": _links})
    memory: MemoryTable | None = None
    unit: str | None = None  # of the times; None if the file does not say


@dataclass(frozen=True, kw_only=True)
class CostTable(_CostsFile):
    """Costs that do not depend on the number of stages per rank, so that one table serves several schedules.

    Default without a file: forward, input gradient and weight gradient of each rank's share cost 1 each."""

    forward: PerStage = 1.0
    input_grad: PerStage | None = 1.0
    weight_grad: PerStage | None = 1.0
    source: str = "default costs"  # the file, for error messages

    def costs(self, placement: tuple[int, ...], *, ahead: bool = False) -> Costs:
        """Return the costs of each stage. `placement`: rank of each stage; `ahead`: the schedule has R actions."""
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
        """Return the bytes of each stage of a pipeline, or None if the table has no memory."""
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


def read_costs(path: Path) -> CostTable:
    """Read the table of a file. Raise ConfigError, which names the file, if it is invalid."""
    example = '{"forward": 1, "input_grad": 1, "weight_grad": 1}'
    return parse_costs(read_json(path, "costs file", example), source=str(path))


def parse_costs(data: Any, *, source: str = "costs") -> CostTable:
    """Convert parsed JSON to a table. Raise ConfigError if it is invalid.

    Keys: `forward`; `input_grad` and `weight_grad`, or `backward` (half of it is then the weight gradient; default: two
    forwards); `recompute`, `p2p`, `links`, `memory`, `unit`."""
    values = vars(build(_CostsFile, data, source))
    forward, backward, inner, weight = (values[key] for key in ("forward", "backward", "input_grad", "weight_grad"))
    if backward is not None and inner is not None:
        raise ConfigError(
            f"{source}: backward {backward} and input_grad {inner} are both set, but backward is input_grad + "
            "weight_grad; keep input_grad and weight_grad, or backward"
        )
    if backward is None and (inner is None) != (weight is None):
        present, missing = ("input_grad", "weight_grad") if weight is None else ("weight_grad", "input_grad")
        raise ConfigError(f"{source}: {present} is set without {missing}; add it, or set backward, their sum")
    if backward is None and inner is None:
        values["backward"] = tuple(2 * part for part in forward) if isinstance(forward, tuple) else 2 * forward
    if values["unit"] not in (None, *UNITS):
        raise ConfigError(f"{source}: unit is {values['unit']}; use one of {', '.join(UNITS)}, or leave it out")
    return CostTable(**values, source=source)
