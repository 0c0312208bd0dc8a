"""Measured steps in a table: a CSV file with a line for each, its settings by name."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.files import level_from_text, read_preset
from megalite.config.merge import merge
from megalite.config.reading import read_input
from megalite.config.validate import validate
from megalite.planner.cost.calibrate import Measured

RANKS = "gpus"
TIMES = ("seconds", "tokens_per_second", "tokens_per_second_per_gpu")
_OTHERS = ("preset", "source", RANKS, *TIMES)
_HOW = f"a line of names comes first: {RANKS}, one of {', '.join(TIMES)}, and settings such as tp or hidden_size"


@dataclass(frozen=True)
class Row:
    """A line of the table. `cells` are those that have something in them."""

    number: int
    cells: Mapping[str, str]
    measured: Measured


def read_rows(path: Path) -> list[Row]:
    """Columns: `gpus`; the time of a step in `seconds`, or its tokens per second, of all ranks or of one; `preset`; and any
    settings. `source` is for people. Empty cells stay at the preset or the default. Raises ConfigError, with the line."""
    reader = csv.DictReader(io.StringIO(read_input(path, "table")), skipinitialspace=True)
    names = [name or "" for name in reader.fieldnames or ()]
    if RANKS not in names or not any(name in names for name in TIMES):
        raise ConfigError(f"table {path} has columns {', '.join(names)[:200] or 'without names'}; {_HOW}")
    rows = []
    for line in reader:
        where = f"table {path}, line {reader.line_num}"
        if None in line or None in line.values():
            raise ConfigError(f"{where} has more or fewer cells than the {len(names)} names of the first line")
        rows.append(_row(reader.line_num, {name: cell.strip() for name, cell in line.items() if cell.strip()}, where))
    return rows


def _row(number: int, cells: Mapping[str, str], where: str) -> Row:
    ranks = _number(cells, RANKS, where)
    if ranks != int(ranks):
        raise ConfigError(f"{where}: {RANKS} is {cells[RANKS]}; it is a whole number")
    settings = "".join(f"{name}: {cell}\n" for name, cell in cells.items() if name not in _OTHERS)
    levels = [read_preset(cells["preset"])] if "preset" in cells else []
    merged = merge([*levels, level_from_text(settings or "{}", where)])
    try:
        config = validate(merged.config, int(ranks), merged.explicit)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if config.model.vocab_size is None:
        raise ConfigError(f"{where} says no vocab_size; add the column, e.g. 50257")
    times = [name for name in TIMES if name in cells]
    if len(times) != 1:
        raise ConfigError(f"{where} has {' and '.join(times) or 'no time'}; give one of {', '.join(TIMES)}")
    value = _number(cells, times[0], where)
    if times[0] == "seconds":
        return Row(number, cells, Measured(config, value))
    assert config.training.global_batch_size is not None, "validate() resolves it"
    tokens = config.training.global_batch_size * config.training.seq_length
    return Row(number, cells, Measured(config, tokens / value / (ranks if times[0].endswith("per_gpu") else 1.0)))


def _number(cells: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(cells.get(name, ""))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{where}: {name} is {cells.get(name, 'not given')}; it is a number above 0")
    return value
