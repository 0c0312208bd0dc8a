"""Files that a run on two ranks leaves in its folder contain no secret. (`test_kill` tests listening sockets.)"""

import re
from pathlib import Path

import pytest

from tests.data.object_store import serving
from tests.e2e.forked import train_forked

pytestmark = pytest.mark.e2e

KEYS = [
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AZURE_CLIENT_SECRET",
    "GITHUB_TOKEN",
    "DB_PASSWORD",
    "SLACK_BOT_TOKEN",
]
CANARIES = {**dict.fromkeys([*KEYS, "MY_PRIVATE_KEY"], "{}"), "DATABASE_URL": "postgres://me:{}@db/runs"}
CANARIES |= {"REGISTRY_URL": "https://{}@registry/"}
FLAGS = (
    "--mock-data --vocab-size 512 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --dp 2 "
    "--global-batch-size 4 --train-iters 10 --log-interval 5 --log-phases --eval-interval 5 --eval-iters 1 --trace --profile "
    "--profile-step-start 2 --profile-step-end 4 --profile-ranks 0 1 --metrics csv --fresh-if-missing --save-interval 5"
)


def canary(name: str) -> str:
    return f"canary{name.lower().replace('_', '')}7"


def test_no_file_contains_a_secret(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with serving(tmp_path / "there") as server:
        load = server.address(folder.name).replace("://", f"://me:{canary('LOAD')}@")
        given = {name: value.format(canary(name)) for name, value in CANARIES.items()}
        words = [*FLAGS.split(), "--run-dir", folder, "--load", load]
        out = train_forked(2, *words, seconds=150, more=given).require_success().out
    secrets = [canary(name).encode() for name in (*CANARIES, "LOAD")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).parts[0] for path in files}
    assert {"config.yaml", "metrics.jsonl", "metrics.csv", "sessions.json", "checkpoints", "profile"} <= names
    assert {"tensorboard", "trace-3.json"} <= names
    assert [(path, secret) for path in files for secret in secrets if secret in path.read_bytes()] == []
    assert not any(secret.decode() in out for secret in secrets)
    # Addresses are kept, without their credentials.
    manifest = next(folder.glob("checkpoints/step-*/manifest.json")).read_text()
    for text in ((folder / "config.yaml").read_text(), manifest):
        assert re.search(r"http:/+\*\*\*@", text)
