"""Evil manifests: each one refused by name and reason, and nothing on the disk changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import MANIFEST_NAME, seal
from megalite.config.errors import CheckpointError
from tests.checkpoint.samples import SOLO, find, save_as

FILE = "weights-00000.safetensors"


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = to

    return edit


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        for step in path[:-1]:
            body = body[step]
        del body[path[-1]]

    return edit


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    """Replace a listed file's name in the list and in the parts alike."""

    def edit(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(FILE)
        for entry in body["tensors"].values():
            for part in entry["parts"]:
                if part["file"] == FILE:
                    part["file"] = name

    return edit


def rename_tensor(key: str, name: str) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        body["tensors"][key] = {**body["tensors"].pop("weight:embedding.weight"), "name": name}

    return edit


E = ("tensors", "weight:embedding.weight")  # stored whole, in one part
# Sealed again after the edit, so that the checks of the content themselves must find the fault.
EVIL: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "parent folder": (rename_file("../weights-00000.safetensors"), "not the name"),
    "deep parent": (rename_file("a/../../x.safetensors"), "not the name"),
    "subfolder": (rename_file("sub/x.safetensors"), "not the name"),
    "absolute": (rename_file("/etc/x.safetensors"), "not the name"),
    "backslash": (rename_file("..\\x.safetensors"), "not the name"),
    "drive": (rename_file("c:x.safetensors"), "not the name"),
    "dots inside": (rename_file("a..safetensors"), "not the name"),
    "hidden": (rename_file(".x.safetensors"), "not the name"),
    "other type": (rename_file("x.pt"), "not the name"),
    "empty name": (rename_file(""), "not the name"),
    "nul": (rename_file("a\0.safetensors"), "not the name"),
    "newline": (rename_file("x.safetensors\n"), "not the name"),
    "very long name": (rename_file("x" * 5000 + ".safetensors"), "not the name"),
    "unlisted file": (change(*E, "parts", 0, "file", to="other.safetensors"), "does not list"),
    "length negative": (change("files", FILE, "length", to=-1), "not an integer"),
    "length true": (change("files", FILE, "length", to=True), "not an integer"),
    "length float": (change("files", FILE, "length", to=10.0), "not an integer"),
    "length too small": (change("files", FILE, "length", to=20), "bytes, the file has"),
    "sha short": (change("files", FILE, "sha256", to="ab"), "not a sha256"),
    "sha upper": (change("files", FILE, "sha256", to="A" * 64), "not a sha256"),
    "sha number": (change("files", FILE, "sha256", to=5), "not a sha256"),
    "file extra field": (change("files", FILE, "path", to="/etc/passwd"), "unknown fields"),
    "files a list": (change("files", to=[]), "must be an object"),
    "terabyte": (
        lambda body: body["tensors"][E[1]].update(
            global_shape=[2**40, 8], parts=[{"file": FILE, "slice": [[0, 2**40], [0, 8]]}]
        ),
        "bytes, the file has",
    ),
    "huge size": (change(*E, "global_shape", to=[2**70, 8]), "not an integer"),
    "negative size": (change(*E, "global_shape", to=[-12, 8]), "not an integer"),
    "zero size": (change(*E, "global_shape", to=[0, 8]), "none of size 0"),
    "many dims": (change(*E, "global_shape", to=[1] * 64), "at most 8"),
    "shape text": (change(*E, "global_shape", to="12,8"), "must be a list"),
    "shape float": (change(*E, "global_shape", to=[12.0, 8]), "not an integer"),
    "shape larger": (change(*E, "global_shape", to=[13, 8]), "leave a gap"),
    "shape smaller": (change(*E, "global_shape", to=[11, 8]), "does not lie in"),
    "slice backwards": (change(*E, "parts", 0, "slice", 0, to=[12, 0]), "does not lie in"),
    "slice negative": (change(*E, "parts", 0, "slice", 0, to=[-1, 12]), "not an integer"),
    "slice of one": (change(*E, "parts", 0, "slice", 0, to=[12]), "belongs"),
    "slice dims": (change(*E, "parts", 0, "slice", to=[[0, 12]]), "does not lie in"),
    "slice null": (change(*E, "parts", 0, "slice", to=None), "must be a list"),
    "no parts": (change(*E, "parts", to=[]), "leave a gap"),
    "part twice": (lambda body: body["tensors"][E[1]]["parts"].append(body["tensors"][E[1]]["parts"][0]), "overlap"),
    "part lacks file": (drop(*E, "parts", 0, "file"), "lacks fields file"),
    "part text": (change(*E, "parts", 0, to="x"), "must be an object"),
    "dtype unknown": (change(*E, "dtype", to="OBJECT"), "is not one of"),
    "dtype list": (change(*E, "dtype", to=["F32"]), "is not one of"),
    "key without group": (rename_tensor("embedding.weight", "embedding.weight"), "not a tensor key"),
    "key with parent": (rename_tensor("weight:../x", "../x"), "not a tensor key"),
    "key of other name": (rename_tensor("weight:other", "embedding.weight"), "its name field"),
    "tensor null": (change(*E, to=None), "must be an object"),
    "tensors missing": (drop("tensors"), "lacks fields tensors"),
    "unknown field": (change("pickle", to="gASV"), "unknown fields pickle"),
    "version text": (change("format_version", to="1"), "format_version"),
    "version newer": (change("format_version", to=3), "this version of megalite reads 1 to 2"),
    "version older than its fields": (change("code", to=None), "code must be an object"),
    "version missing": (drop("format_version"), "format_version"),
    "step negative": (change("step", to=-2), "step"),
    "step text": (change("step", to="2"), "step"),
    "step other": (change("step", to=3), "is of step 3"),
    "counters list": (change("counters", to=[]), "must be an object"),
    "config text": (change("config", to="{}"), "must be an object"),
    "version of code": (change("megalite_version", to=None), "must be text"),
    "tokenizer": (change("tokenizer", to="../tokenizer.model"), "tokenizer"),
}

