"""Malicious manifests and headers: (almost) well-formed, with valid hashes and false contents."""

import json
from collections.abc import Callable
from typing import Any

from tests.checkpoint.evil_target import MANIFEST, WEIGHTS, Evil, Outcome, Target, with_header

HARMLESS, DAMAGED, UNREADABLE = Outcome.HARMLESS, Outcome.DAMAGED, Outcome.UNREADABLE
Body = dict[str, Any]

KEY, NAME = "weight:embedding.weight", "embedding.weight"
"""A tensor of float32 [12, 8], stored in one part."""


def text(change: Callable[[str], str | bytes]) -> Evil:
    """Change the manifest's text without updating its hash."""

    def build(target: Target) -> None:
        path = target.newest / MANIFEST
        changed = change(path.read_text())
        path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())

    return build


def sealed(change: Callable[[Body], object]) -> Evil:
    return lambda target: target.edit(change)


def set_to(*path: Any, to: Any) -> Evil:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return sealed(change)


def file_name(name: str) -> Evil:
    def change(body: Body) -> None:
        body["files"][name] = body["files"].pop(WEIGHTS)
        for entry in body["tensors"].values():
            for part in entry["parts"]:
                part["file"] = name if part["file"] == WEIGHTS else part["file"]

    return sealed(change)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def header(change: Callable[[Body], object]) -> Evil:
    return lambda target: target.rewrite(change)


def raw_header(content: bytes, length: int | None = None) -> Evil:
    """Replace the header of the weights; `length` is the length that the file declares for it."""
    return lambda target: target.replace(WEIGHTS, with_header(content, bytes(4096), length))


def entry(**changes: Any) -> Evil:
    return header(lambda found: found[NAME].update(changes))


def in_two_parts(names: tuple[str, str], rows: tuple[int, int] = (5, 7), order: tuple[int, int] = (0, 1)) -> Evil:
    """Store the tensor in two parts, rows 0 to 5 and 5 to 12, in one file.

    Args:
        names: names of the parts in the file.
        rows: numbers of rows in the header.
        order: order of the parts in the manifest."""

    def build(target: Target) -> None:
        found, data = target.header()
        start, stop = found.pop(NAME)["data_offsets"]
        middle = start + 4 * 8 * rows[0]
        for name, size, offsets in zip(names, rows, ((start, middle), (middle, stop)), strict=True):
            found[name] = {"dtype": "F32", "shape": [size, 8], "data_offsets": list(offsets)}
        target.replace(WEIGHTS, with_header(json.dumps(found).encode(), data))
        slices = [[[0, 5], [0, 8]], [[5, 12], [0, 8]]]
        parts = [{"file": WEIGHTS, "slice": slices[index]} for index in order]
        target.edit(lambda body: body["tensors"][KEY].update(parts=parts))

    return build


def twice_in_header(target: Target) -> None:
    found, data = target.header()
    once = json.dumps(found)
    again = json.dumps({NAME: {**found[NAME], "data_offsets": [0, 4 * 96]}})
    target.replace(WEIGHTS, with_header((once[:-1] + ", " + again[1:]).encode(), data))


def many_parts(body: Body) -> None:
    part = body["tensors"][KEY]["parts"][0]
    body["tensors"][KEY]["parts"] = [part] * 2_000


def many_dims(body: Body) -> None:
    """Eight dimensions, with parts that overlap in each of 256 corners."""
    box = [[0, 2]] * 8
    body["tensors"][KEY] |= {"global_shape": [2] * 8, "parts": [{"file": WEIGHTS, "slice": box}] * 50}


def terabyte(body: Body) -> None:
    """Let the manifest declare a tensor of eight terabytes, in a file of that length."""
    body["files"][WEIGHTS]["length"] = 2**60
    parts = [{"file": WEIGHTS, "slice": [[0, 2**40], [0, 8]]}]
    body["tensors"][KEY] |= {"global_shape": [2**40, 8], "parts": parts}


SCREEN = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e{0.__class__}%s%n"
"""Control sequences of terminals, and placeholders of string formatting."""

