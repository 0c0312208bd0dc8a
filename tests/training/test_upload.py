"""Checkpoints at an address are complete once the manifest exists, despite failures and kills before. Uses fsspec's
store of files and, if s3fs is installed, S3's protocol."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import megalite.data.stores as stores
import megalite.training.copies as copies
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.cli.model_commands import INSPECT
from megalite.config.describe import replace
from megalite.config.errors import CheckpointError, ConfigError, TakenError
from megalite.config.run import RunConfig
from megalite.data.remote import fetch_checkpoint
from megalite.data.stores import StoreObject
from megalite.topology.group import Group
from megalite.training.copies import Destination
from tests.checkpoint.inspecting import flip_last_bit
from tests.checkpoint.samples import assert_holds, find, on_threads, save_as
from tests.support.s3 import S3Server, running

pytest.importorskip("fsspec")
WRITES = 6
"""Objects of two ranks: two files each, the manifest, `latest`."""


class Killed(AssertionError):
    """The rank was killed."""


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stores, "_PAUSES", (0.0, 0.0))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(params=["file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a run's folder that does not exist yet."""
    if request.param == "file":
        yield f"file://{tmp_path}/store/run"
        return
    with running(S3Server()) as server:
        server.use(monkeypatch)
        yield "s3://bucket/run"


IN_FILES = pytest.mark.parametrize("address", ["file"], indirect=True)
"""Tests of megalite's use of fsspec, not of fsspec's use of the store."""


def destination(address: str, tmp_path: Path, **settings: Any) -> Destination:
    return Destination(replace(RunConfig(), save=address, data_cache_path=str(tmp_path / "cache"), **settings))


def save(
    to: Callable[[Group], Destination], step: int, log: Callable[[str], None] = pytest.fail, seed: int | None = None
) -> list[Any]:
    """Write the checkpoint of a step from two ranks, with tensors of this seed; return the ranks' results."""

    def of_rank(group: Group) -> str:
        there = to(group)
        path = save_as(there.folder, group, step=step, seed=step if seed is None else seed, host=there.host)
        return there.upload(path, world=group, log=log)

    return on_threads(2, of_rank)


def names(address: str) -> dict[str, list[str]]:
    run = StoreObject(address)
    steps = [name for name in sorted(run.entries()) if name.startswith("step")]
    return {name: sorted(re.sub(r"-[0-9a-f]{8}\.", ".", file) for file in run.below(name).entries()) for name in steps}


def fetched(address: str, step: int | None = None) -> Path:
    return fetch_checkpoint(address, step, say=lambda line: None)


class Ends:
    """Write objects until number `number`; raise an error for it and all later ones."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, error: Exception) -> None:
        self.count, real = 0, StoreObject.write

        def write(store: StoreObject, *args: Any, **kwargs: Any) -> None:
            self.count += 1
            if self.count >= number:
                raise error
            real(store, *args, **kwargs)

        patch.setattr(StoreObject, "write", write)


def test_uploaded_checkpoint_can_be_fetched(address: str, tmp_path: Path) -> None:
    there = destination(address, tmp_path)
    assert there.newest() is None
    with pytest.raises(CheckpointMissing, match="no complete checkpoint at "):
        fetched(address)
    for step in (1, 2):
        assert save(lambda group: there, step) == [f"{address}/step-000000{step}"] * 2
    assert there.newest() == 2 and list(there.folder.iterdir()) == [], "no local file is left"
    kinds = ("optimizer", "weights")
    files = sorted(["manifest.json", *(f"{kind}-0000{rank}.safetensors" for kind in kinds for rank in (0, 1))])
    assert names(address) == {"step-0000001": files, "step-0000002": files}
    for step, found in ((2, fetched(address)), (1, fetched(address, 1))):
        assert_holds(find(found), seed=step)


@IN_FILES
def test_object_is_replaced_atomically(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file store shows a partial manifest, however the write ends."""
    manifest = StoreObject(address).below("manifest.json")
    manifest.write(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "the disk is full")))
        with pytest.raises(ConfigError, match="the disk is full"):
            manifest.write(b"the new one", patient=False)
    assert manifest.content() == b"old"
    manifest.write(b"the new one")
    assert manifest.content() == b"the new one" and list(StoreObject(address).entries()) == ["manifest.json"]


