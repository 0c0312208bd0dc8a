"""Damage to a file of a checkpoint as caused by disks, networks, copying and users."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
PAGE = 512
"""Bytes that go at once when a page goes: small, as the files are."""

Random = random.Random


@dataclass(frozen=True)
class Place:
    """The file to damage, and where to find similar files."""

    path: Path
    older: Path
    """The run's previous checkpoint."""
    foreign: Path
    """Checkpoint of the same step of another run with the same model and layout."""

    @property
    def others(self) -> list[Path]:
        return sorted(other for other in self.path.parent.iterdir() if other != self.path)


Mutation = Callable[[Place, Random], None]


def _in_place(name: str, change: Callable[[bytes, Random], bytes]) -> Mutation:
    def mutation(place: Place, choose: Random) -> None:
        place.path.write_bytes(change(place.path.read_bytes(), choose))

    mutation.__name__ = name
    return mutation


def _flipped(data: bytes, choose: Random, first: int | None = None) -> bytes:
    """Flip one bit, anywhere or among the first bytes."""
    changed = bytearray(data)
    changed[choose.randrange(first or len(data))] ^= 1 << choose.randrange(8)
    return changed


def _without_a_page(data: bytes, choose: Random) -> bytes:
    """Fill an aligned page with zeros."""
    start = choose.choice([start for start in range(0, len(data), PAGE) if any(data[start : start + PAGE])])
    return data[:start] + bytes(len(data[start : start + PAGE])) + data[start + PAGE :]


def _swapped(data: bytes, choose: Random) -> bytes:
    """Swap two pages: the sum of all bytes does not change."""
    pages = [data[start : start + PAGE] for start in range(0, len(data), PAGE)]
    first = choose.randrange(len(pages))
    second = choose.choice([index for index, page in enumerate(pages) if page != pages[first]])
    pages[first], pages[second] = pages[second], pages[first]
    return b"".join(pages)


def _shifted(data: bytes, choose: Random) -> bytes:
    """Remove a page from the middle, and add as many bytes at the end."""
    start = choose.randrange(len(data) - 2 * PAGE)
    return data[:start] + data[start + PAGE :] + choose.randbytes(PAGE)


def _longer(data: bytes, choose: Random) -> bytes:
    length = choose.randint(1, 3 * PAGE)
    return data + choose.choice([bytes(length), choose.randbytes(length)])


flip_bit = _in_place("flip_bit", _flipped)
# Lengths, names, shapes and offsets are at the front.
flip_bit_in_front = _in_place("flip_bit_in_front", lambda data, choose: _flipped(data, choose, 200))
zero_page = _in_place("zero_page", _without_a_page)
swap_pages = _in_place("swap_pages", _swapped)
lose_page = _in_place("lose_page", _shifted)
truncate = _in_place("truncate", lambda data, choose: data[: choose.randrange(len(data))])
truncate_by_one = _in_place("truncate_by_one", lambda data, choose: data[:-1])
extend = _in_place("extend", _longer)
double = _in_place("double", lambda data, choose: data * 2)  # as after a repeated append
empty = _in_place("empty", lambda data, choose: b"")
zeros = _in_place("zeros", lambda data, choose: bytes(len(data)))  # as after a crash without fsync


def remove(place: Place, choose: Random) -> None:
    place.path.unlink()


def swap_files(place: Place, choose: Random) -> None:
    other = choose.choice(place.others)
    mine, theirs = place.path.read_bytes(), other.read_bytes()
    place.path.write_bytes(theirs)
    other.write_bytes(mine)


def copy_of_another(place: Place, choose: Random) -> None:
    shutil.copyfile(choose.choice(place.others), place.path)


def of_another_run(place: Place, choose: Random) -> None:
    shutil.copyfile(place.foreign / place.path.name, place.path)


def of_the_older_step(place: Place, choose: Random) -> None:
    shutil.copyfile(place.older / place.path.name, place.path)


def half_older(place: Place, choose: Random) -> None:
    """Start with the older step's file and end with this one, as an interrupted copy would."""
    ours, theirs = place.path.read_bytes(), (place.older / place.path.name).read_bytes()
    differ = [index for index, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    at = choose.randint(differ[0] + 1, differ[-1])
    place.path.write_bytes(theirs[:at] + ours[at:])


def to_link(place: Place, choose: Random) -> None:
    """Replace the file by a link to valid content outside of the folder."""
    outside = place.path.parent.parent.parent / f"outside-{place.path.name}"
    shutil.copyfile(place.path, outside)
    place.path.unlink()
    place.path.symlink_to(outside)


def to_folder(place: Place, choose: Random) -> None:
    place.path.unlink()
    place.path.mkdir()


def edit_manifest(place: Place, choose: Random) -> None:
    """Edit the manifest as JSON without updating its hash."""
    manifest = place.path.parent / MANIFEST
    body = json.loads(manifest.read_text())
    name, key = choose.choice(sorted(body["files"])), choose.choice(sorted(body["tensors"]))
    edits: list[Callable[[], object]] = [
        lambda: body["counters"].update(consumed_samples=body["counters"]["consumed_samples"] + 1),
        lambda: body["files"][name].update(sha256=choose.randbytes(32).hex()),
        lambda: body["files"][name].update(length=body["files"][name]["length"] + choose.randint(1, 9)),
        lambda: body.update(step=choose.randint(3, 99)),
        lambda: body["tensors"].pop(key),
        lambda: body["config"]["model"].update(num_layers=choose.randint(9, 99)),
        lambda: body["tensors"][key].update(dtype="F64"),
        lambda: body["layout"].update(tp=choose.randint(2, 9)),
        lambda: body["files"].pop(name),
        lambda: body.update(tokenizer="0" * 64),
    ]
    choose.choice(edits)()
    manifest.write_text(json.dumps(body, sort_keys=True, separators=(",", ":")))


COUNTS: dict[Mutation, int] = {
    flip_bit: 50,
    flip_bit_in_front: 20,
    zero_page: 20,
    swap_pages: 20,
    lose_page: 20,
    truncate: 20,
    truncate_by_one: 10,
    extend: 10,
    double: 10,
    empty: 10,
    zeros: 10,
    remove: 10,
    swap_files: 20,
    copy_of_another: 20,
    of_another_run: 20,
    of_the_older_step: 20,
    half_older: 20,
    to_link: 10,
    to_folder: 10,
    edit_manifest: 20,
}
"""Repetitions of each mutation, with different random choices, cycling over the files."""