MANIFESTS: dict[str, tuple[Outcome, Evil]] = {
    # Not the JSON that megalite writes.
    "blanks": (DAMAGED, text(lambda old: " " * (4 << 20))),
    "a byte order mark": (DAMAGED, text(lambda old: "\ufeff" + old)),
    "UTF-16": (DAMAGED, text(lambda old: old.encode("utf-16"))),
    "invalid UTF-8": (DAMAGED, text(lambda old: old.encode().replace(b"tokenizer", b"\xc3\x28okenizer"))),
    "overlong UTF-8": (DAMAGED, text(lambda old: old.encode().replace(b"/", b"\xc0\xaf") + b"\xc0\xaf")),
    "a hundred thousand keys twice": (
        DAMAGED,
        text(lambda old: "{" + ",".join(['"a":1'] * 100_000) + "," + old[1:]),
    ),
    "lists in lists": (DAMAGED, text(lambda old: "[" * 1_000_000)),
    "objects in objects": (DAMAGED, text(lambda old: '{"a":' * 500_000)),
    "a number of a million digits": (DAMAGED, text(lambda old: old.replace('"step":2', '"step":' + "9" * 10**6))),
    "a fraction of a million digits": (DAMAGED, text(lambda old: old.replace('"step":2', '"step":0.' + "9" * 10**6))),
    "an edit under the old hash": (DAMAGED, text(lambda old: old.replace("norm.weight", "norn.weight"))),
    # With a valid hash.
    "step of four thousand digits": (DAMAGED, set_to("step", to=int("9" * 4000))),
    "version true": (DAMAGED, set_to("format_version", to=True)),
    "version that writes on the screen": (DAMAGED, set_to("format_version", to=SCREEN)),
    "tokenizer of a megabyte": (DAMAGED, set_to("tokenizer", to="0" * 10**6)),
    "an unknown field that writes on the screen": (DAMAGED, set_to(SCREEN, to=1)),
    "hash of a megabyte": (DAMAGED, set_to("files", WEIGHTS, "sha256", to="f" * 10**6)),
    "length 2^63": (DAMAGED, set_to("files", WEIGHTS, "length", to=2**63)),
    "file in the older step": (DAMAGED, file_name(f"../step-0000001/{WEIGHTS}")),
    "file in full-width letters": (DAMAGED, file_name("ｗeights.safetensors")),
    "file name of a megabyte": (DAMAGED, file_name("x" * 10**6 + ".safetensors")),
    "file that is the manifest": (DAMAGED, file_name(MANIFEST)),
    "file with a URL": (DAMAGED, file_name("http://localhost/x.safetensors")),
    "eight terabytes": (DAMAGED, sealed(terabyte)),
    "a shape that overflows": (DAMAGED, set_to("tensors", KEY, "global_shape", to=[2**62] * 8)),
    "a shape of 4000 digits": (DAMAGED, set_to("tensors", KEY, "global_shape", to=[int("9" * 4000), 8])),
    "dtype that is an object": (DAMAGED, set_to("tensors", KEY, "dtype", to={"__reduce__": "os.system"})),
    "a slice of thousands": (DAMAGED, set_to("tensors", KEY, "parts", 0, "slice", 0, to=[1] * 30_000)),
    "many parts": (DAMAGED, sealed(many_parts)),
    "many dimensions and parts": (DAMAGED, sealed(many_dims)),
    "a tensor with a part's name": (
        DAMAGED,
        sealed(lambda body: body["tensors"].update({f"{KEY}#1": {**body["tensors"][KEY], "name": f"{NAME}#1"}})),
    ),
    "a tensor of the metadata's name": (
        DAMAGED,
        sealed(lambda body: body["tensors"].update({"weight:__metadata__": body["tensors"][KEY]})),
    ),
    "thousands of tensors": (
        DAMAGED,
        sealed(lambda body: body["tensors"].update({f"weight:t{n}": {**body["tensors"][KEY], "name": f"t{n}"} for n in range(2_000)})),
    ),
    # Valid text that must stay text.
    "config that writes on the screen": (HARMLESS, set_to("config", "model", SCREEN, to=SCREEN)),
    "counters that write on the screen": (HARMLESS, set_to("counters", SCREEN, to=[SCREEN])),
    "versions that write on the screen": (
        HARMLESS,
        sealed(lambda body: body.update(megalite_version=SCREEN, code={SCREEN: SCREEN}, layout={SCREEN: SCREEN})),
    ),
    "config with YAML's tags": (
        HARMLESS,
        set_to("config", "model", "!!python/object/apply:os.system", to="!!python/object/apply:os.system ['id']"),
    ),
    "config with half a surrogate pair": (HARMLESS, set_to("config", "model", "\ud800", to="\udfff")),
    "config of other types": (HARMLESS, set_to("config", to={"model": 5, "data": [], "training": {"seed": {}}})),
    "config of a megabyte": (HARMLESS, set_to("config", "model", "x" * 10**5, to=["y" * 10**3] * 900)),
    "config of lists in lists": (HARMLESS, set_to("config", "model", "deep", to=nested(300))),
    "version of a million digits": (HARMLESS, set_to("megalite_version", to="9" * 10**6)),
}  # fmt: skip

