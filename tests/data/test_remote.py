"""Files at addresses, from a server of the test, with ranges, tags, broken connections and a password."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.files import FileEntry
from megalite.checkpoint.manifest import CheckpointMissing, Manifest
from megalite.config.describe import replace
from megalite.config.errors import CheckpointError, ConfigError, Problems
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.conversion.model_folder import settings_in
from megalite.data.remote import fetch_all, with_places
from megalite.data.stores import redacted
from megalite.topology.group import Group
from megalite.training.resume import check_settings
from megalite.training.setup import fetch_remote_files
from tests.data.object_store import Store, serving
from tests.data.token_files import distinct_documents, write_by_layout
from tests.support.s3 import S3Server, running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with serving(tmp_path / "there") as server:
        yield server


def fetch(tmp_path: Path, **settings: Any) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    config = replace(RunConfig(), data_cache_path=str(tmp_path / "cache"), **settings)
    return fetch_all(config, say=said.append, stopped=lambda: False), said


def test_text_is_fetched_again_only_if_changed(store: Store, tmp_path: Path) -> None:
    (store.folder / "a.jsonl").write_text('{"text": "a"}\n')
    address = store.address("a.jsonl?signature=secret")
    found, said = fetch(tmp_path, data_path=["0.3", address, "0.7", "b"])
    place = Path(found[address])
    assert place.name == "a.jsonl" and place.read_text() == '{"text": "a"}\n'
    assert said == [f"fetched {store.address('a.jsonl')} (14 bytes) to {place}"]
    assert fetch(tmp_path, data_path=[address]) == (found, [])
    assert store.asked == ["HEAD a.jsonl", "GET a.jsonl", "HEAD a.jsonl"]
    config = with_places(replace(RunConfig(), data_path=["0.3", address, "0.7", "b"]), found)
    assert config.data.data_path == ["0.3", str(place), "0.7", "b"]
    (store.folder / "a.jsonl").write_text('{"text": "b"}\n')
    assert len(fetch(tmp_path, data_path=[address])[1]) == 1 and "b" in place.read_text()


def test_token_files_must_match_their_side_file(store: Store, tmp_path: Path) -> None:
    write_by_layout(store.folder / "d", distinct_documents([5, 7]))
    bin_file = store.folder / "d.bin"
    address = store.address("d")
    found, _ = fetch(tmp_path, train_data_path=[address])
    assert Path(f"{found[address]}.bin").read_bytes() == bin_file.read_bytes()
    assert Path(f"{found[address]}.idx").exists() and not Path(f"{found[address]}.json").exists()
    digest = hashlib.sha256(bin_file.read_bytes()).hexdigest()
    side = {
        "format": 1,
        "documents": 2,
        "tokens": 12,
        "dtype": "uint16",
        "files": {".bin": {"bytes": 24, "sha256": digest}},
    }
    (store.folder / "d.json").write_text(json.dumps(side))
    fetch(tmp_path, train_data_path=[address])
    bin_file.write_bytes(bytes(24))
    with pytest.raises(ConfigError, match=r"/d\.bin is damaged: its sha256 is \w+, not "):
        fetch(tmp_path, train_data_path=[address])
    with pytest.raises(ConfigError, match=r"/d_mask_document\.idx does not exist"):
        bin_file.write_bytes(Path(f"{found[address]}.bin").read_bytes())
        fetch(tmp_path, train_data_path=[address], sft=True)


def test_broken_connection_is_resumed(store: Store, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (store.folder / "a.txt").write_bytes(content)
    store.breaks_after = 3_000_000
    found, _ = fetch(tmp_path, data_path=[store.address("a.txt")])
    assert Path(found[store.address("a.txt")]).read_bytes() == content
    assert store.asked[-1] == "GET a.txt bytes=3000000-"


def test_tokenizer_is_fetched_with_the_files_beside_it(store: Store, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (store.folder / name).write_text(name)
    address = store.address("tokenizer.json")
    found, said = fetch(tmp_path, tokenizer_model=address)
    assert (
        len(said) == 2
        and Path(found[address]).with_name("tokenizer_config.json").read_text() == "tokenizer_config.json"
    )


def test_secrets_are_sent_but_not_shown(store: Store, tmp_path: Path) -> None:
    (store.folder / "a.jsonl").write_text("{}")
    store.password = "me:p@ss/word"
    secret = "me:p%40ss%2Fword@"
    _, (line,) = fetch(tmp_path, data_path=[store.address("a.jsonl", user=secret)])
    assert "word" not in line
    with pytest.raises(
        ConfigError, match="403 Forbidden; check that the server runs and that you have access"
    ) as error:
        fetch(tmp_path, data_path=[store.address("a.jsonl?token=hidden", user="me:wrong@")])
    assert "wrong" not in str(error.value) and "hidden" not in str(error.value)
    assert redacted("https://me:word@host/a/b?X-Amz-Signature=1#c") == "https://host/a/b"


def test_missing_object_is_one_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/none\.jsonl does not exist; give the address of a file that does"):
        fetch(tmp_path, data_path=[store.address("none.jsonl")])
    with pytest.raises(ConfigError, match=r"nosuch://host/a\.jsonl cannot be read: Protocol not known"):
        fetch(tmp_path, data_path=["nosuch://host/a.jsonl"])
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/a\.jsonl cannot be read: .*refused"):
        fetch(tmp_path, data_path=["http://127.0.0.1:1/a.jsonl"])
    (tmp_path / "file").touch()
    (store.folder / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="use another folder with --data-cache-path"):
        config = replace(RunConfig(), data_cache_path=str(tmp_path / "file"), data_path=[store.address("a.jsonl")])
        fetch_all(config, say=print, stopped=lambda: False)


def write_run(folder: Path, **facts: Any) -> Path:
    """Write a run with one checkpoint of one file. Returns the checkpoint's folder."""
    step = folder / "run" / "step-0000002"
    step.mkdir(parents=True)
    (step / "rank-0.safetensors").write_bytes(b"weights")
    files = {"rank-0.safetensors": FileEntry(7, hashlib.sha256(b"weights").hexdigest())}
    config = {"model": {"num_layers": 3, "hidden_size": 48, "hidden_dropout": 0.5}, "training": {"seq_length": 24}}
    about = {"config": config, "layout": {}, "megalite_version": "1.0", **facts}
    manifest = Manifest(step=2, files=files, tensors={}, counters={}, **about)
    (step / "manifest.json").write_text(manifest.to_json())
    (folder / "run" / "latest").write_text("step-0000002\n")
    return step