RAW: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "empty": (lambda text: "", "not valid JSON"),
    "cut": (lambda text: text[: len(text) // 2], "not valid JSON"),
    "binary": (lambda text: b"\x80\x04\x95cposix\nsystem\n", "utf-8"),
    "a list": (lambda text: "[]", "not a JSON object"),
    "deep": (lambda text: "[" * 200_000, "not valid JSON"),
    "many digits": (lambda text: text.replace('"step":2', '"step":' + "9" * 6000), "not valid JSON"),
    "duplicate key": (lambda text: text.replace('"step":2', '"step":2,"step":2'), "appears twice"),
    "NaN": (lambda text: text.replace('"step":2', '"step":NaN'), "not valid JSON"),
    "infinity": (lambda text: text.replace('"step":2', '"step":1e999'), "not valid JSON"),
    "unsealed edit": (lambda text: text.replace('"consumed_samples":16', '"consumed_samples":17'), "edited"),
    "another sha256": (lambda text: text.replace('"sha256":"', '"sha256":"0', 1), "edited"),
    "space": (lambda text: text.replace(":", ": ", 1), "edited"),
    "trailing": (lambda text: text + " ", "edited"),
    "sha256 gone": (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "sha256"}), "edited"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_as(tmp_path / "run", SOLO, step=2)
    return tmp_path / "run"


def listing(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def refused(folder: Path, reason: str) -> None:
    before = listing(folder.parent)
    with pytest.raises(CheckpointError) as caught:
        find(folder, step=2)
    assert MANIFEST_NAME in str(caught.value) and reason in str(caught.value), caught.value
    assert len(str(caught.value)) < 2000
    assert listing(folder.parent) == before


@pytest.mark.parametrize("name", EVIL)
def test_evil_manifest(folder: Path, name: str) -> None:
    edit, reason = EVIL[name]
    path = folder / "step-0000002" / MANIFEST_NAME
    body = json.loads(path.read_text())
    body.pop("sha256")
    edit(body)
    path.write_text(seal(body))
    refused(folder, reason)


@pytest.mark.parametrize("name", RAW)
def test_evil_text(folder: Path, name: str) -> None:
    edit, reason = RAW[name]
    path = folder / "step-0000002" / MANIFEST_NAME
    text = edit(path.read_text())
    assert text != path.read_text()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, reason)


def test_manifest_that_is_a_link_or_a_folder(folder: Path, tmp_path: Path) -> None:
    path = folder / "step-0000002" / MANIFEST_NAME
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    refused(folder, "not a plain file")
    path.unlink()
    path.mkdir()
    refused(folder, "not a plain file")