@pytest.mark.parametrize(
    ("address", "number"), [*(("file", number) for number in range(1, WRITES + 1)), ("s3", 3)], indirect=["address"]
)
def test_previous_checkpoint_is_complete_after_a_kill_at_any_write(address: str, tmp_path: Path, number: int) -> None:
    there = destination(address, tmp_path)
    save(lambda group: there, 1)
    with pytest.MonkeyPatch.context() as patch:
        Ends(patch, number, Killed())
        assert any(isinstance(result, Killed) for result in save(lambda group: there, 2))
    newest = 2 if number == WRITES else 1  # it only lacks `latest`, a file for users
    assert there.newest() == newest
    assert_holds(find(fetched(address)), seed=newest)
    again = destination(address, tmp_path)
    again.remove_unfinished()
    assert list(names(address)) == [f"step-000000{step}" for step in range(1, newest + 1)]
    assert save(lambda group: again, 2) == [f"{address}/step-0000002"] * 2
    assert again.newest() == 2 and list(again.folder.iterdir()) == []
    assert_holds(find(fetched(address)), seed=2)


@IN_FILES
@pytest.mark.parametrize("number", range(1, WRITES + 1))
def test_repeated_step_is_replaced_once_complete(address: str, tmp_path: Path, number: int) -> None:
    there = destination(address, tmp_path)
    save(lambda group: there, 1, seed=7)
    whole = names(address)
    with pytest.MonkeyPatch.context() as patch:
        Ends(patch, number, Killed())
        save(lambda group: there, 1)
    assert_holds(find(fetched(address)), seed=1 if number == WRITES else 7)
    assert save(lambda group: destination(address, tmp_path), 1) == [f"{address}/step-0000001"] * 2
    assert_holds(find(fetched(address)), seed=1)
    assert names(address) == whole, "no old object is left"


