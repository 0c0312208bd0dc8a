"""One of n parts of the input, each for one machine: together the parts are all of it, in order, each byte once."""

import mmap
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from megalite.config.errors import ConfigError
from megalite.preprocess.inputs import Input, find_inputs, open_regular
from megalite.preprocess.job import PreprocessJob

Border = tuple[int, int]
"""A place between two documents: number of the input, and bytes of it before."""


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8`: the third of eight. Raises ConfigError: no such part."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"--shard {text} is not I/N with I from 0 to N - 1; the first of eight is 0/8")
    return int(index), int(count)


def shard_name(prefix: str, shard: tuple[int, int]) -> str:
    """The prefix of a part's output; by name the parts are in order."""
    return f"{prefix}-{shard[0]:05d}-of-{shard[1]:05d}"


def job_inputs(job: PreprocessJob) -> tuple[list[Input], list[int] | None]:
    """The inputs that a job reads; and of a part its number and how many there are, parts without content left out.

    Parts have about as many bytes. Plain jsonl (and text with a document a line) is cut between lines; a compressed
    or parquet file belongs to one part. Where a cut lies depends on the files and n alone, so that machines need not
    talk. Of a part that is left without content the list is empty.

    Raises ConfigError: as `find_inputs`; or standard input is among them."""
    inputs = find_inputs(job.inputs)
    if job.shard is None:
        return inputs, None
    if any(item.size is None for item in inputs):
        raise ConfigError("--shard cannot cut standard input; give files")
    index, count = job.shard
    borders = [(0, 0), *(_border(job, inputs, part, count) for part in range(1, count)), (len(inputs), 0)]
    full = [part for part, (start, stop) in enumerate(pairwise(borders)) if start < stop]
    if index not in full:
        return [], [len(full), len(full)]
    return _between(inputs, borders[index], borders[index + 1]), [full.index(index), len(full)]


def _between(inputs: Sequence[Input], start: Border, stop: Border) -> list[Input]:
    found = []
    for number in range(start[0], min(stop[0] + 1, len(inputs))):
        first = start[1] if number == start[0] else 0
        end = stop[1] if number == stop[0] else None
        if end != 0:
            found.append(replace(inputs[number], start=first, stop=end))
    return found


def _border(job: PreprocessJob, inputs: Sequence[Input], part: int, count: int) -> Border:
    ends = list(accumulate(item.size or 0 for item in inputs))
    target = ends[-1] * part // count
    number = next(number for number, end in enumerate(ends) if target < end)
    item, size = inputs[number], inputs[number].size or 0
    offset = target - (ends[number] - size)
    lines = item.kind == "jsonl" or (item.kind == "text" and job.text_documents == "line")
    if lines and item.compression is None and offset:
        with open_regular(item.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end_of_line = content.find(b"\n", offset - 1)
        offset = size if end_of_line < 0 else end_of_line + 1
    else:
        offset = size if 2 * offset >= size else 0
    return (number + 1, 0) if offset == size else (number, offset)