def test_files_in_an_s3_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, token files, a checkpoint and a missing object, by the store's own client."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / "a.jsonl").write_text('{"text": "a"}\n')
    write_by_layout(bucket / "d", distinct_documents([5, 7]))
    write_run(bucket)
    with running(S3Server()) as server:
        server.use(monkeypatch)
        files = (path for path in bucket.rglob("*") if path.is_file())
        server.objects = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
        text, tokens, run = (f"s3://bucket/{name}" for name in ("a.jsonl", "d", "run"))
        found, said = fetch(tmp_path, data_path=["0.3", text, "0.7", tokens], load=run)
        assert Path(found[text]).read_text() == '{"text": "a"}\n' and len(said) == 5
        assert Path(f"{found[tokens]}.bin").read_bytes() == (bucket / "d.bin").read_bytes()
        assert (Path(found[run]) / "step-0000002" / "rank-0.safetensors").read_bytes() == b"weights"
        assert fetch(tmp_path, data_path=[text]) == ({text: found[text]}, [])
        with pytest.raises(ConfigError, match=r"s3://bucket/none\.jsonl does not exist"):
            fetch(tmp_path, data_path=["s3://bucket/none.jsonl"])


def test_checkpoint_must_match_its_manifest(store: Store, tmp_path: Path) -> None:
    step = write_run(store.folder)
    found, _ = fetch(tmp_path, load=store.address("run"))
    (here,) = Path(found[store.address("run")]).iterdir()
    assert here.name == "step-0000002" and (here / "rank-0.safetensors").read_bytes() == b"weights"
    assert fetch(tmp_path, load=store.address("run"), ckpt_step=2)[0] == found
    (step / "rank-0.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"rank-0\.safetensors is damaged"):
        fetch(tmp_path, load=store.address("run"))


def test_checkpoint_of_another_model_is_not_fetched(store: Store, tmp_path: Path) -> None:
    """The error is that of the run, no other file is fetched, and no older checkpoint is tried."""
    write_run(store.folder)
    (store.folder / "a.jsonl").write_text("{}")
    address = store.address("run")
    data = {"data_path": [store.address("a.jsonl")], "data_cache_path": str(tmp_path / "cache")}
    config, said = replace(RunConfig(), load=address, num_layers=4, **data), list[str]()
    accept = partial(check_settings, explicit=frozenset(), tokenizer_of=lambda config: None)
    with pytest.raises(CheckpointError, match=r"/run/step-0000002 is of another model: num_layers 3 there, 4 here"):
        fetch_all(config, say=said.append, stopped=lambda: False, accept=accept)
    assert "manifest.json" in said[0] and len(said) == 1
    assert {name.split()[1] for name in store.asked} == {"latest", "manifest.json"}


def test_address_is_named_if_there_is_no_checkpoint(store: Store, tmp_path: Path) -> None:
    address = store.address("none")
    config, said = replace(RunConfig(), load=address, data_cache_path=str(tmp_path / "cache")), list[str]()
    with pytest.raises(
        CheckpointMissing, match=rf"^no complete checkpoint at {re.escape(address)}; .* --fresh-if-missing$"
    ):
        fetch_all(config, say=said.append, stopped=lambda: False)
    fetch_all(replace(config, fresh_if_missing=True), say=said.append, stopped=lambda: False)
    assert said == [f"no complete checkpoint at {address}"]


def test_checkpoint_of_another_tokenizer_is_not_fetched(store: Store, tmp_path: Path) -> None:
    """The tokenizer is fetched before, or is known from the token files; --finetune accepts it."""
    asked = {"load": store.address("run"), "load_optimizer": False, "data_cache_path": str(tmp_path / "cache")}
    made = validate(replace(RunConfig(), vocab_size=2, **asked), None, frozenset(), problems=Problems())
    write_run(store.folder, tokenizer="0" * 64, config={"model": asdict(made.model)})
    letters = {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []}
    (store.folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": letters, "added_tokens": []}))
    write_by_layout(tmp_path / "d", distinct_documents([5, 7]))
    recorded = {"kind": "other", "sha256": "1" * 64}
    facts = {"format": 1, "documents": 2, "tokens": 12, "dtype": "uint16", "tokenizer": recorded}
    (tmp_path / "d.json").write_text(json.dumps(facts))
    world = Group.solo("world")
    for more, says in (
        ({"tokenizer_model": store.address("tokenizer.json")}, r"/run/step-0000002 was trained with another tokenizer"),
        ({"vocab_size": 2, "data_path": [str(tmp_path / "d")]}, r"/d\.bin was made with another tokenizer: other"),
    ):
        store.asked.clear()
        config = replace(RunConfig(), **asked, **more)
        with pytest.raises(ConfigError, match=says):
            fetch_remote_files(config, world=world, log=print, explicit=frozenset())
        assert not any("safetensors" in name for name in store.asked)
    fetch_remote_files(replace(config, finetune=True), world=world, log=print, explicit=frozenset())
    assert store.asked[-1] == "GET rank-0.safetensors"


def test_model_settings_come_from_the_manifest_at_an_address(store: Store, tmp_path: Path) -> None:
    step = write_run(store.folder)
    for asked in (None, 2):
        found = settings_in(store.address("run"), asked)
        assert found == {"num_layers": 3, "hidden_size": 48, "seq_length": 24}
    assert settings_in(store.address("none"), None) is None and settings_in(store.address("run"), 3) is None
    (step / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"/run/step-0000002/manifest\.json: "):
        settings_in(store.address("run"), None)


def test_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset on disk; its package reads those of the hub in the same way."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    there = tmp_path / "corpus"
    there.mkdir()
    (there / "train.jsonl").write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(10)))
    address = f"hf://{there}?split=train[2:4]"
    found, said = fetch(tmp_path, data_path=[address])
    rows = [json.loads(line) for line in Path(found[address]).read_text().splitlines()]
    assert rows == [{"text": "line 2"}, {"text": "line 3"}]
    assert said == [f"fetched {address} (2 rows) to {found[address]}"]
    assert fetch(tmp_path, data_path=[address]) == (found, [])
    with pytest.raises(ConfigError, match=r"columns is unknown; use split, name and revision"):
        fetch(tmp_path, data_path=[f"hf://{there}?columns=a"])
    with pytest.raises(ConfigError, match=r"hf:///nowhere cannot be read: "):
        fetch(tmp_path, data_path=["hf:///nowhere"])


def test_hugging_face_dataset_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="hf://owner/name needs the package datasets: pip install datasets"):
        fetch(tmp_path, data_path=["hf://owner/name"])