def test_only_one_run_saves_to_an_address(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run on another machine is refused while the first is alive, but not after it was killed or has left."""
    monkeypatch.setattr(copies, "_BEAT_SECONDS", 0.2)
    first, second = destination(address, tmp_path), destination(address, tmp_path)
    first.take(print)
    with pytest.raises(TakenError, match=rf"another run is saving to {address} \(process \d+ on .*give another --save"):
        second.take(print)
    first._leaving.set()  # like a kill: its files remain
    first._beating.join()
    second.take(print)
    with pytest.raises(ConfigError, match="another run has begun to save there"):
        first._require_owned()
    assert isinstance(save(lambda group: first, 1)[0], CheckpointError) and first.newest() is None
    assert save(lambda group: second, 1) == [f"{address}/step-0000001"] * 2
    second.leave()
    assert list(StoreObject(address).entries()) == ["latest", "step-0000001"]


@IN_FILES
def test_machines_with_separate_folders(address: str, tmp_path: Path) -> None:
    def on_machine(group: Group) -> Destination:
        there = destination(address, tmp_path)
        there.host = f"machine-{group.rank}"
        there.folder = tmp_path / there.host
        return there

    for step in (1, 2):
        assert save(on_machine, step) == [f"{address}/step-000000{step}"] * 2
    assert_holds(find(fetched(address)), seed=2)
    for rank in (0, 1):
        assert list((tmp_path / f"machine-{rank}").iterdir()) == []


def test_failed_writes_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, asked = f"file://{tmp_path}/store/run", [0]
    files = type(StoreObject(address)._files)
    real = files.put_file

    def put_file(*args: Any, **kwargs: Any) -> None:
        asked[0] += 1
        if asked[0] <= 2:  # of three attempts per file
            raise OSError("slow down")
        real(*args, **kwargs)

    monkeypatch.setattr(files, "put_file", put_file)
    store = StoreObject(f"{address}/file")
    store.write(Path(__file__))
    assert asked == [3] and store.state().size == Path(__file__).stat().st_size
    asked[0] = -1
    with pytest.raises(ConfigError, match=f"{address}/file cannot be written: slow down"):
        store.write(Path(__file__))


@IN_FILES
def test_failed_upload_is_one_error_and_keeps_the_checkpoint(address: str, tmp_path: Path) -> None:
    there = destination(address, tmp_path)
    save(lambda group: there, 1)
    with pytest.MonkeyPatch.context() as patch:
        Ends(patch, 2, ConfigError("the store is full"))
        errors = save(lambda group: there, 2)
    kept = there.folder / "step-0000002"
    assert all(isinstance(error, CheckpointError) for error in errors) and len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(
        f"cannot save a checkpoint in {address}: the store is full; it is kept in {kept} (rank "
    )
    assert_holds(find(there.folder), seed=2)
    assert there.newest() == 1
    save(lambda group: there, 3)
    assert there.newest() == 3 and list(there.folder.iterdir()) == [], "the local copy is no longer needed"


def test_truncated_upload_is_not_complete(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, real = destination(address, tmp_path), StoreObject.write

    def write(store: StoreObject, content: Any, **how: Any) -> None:
        real(store, content.read_bytes()[:-1] if isinstance(content, Path) else content, **how)

    monkeypatch.setattr(StoreObject, "write", write)
    errors = save(lambda group: there, 2)
    assert re.search(r"/optimizer-00000-\w+\.safetensors has \d+ bytes there, not ", str(errors[0]))
    assert there.newest() is None


@pytest.mark.parametrize("pattern", ["weights-00001-*.safetensors", "manifest.json"])
def test_damaged_checkpoint_is_skipped(tmp_path: Path, pattern: str) -> None:
    address, said = f"file://{tmp_path}/store/run", list[str]()
    there = destination(address, tmp_path)
    for step in (1, 2):
        save(lambda group: there, step)
    (damaged,) = (tmp_path / "store" / "run" / "step-0000002").glob(pattern)
    flip_last_bit(damaged)
    assert_holds(find(fetch_checkpoint(address, None, say=said.append)), seed=1)
    (line,) = [line for line in said if "passed over" in line]
    assert line.startswith(f"checkpoint {address}/step-0000002 is passed over: {address}/step-0000002/{damaged.name}")
    with pytest.raises(ConfigError, match=damaged.name):
        fetched(address, 2)


def test_keep_latest_at_an_address(address: str, tmp_path: Path) -> None:
    there = destination(address, tmp_path, keep_latest=2, keep_every=4)
    for step in range(1, 8):
        save(lambda group: there, step)
        assert there.newest() == step
    assert list(names(address)) == [f"step-000000{step}" for step in (4, 6, 7)]


@IN_FILES
def test_failed_removal_is_reported(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, said = destination(address, tmp_path, keep_latest=1), list[str]()
    save(lambda group: there, 1)
    real = StoreObject.remove

    def remove(store: StoreObject) -> None:
        if "step-0000001" in store._address:
            raise ConfigError("it is held")
        real(store)

    monkeypatch.setattr(StoreObject, "remove", remove)
    save(lambda group: there, 2, said.append)
    assert said == [f"warning: {address}/step-0000002 is saved, but it is held"] and list(names(address)) == [
        "step-0000001",
        "step-0000002",
    ]


def test_partially_removed_checkpoint_is_not_complete(address: str, tmp_path: Path) -> None:
    there, removed, real = destination(address, tmp_path, keep_latest=1), list[str](), StoreObject.remove
    save(lambda group: there, 1)

    def remove(store: StoreObject) -> None:
        if "step-0000001" in store._address:
            if removed:
                raise Killed
            removed.append(store._address)
        real(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreObject, "remove", remove)
        assert any(isinstance(result, Killed) for result in save(lambda group: there, 2))
    assert names(address)["step-0000001"], "its other files exist"
    assert list(StoreObject(address).steps()) == [2]


def test_probe_before_the_first_step(address: str, tmp_path: Path) -> None:
    there = destination(address, tmp_path)
    there.probe(3)
    assert StoreObject(address).entries() == {}
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"cannot save checkpoints to .*/file/run: .*/file/run/\.probe-00000 cannot be written"
    ):
        destination(f"file://{tmp_path}/file/run", tmp_path).probe(0)


def test_inspect_accepts_an_address(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = destination(address, tmp_path)
    for step in (1, 2):
        save(lambda group: there, step)
    assert INSPECT([address]) == 0
    assert "sha256 OK" in capsys.readouterr().out
    assert INSPECT(["--diff", address, str(fetched(address)), "--step", "2"]) == 0
    assert INSPECT([f"{address}/none"]) == 2
    assert "no complete checkpoint at " in capsys.readouterr().err


def test_missing_bucket_is_not_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running(S3Server()) as server:
        server.use(monkeypatch)
        server.missing_buckets.add("slip")
        with pytest.raises(ConfigError, match=r"s3://slip/run/\.probe-00000 cannot be written: "):
            destination("s3://slip/run", tmp_path).probe(0)
        server.refuses = lambda method, name: method == "DELETE" or method == "POST"
        with pytest.raises(ConfigError, match=r"s3://bucket/run/\.probe-00000 cannot be removed: "):
            destination("s3://bucket/run", tmp_path).probe(0)


def test_large_files_are_uploaded_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = bytes(range(256)) * (120 << 12)
    (tmp_path / "large").write_bytes(content)
    beats: list[None] = []
    with running(S3Server()) as server:
        server.use(monkeypatch)
        StoreObject("s3://bucket/large").write(tmp_path / "large", beat=lambda: beats.append(None))
        assert server.objects["bucket/large"] == content and len(beats) > 2
        assert any(method == "POST" for method, _ in server.asked)
