"""Runs that save to an object store: killed during an upload, a run resumes from the store on another layout.

Uses S3's protocol if s3fs is installed; `tests/training/test_upload.py` also tests fsspec's local store."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.data.stores import StoreObject
from tests.data.token_files import write_by_layout
from tests.e2e.forked import forked, still_running, train_forked
from tests.e2e.programs import MOCKED, losses
from tests.support.s3 import S3Server, running

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="forks")]

STEPS = 6
FLAGS = f"{MOCKED} --global-batch-size 4 --precision fp64 --lr 1e-3 --train-iters {STEPS} --log-interval 1".split()
UPLOAD = 4
"""Objects that rank 0 writes per checkpoint: two files, the manifest and `latest`. Before them it writes a probe."""


@pytest.fixture
def store() -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a run, and the environment of its clients."""
    with running(S3Server()) as server:
        yield "s3://bucket/run", server.environment


def die_at(number: int) -> None:
    """Kill this process before it writes the object of that number."""
    real, count = StoreObject.write, 0

    def write(store: StoreObject, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(store, *args, **kwargs)

    StoreObject.write = write  # type: ignore[method-assign]


def test_run_killed_during_upload_resumes_on_another_layout(store: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, environment = store
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    train_forked(1, *FLAGS, "--run-dir", whole, seconds=150).require_success()
    words = [*FLAGS, "--run-dir", run_dir, "--data-cache-path", tmp_path / "cache", "--async-save"]
    words += ["--save", address, "--load", address, "--fresh-if-missing", "--save-interval", "2", "--keep-latest", "2"]
    # Kill rank 0 before it uploads the manifest of step 4.
    with forked(2, [*words, "--tp", "2"], tmp_path, before=partial(die_at, 1 + UPLOAD + 3), more=environment) as ranks:
        assert still_running(ranks, 150) == [], (tmp_path / "0.out").read_text()
        assert ranks[0].exitcode == -signal.SIGKILL, (tmp_path / "0.err").read_text()
    said = train_forked(2, *words, "--pp", "2", seconds=150, more=environment).require_success().out
    assert "of-step-0000002/step-0000002 (written by tp 2, pp 1, dp 1)" in said
    assert f"saved {address}/step-0000006 in " in said and "waits in " in said
    ours, theirs = losses(run_dir), losses(whole)
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-9)
    again = train_forked(1, *words, seconds=150, more=environment).require_success().out
    assert "step-0000006 (written by tp 1, pp 2, dp 1)" in again and "nothing to do" in again
    assert len(list((tmp_path / "cache").rglob("of-step-*"))) == 1, "one fetched checkpoint is kept"


def test_unusable_store_is_one_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [*FLAGS, "--run-dir", tmp_path / "run", "--data-cache-path", tmp_path / "cache", "--save-interval", "2"]
    failed = train_forked(2, *words, "--save", f"file://{tmp_path}/file/run", "--tp", "2", seconds=150)
    assert failed.status == 2 and "step 1" not in failed.out
    (error,) = set(failed.errors)
    assert f"cannot save checkpoints to file://{tmp_path}/file/run: " in error and "give another --save" in error


def test_stored_checkpoint_is_converted_evaluated_and_protected(
    store: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = store
    words = [*FLAGS, "--data-cache-path", tmp_path / "cache", "--save", address, "--save-interval", "3"]
    train_forked(1, *words, seconds=150, more=environment).require_success()
    convert: list[str | Path] = ["convert", address, tmp_path / "converted", "--to", "native", "--step", "3"]
    at_home = {**environment, "HOME": str(tmp_path)}
    train_forked(1, *convert, seconds=150, more=at_home, command="megalite.cli.main:main").require_success()
    assert list((tmp_path / "converted").rglob("weights-*.safetensors"))
    write_by_layout(tmp_path / "text", [[1, 2, 3] * 20])
    flags = ["--ckpt-step", "3", "--device", "cpu", "--json", "--data-path", f"file://{tmp_path}/text"]
    found = []
    for load in (address, tmp_path / "converted"):
        asked = ["evaluate", "--load", load, *(flags if load == address else [*flags[2:-1], tmp_path / "text"])]
        done = train_forked(2, *asked, seconds=150, more=at_home, command="megalite.cli.main:main").require_success()
        found.append(json.loads(done.out)["loss"])
    assert found[0] == found[1]
    none = ["evaluate", "--load", f"{address}-none", *flags]
    failed = train_forked(2, *none, seconds=150, more=at_home, command="megalite.cli.main:main")
    assert failed.status == 2 and "-none" in failed.errors[0] and "step-0000003" in failed.errors[0]
    failed = train_forked(1, *words, seconds=150, more=environment)
    assert failed.status == 2
    assert failed.errors == [
        f"error: {address} holds checkpoints up to step 6 but this run starts at step 0; add --load {address} to continue "
        "from the newest, or give another --save"
    ]


def test_only_rank_0_reads_the_manifest(tmp_path: Path) -> None:
    """Rank 0 reads settings from a checkpoint in a store, and a damaged manifest is one error. Also without torchrun, where rank 0
    hosts the TCP store."""
    manifest, bare = "bucket/run/step-0000006/manifest.json", FLAGS[FLAGS.index("--mock-data") :]
    with running(S3Server()) as server, socket.create_server(("localhost", 0)) as free:
        saves = ["--save", "s3://bucket/run", "--save-interval", "6", "--data-cache-path", tmp_path / "cache"]
        train_forked(1, *FLAGS, *saves, seconds=150, more=server.environment).require_success()
        by_hand = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        for launcher, variables in (("torchrun", {}), ("none", by_hand)):
            words = [*bare, "--data-cache-path", tmp_path / launcher, "--load", "s3://bucket/run", "--tp", "2"]
            server.asked.clear()
            said = train_forked(2, *words, seconds=150, more=server.environment | variables).require_success().out
            assert "nothing to do" in said
            assert server.asked.count(("GET", manifest)) == 2, "once for the settings, once for the copy"
        server.objects[manifest] = b"{}"
        failed = train_forked(2, *words, seconds=150, more=server.environment)
    assert failed.status == 2 and len(failed.errors) == 1 and "step-0000006/manifest.json: " in failed.errors[0]
