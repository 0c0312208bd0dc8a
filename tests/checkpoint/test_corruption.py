"""Damage of every kind to the newest checkpoint: always detected and named, and the one before it is used."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import find_checkpoint
from megalite.checkpoint.manifest import CheckpointError, seal
from megalite.topology.group import Group
from tests.checkpoint.samples import CPU, SOLO, assert_holds, find, on_threads, save_as

Mutation = Callable[[Path, random.Random], None]


def flip_bit(path: Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, choose: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: choose.randrange(len(data))])


def append(path: Path, choose: random.Random) -> None:
    path.write_bytes(path.read_bytes() + choose.randbytes(choose.randint(1, 64)))


def zero_page(path: Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = choose.randrange(len(data) - 64)
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)


def swap_blocks(path: Path, choose: random.Random) -> None:
    """Two blocks in each other's place: all bytes there, sum unchanged."""
    data = path.read_bytes()
    first, second = 16, len(data) // 2
    blocks = data[first : first + 32], data[second : second + 32]
    assert blocks[0] != blocks[1]
    path.write_bytes(data[:first] + blocks[1] + data[first + 32 : second] + blocks[0] + data[second + 32 :])


def delete(path: Path, choose: random.Random) -> None:
    path.unlink()


def empty(path: Path, choose: random.Random) -> None:
    path.write_bytes(b"")


def foreign(path: Path, choose: random.Random) -> None:
    """The file of the same name from the other step, or from another run of the same shapes."""
    other = choose.choice([path.parent.parent, path.parent.parent.parent / "foreign"])
    shutil.copyfile(other / "step-0000001" / path.name, path)


def swap_files(path: Path, choose: random.Random) -> None:
    other = choose.choice(sorted(one for one in path.parent.iterdir() if one != path))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def to_link(path: Path, choose: random.Random) -> None:
    """Sound content, but reached by a link that leads out of the folder."""
    outside = path.parent.parent.parent / f"outside-{path.name}"
    shutil.copyfile(path, outside)
    path.unlink()
    path.symlink_to(outside)


def to_folder(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.mkdir()


def edit_manifest(path: Path, choose: random.Random) -> None:
    """An edit in JSON that leaves everything well-formed."""
    manifest = path.parent / "manifest.json"
    body = json.loads(manifest.read_text())
    name = choose.choice(sorted(body["files"]))
    key = choose.choice(sorted(body["tensors"]))
    edit = choose.randrange(7)
    if edit == 0:
        body["counters"]["consumed_samples"] += choose.randint(1, 9)
    elif edit == 1:
        body["files"][name]["sha256"] = choose.randbytes(32).hex()
    elif edit == 2:
        body["files"][name]["length"] += choose.randint(1, 9)
    elif edit == 3:
        body["step"] = choose.randint(3, 99)
    elif edit == 4:
        del body["tensors"][key]
    elif edit == 5:
        body["config"]["model"]["hidden_size"] = choose.randint(9, 99)
    else:
        body["tensors"][key]["dtype"] = "I64" if body["tensors"][key]["dtype"] != "I64" else "F64"
    manifest.write_text(json.dumps(body, sort_keys=True, separators=(",", ":")))


MUTATIONS: list[tuple[Mutation, int]] = [
    (flip_bit, 120),
    (truncate, 40),
    (zero_page, 40),
    (append, 10),
    (swap_blocks, 10),
    (delete, 10),
    (empty, 10),
    (foreign, 20),
    (swap_files, 20),
    (to_link, 10),
    (to_folder, 10),
    (edit_manifest, 40),
]
FILES = [
    "manifest.json",
    *(f"{kind}-{rank:05d}.safetensors" for kind in ("weights", "optimizer") for rank in range(3)),
]


def test_the_count() -> None:
    assert sum(count for _, count in MUTATIONS) >= 300


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    for folder, step, seed in (("run", 1, 1), ("run", 2, 2), ("foreign", 1, 7)):
        on_threads(3, lambda group, f=folder, n=step, s=seed: save_as(root / f, group, step=n, seed=s))  # type: ignore[misc]
    assert sorted(path.name for path in (root / "run" / "step-0000002").iterdir()) == sorted(FILES)
    return root


@pytest.mark.parametrize(("mutation", "count"), MUTATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_damage_is_detected(pristine: Path, tmp_path: Path, mutation: Mutation, count: int) -> None:
    choose = random.Random(mutation.__name__)
    for number in range(count):
        root = tmp_path / str(number)
        shutil.copytree(pristine, root)
        name = FILES[number % len(FILES)]
        mutation(root / "run" / "step-0000002" / name, choose)
        lines: list[str] = []
        checkpoint = find(root / "run", log=lines.append)
        assert checkpoint.manifest.step == 1, (mutation, number, name)
        assert len(lines) == 1 and "step-0000002" in lines[0]
        named = "manifest.json" if mutation is edit_manifest else name
        # A damaged manifest hides which other file was swapped with it.
        assert named in lines[0] or (mutation is swap_files and "manifest.json" in lines[0]), lines
        with pytest.raises(CheckpointError, match="step 2 is damaged"):
            find(root / "run", step=2)
        shutil.rmtree(root)


def test_the_older_one_is_whole(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine / "run", tmp_path / "run")
    flip_bit(tmp_path / "run" / "step-0000002" / "weights-00001.safetensors", random.Random(0))
    assert_holds(find(tmp_path / "run"), seed=1)


def test_a_whole_folder_under_another_step(pristine: Path, tmp_path: Path) -> None:
    """All files sound and of one checkpoint, but not of the step that the folder's name says."""
    shutil.copytree(pristine / "run" / "step-0000001", tmp_path / "step-0000005")
    shutil.copytree(pristine / "run" / "step-0000002", tmp_path / "step-0000002")
    lines: list[str] = []
    assert find(tmp_path, log=lines.append).manifest.step == 2
    assert "manifest.json: is of step 1" in lines[0]


def test_a_sealed_manifest_that_lies_about_the_files(tmp_path: Path) -> None:
    """Hashes all right, but the manifest gives a tensor another dtype of the same size: refused when it is read."""
    path = save_as(tmp_path, SOLO, step=1)
    body = json.loads((path / "manifest.json").read_text())
    body.pop("sha256")
    body["tensors"]["weight:norm.weight"]["dtype"] = "F16"
    (path / "manifest.json").write_text(seal(body))
    checkpoint = find(tmp_path)
    with pytest.raises(CheckpointError, match=r"weights-00000\.safetensors: norm\.weight is BF16 \[7\]"):
        checkpoint.read("weight:norm.weight", device=CPU)
    assert checkpoint.read("weight:embedding.weight", device=CPU).dtype == torch.float32


def test_many_ranks_detect_it_too(pristine: Path, tmp_path: Path) -> None:
    choose = random.Random(5)
    for number, name in enumerate(FILES):
        root = tmp_path / str(number)
        shutil.copytree(pristine, root)
        flip_bit(root / "run" / "step-0000002" / name, choose)

        def look(group: Group, folder: Path = root / "run") -> int:
            return find_checkpoint(
                folder, step=None, world=group, device=CPU, log=lambda line: None
            ).manifest.step

        assert on_threads(4, look) == [1] * 4
