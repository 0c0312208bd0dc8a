"""Malicious manifests: each is refused with its name and a reason, and no file is changed."""

import json
from pathlib import Path

import pytest

from megalite.checkpoint.manifest import MANIFEST_NAME
from megalite.config.errors import CheckpointError
from tests.checkpoint.evil_contents import KEY, file_name, sealed, set_to, text
from tests.checkpoint.evil_target import WEIGHTS as FILE
from tests.checkpoint.evil_target import Evil, Target
from tests.checkpoint.samples import find


def rename_tensor(key: str, name: str) -> Evil:
    return sealed(lambda body: body["tensors"].update({key: {**body["tensors"].pop(KEY), "name": name}}))


NAMES = (
    *("../weights-00000.safetensors", "a/../../x.safetensors", "sub/x.safetensors", "/etc/x.safetensors"),
    *("..\\x.safetensors", "c:x.safetensors", "a..safetensors", ".x.safetensors", "x.pt", "", "a\0.safetensors"),
    *("x.safetensors\n", "x" * 5000 + ".safetensors"),
)
E = ("tensors", KEY)  # stored whole, in one part
# The hash is updated after the edit, so only the checks of the content can detect the fault.
EVIL: dict[str, tuple[Evil, str]] = {
    **{f"name {name[:20]!r}": (file_name(name), "not the name") for name in NAMES},
    "unlisted file": (set_to(*E, "parts", 0, "file", to="other.safetensors"), "not listed under files"),
    "length negative": (set_to("files", FILE, "length", to=-1), "not an integer"),
    "length true": (set_to("files", FILE, "length", to=True), "not an integer"),
    "length float": (set_to("files", FILE, "length", to=10.0), "not an integer"),
    "length too small": (set_to("files", FILE, "length", to=20), "bytes, the file has"),
    "sha short": (set_to("files", FILE, "sha256", to="ab"), "not a sha256"),
    "sha upper": (set_to("files", FILE, "sha256", to="A" * 64), "not a sha256"),
    "sha number": (set_to("files", FILE, "sha256", to=5), "not a sha256"),
    "block of a byte": (set_to("files", FILE, "block", to=1), "must be 0, or 1048576 or more"),
    "block text": (set_to("files", FILE, "block", to="8"), "block of"),
    "file extra field": (set_to("files", FILE, "path", to="/etc/passwd"), "unknown fields"),
    "files a list": (set_to("files", to=[]), "must be an object"),
    "terabyte": (
        sealed(
            lambda body: body["tensors"][KEY].update(
                global_shape=[2**40, 8], parts=[{"file": FILE, "slice": [[0, 2**40], [0, 8]]}]
            )
        ),
        "bytes, the file has",
    ),
    "huge size": (set_to(*E, "global_shape", to=[2**70, 8]), "not an integer"),
    "negative size": (set_to(*E, "global_shape", to=[-12, 8]), "not an integer"),
    "zero size": (set_to(*E, "global_shape", to=[0, 8]), "none of size 0"),
    "many dims": (set_to(*E, "global_shape", to=[1] * 64), "at most 8"),
    "shape text": (set_to(*E, "global_shape", to="12,8"), "must be a list"),
    "shape float": (set_to(*E, "global_shape", to=[12.0, 8]), "not an integer"),
    "shape larger": (set_to(*E, "global_shape", to=[13, 8]), "leave a gap"),
    "shape smaller": (set_to(*E, "global_shape", to=[11, 8]), "does not lie in"),
    "slice backwards": (set_to(*E, "parts", 0, "slice", 0, to=[12, 0]), "does not lie in"),
    "slice negative": (set_to(*E, "parts", 0, "slice", 0, to=[-1, 12]), "not an integer"),
    "slice of one": (set_to(*E, "parts", 0, "slice", 0, to=[12]), "belongs"),
    "slice dims": (set_to(*E, "parts", 0, "slice", to=[[0, 12]]), "does not lie in"),
    "slice null": (set_to(*E, "parts", 0, "slice", to=None), "must be a list"),
    "no parts": (set_to(*E, "parts", to=[]), "leave a gap"),
    "part twice": (
        sealed(lambda body: body["tensors"][KEY].update(parts=2 * body["tensors"][KEY]["parts"])),
        "overlap",
    ),
    "part lacks file": (sealed(lambda body: body["tensors"][KEY]["parts"][0].pop("file")), "lacks fields file"),
    "part text": (set_to(*E, "parts", 0, to="x"), "must be an object"),
    "dtype unknown": (set_to(*E, "dtype", to="OBJECT"), "is not one of"),
    "dtype list": (set_to(*E, "dtype", to=["F32"]), "is not one of"),
    "key without group": (rename_tensor("embedding.weight", "embedding.weight"), "not a tensor key"),
    "key with parent": (rename_tensor("weight:../x", "../x"), "not a tensor key"),
    "key of other name": (rename_tensor("weight:other", "embedding.weight"), "its name field"),
    "tensor null": (set_to(*E, to=None), "must be an object"),
    "tensors missing": (sealed(lambda body: body.pop("tensors")), "lacks fields tensors"),
    "unknown field": (set_to("pickle", to="gASV"), "unknown fields pickle"),
    "version text": (set_to("format_version", to="1"), "format_version"),
    "version newer": (set_to("format_version", to=4), "this version of megalite reads 1 to 3"),
    "version older than its fields": (set_to("code", to=None), "code must be an object"),
    "version missing": (sealed(lambda body: body.pop("format_version")), "format_version"),
    "step negative": (set_to("step", to=-2), "step"),
    "step text": (set_to("step", to="2"), "step"),
    "step other": (set_to("step", to=3), "is of step 3"),
    "counters list": (set_to("counters", to=[]), "must be an object"),
    "config text": (set_to("config", to="{}"), "must be an object"),
    "version of code": (set_to("megalite_version", to=None), "must be text"),
    "tokenizer": (set_to("tokenizer", to="../tokenizer.model"), "tokenizer"),
    # Text that differs from the canonical form.
    "empty": (text(lambda old: ""), "not valid JSON"),
    "cut": (text(lambda old: old[: len(old) // 2]), "not valid JSON"),
    "binary": (text(lambda old: b"\x80\x04\x95cposix\nsystem\n"), "utf-8"),
    "a list": (text(lambda old: "[]"), "not a JSON object"),
    "deep": (text(lambda old: "[" * 200_000), "not valid JSON"),
    "many digits": (text(lambda old: old.replace('"step":2', '"step":' + "9" * 6000)), "not valid JSON"),
    "duplicate key": (text(lambda old: old.replace('"step":2', '"step":2,"step":2')), "appears twice"),
    "NaN": (text(lambda old: old.replace('"step":2', '"step":NaN')), "not valid JSON"),
    "infinity": (text(lambda old: old.replace('"step":2', '"step":1e999')), "not valid JSON"),
    "unsealed edit": (text(lambda old: old.replace('"consumed_samples":16', '"consumed_samples":17')), "edited"),
    "another sha256": (text(lambda old: old.replace('"sha256":"', '"sha256":"0', 1)), "edited"),
    "space": (text(lambda old: old.replace(":", ": ", 1)), "edited"),
    "trailing": (text(lambda old: old + " "), "edited"),
    "sha256 gone": (
        text(lambda old: json.dumps({k: v for k, v in json.loads(old).items() if k != "sha256"})),
        "edited",
    ),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    Target.prepare(root)
    return root


@pytest.fixture
def target(tmp_path: Path, pristine: Path) -> Target:
    return Target.make(tmp_path / "root", pristine)


def listing(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def refused(target: Target, reason: str) -> None:
    before = listing(target.root)
    with pytest.raises(CheckpointError) as caught:
        find(target.run, step=2)
    assert MANIFEST_NAME in str(caught.value) and reason in str(caught.value), caught.value
    assert len(str(caught.value)) < 2000
    assert listing(target.root) == before


@pytest.mark.parametrize("name", EVIL)
def test_malicious_manifest_is_refused(target: Target, name: str) -> None:
    evil, reason = EVIL[name]
    before = (target.newest / MANIFEST_NAME).read_bytes()
    evil(target)
    assert (target.newest / MANIFEST_NAME).read_bytes() != before
    refused(target, reason)


def test_manifest_must_be_a_plain_file(target: Target) -> None:
    path = target.newest / MANIFEST_NAME
    path.rename(target.root / "elsewhere.json")
    path.symlink_to(target.root / "elsewhere.json")
    refused(target, "not a plain file")
    path.unlink()
    path.mkdir()
    refused(target, "not a plain file")