HEADERS: dict[str, tuple[Outcome, Evil]] = {
    "header of 2^63 bytes": (UNREADABLE, raw_header(b"{}", 2**63)),
    "header of 2^64 - 1 bytes": (UNREADABLE, raw_header(b"{}", 2**64 - 1)),
    "header a byte beyond the end": (UNREADABLE, raw_header(b"{}", 4096 + 3)),
    "header of no bytes": (UNREADABLE, raw_header(b"", 0)),
    "header that is no JSON": (UNREADABLE, raw_header(b"\x80\x04." * 50)),
    "header that is a list": (UNREADABLE, raw_header(b"[]")),
    "header that is a number of digits": (UNREADABLE, raw_header(b"9" * 100_000)),
    "header of lists in lists": (UNREADABLE, raw_header(b'{"a":' + b"[" * 500_000)),
    "header that is not UTF-8": (UNREADABLE, raw_header(b'{"\xff":1}')),
    "header with a key twice": (UNREADABLE, twice_in_header),
    "header of thousands of tensors": (
        UNREADABLE,
        raw_header(
            json.dumps({f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(5_000)}).encode()
        ),
    ),
    "metadata that is no text": (UNREADABLE, header(lambda found: found.update(__metadata__={"a": [1]}))),
    "shape of a terabyte": (UNREADABLE, entry(shape=[2**40, 8])),
    "shape that overflows": (UNREADABLE, entry(shape=[2**32, 2**32, 2**32])),
    "shape that overflows to the right size": (UNREADABLE, entry(shape=[2**32 + 12, 2**32, 8])),
    "shape of no size": (UNREADABLE, entry(shape=[0, 8])),
    "negative shape": (UNREADABLE, entry(shape=[-12, -8])),
    "shape of many dimensions": (UNREADABLE, entry(shape=[12, 8] + [1] * 10_000)),
    "shape of true": (UNREADABLE, entry(shape=[True, 96])),
    "shape of fractions": (UNREADABLE, entry(shape=[12.0, 8.0])),
    "shape turned": (UNREADABLE, entry(shape=[8, 12])),
    "shape of NaN": (UNREADABLE, entry(shape=[float("nan"), 8])),
    "shape of a number of 4000 digits": (UNREADABLE, entry(shape=[int("9" * 4000), 8])),
    "offsets below zero": (UNREADABLE, entry(data_offsets=[-384, 0])),
    "offsets backwards": (UNREADABLE, entry(data_offsets=[384, 0])),
    "offsets beyond the end": (UNREADABLE, entry(data_offsets=[10**6, 10**6 + 384])),
    "offsets that overflow": (UNREADABLE, entry(data_offsets=[2**64 - 384, 2**64])),
    "offsets that overlap another's": (UNREADABLE, entry(data_offsets=[0, 384])),
    "one offset": (UNREADABLE, entry(data_offsets=[0])),
    "offsets of text": (UNREADABLE, entry(data_offsets=["0", "384"])),
    "a gap at the end": (UNREADABLE, header(lambda found: found.pop(NAME))),
    "another dtype of the size": (UNREADABLE, entry(dtype="I32")),
    "an unknown dtype": (UNREADABLE, entry(dtype="OBJECT")),
    "a dtype that is a list": (UNREADABLE, entry(dtype=["F32"])),
    "a field too many": (UNREADABLE, entry(loader="pickle")),
    "two parts in order": (HARMLESS, in_two_parts((NAME, f"{NAME}#1"))),
    "parts counted from one": (UNREADABLE, in_two_parts((f"{NAME}#1", f"{NAME}#2"))),
    "parts with a gap": (UNREADABLE, in_two_parts((NAME, f"{NAME}#2"))),
    "parts with leading zeros": (UNREADABLE, in_two_parts((NAME, f"{NAME}#01"))),
    "parts of each other's size": (UNREADABLE, in_two_parts((NAME, f"{NAME}#1"), rows=(7, 5))),
    "parts listed backwards": (UNREADABLE, in_two_parts((NAME, f"{NAME}#1"), order=(1, 0))),
    "parts of one slice": (DAMAGED, in_two_parts((NAME, f"{NAME}#1"), order=(1, 1))),
}
"""Each for the weights of the newest checkpoint, with the right hash in the manifest."""
