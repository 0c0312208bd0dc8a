"""Files that a run on two ranks leaves in its folder. (`test_kill` tests listening sockets.)"""

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data.object_store import serving
from tests.e2e.forked import train_forked
from tests.e2e.programs import Outcome, records

pytestmark = pytest.mark.e2e

STEPS = 20
CANARIES = {
    "WANDB_API_KEY": "{}",
    "HF_TOKEN": "{}",
    "AWS_SECRET_ACCESS_KEY": "{}",
    "AZURE_CLIENT_SECRET": "{}",
    "GITHUB_TOKEN": "{}",
    "DB_PASSWORD": "{}",
    "SLACK_BOT_TOKEN": "{}",
    "MY_PRIVATE_KEY": "{}",
    "DATABASE_URL": "postgres://me:{}@db/runs",
    "REGISTRY_URL": "https://{}@registry/",
}
FLAGS = (
    "--mock-data --vocab-size 512 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --dp 2 "
    f"--global-batch-size 4 --train-iters {STEPS} --log-interval 10 --log-phases --eval-interval 10 --eval-iters 1 --trace --profile "
    "--profile-step-start 2 --profile-step-end 4 --profile-ranks 0 1 --metrics csv --fresh-if-missing --save-interval 10"
)


@dataclass(frozen=True)
class Watched:
    """A finished run."""

    folder: Path
    outcome: Outcome


def canary(name: str) -> str:
    return f"canary{name.lower().replace('_', '')}7"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched") / "run"
    with serving(tmp_path_factory.mktemp("served") / "there") as server:
        load = server.address(folder.name).replace("://", f"://me:{canary('LOAD')}@")
        words = [*FLAGS.split(), "--run-dir", folder, "--load", load]
        secrets = {name: value.format(canary(name)) for name, value in CANARIES.items()}
        return Watched(folder, train_forked(2, *words, seconds=150, more=secrets).require_success())


def test_no_file_contains_a_secret(watched: Watched) -> None:
    secrets = [canary(name).encode() for name in (*CANARIES, "LOAD")]
    files = [path for path in watched.folder.rglob("*") if path.is_file()]
    names = {path.relative_to(watched.folder).parts[0] for path in files}
    assert {"config.yaml", "metrics.jsonl", "metrics.csv", "sessions.json", "checkpoints", "profile"} <= names
    assert {"tensorboard", "trace-3.json"} <= names
    leaks = [(path, secret) for path in files for secret in secrets if secret in path.read_bytes()]
    assert leaks == []
    assert not any(secret.decode() in watched.outcome.out for secret in secrets)
    # Addresses are kept, without their credentials.
    manifest = next(watched.folder.glob("checkpoints/step-*/manifest.json")).read_text()
    for text in ((watched.folder / "config.yaml").read_text(), manifest):
        assert re.search(r"http:/+\*\*\*@", text)


def test_run_leaves_metrics_sessions_and_profiles(watched: Watched) -> None:
    lines = watched.outcome.out.splitlines()
    assert sum("ms/step of 2 ranks: forward " in line for line in lines) == STEPS // 10
    assert any(" goodput " in line for line in lines)
    train = records(watched.folder, "train")
    for record in train[9::10]:
        for phase in ("forward", "backward", "reduce", "optimizer", "other"):
            assert record[f"{phase}_ms"] >= record[f"{phase}_ms_min"] >= 0.0
        assert record["straggler_factor"] >= 1.0 and 0.0 < record["goodput"] < 1.0
    with (watched.folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "train"]
    assert [float(row["loss"]) for row in rows] == [record["loss"] for record in train]
    assert len(train) == STEPS
    (session,) = json.loads((watched.folder / "sessions.json").read_text())["sessions"]
    assert (session["ended"], session["ranks"], session["layout"], session["last_step"]) == (
        ("finished", 2, "dp 2", STEPS)
    )
    for rank in (0, 1):
        trace = (watched.folder / "profile" / f"rank-{rank}-steps-2-3.json").read_text()
        assert '"0B1 stage 0 microbatch 1"' in trace
