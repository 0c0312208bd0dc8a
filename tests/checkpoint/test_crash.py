"""kill -9 at every point of a save: every visible checkpoint verifies afterwards."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.forked import train_forked


@pytest.mark.parametrize("scenario", ["new", "replace"])
def test_checkpoints_verify_after_kill_at_every_point(tmp_path: Path, scenario: str) -> None:
    done = train_forked(1, tmp_path, scenario, seconds=200, command="tests.checkpoint.crash_writer:main")
    report = json.loads(done.require_success().out.splitlines()[-1])
    assert report["failures"] == []
    hit = Counter(report["hit"])
    # Each rank writes 2 shards and a list; rank 0 also the manifest and `latest`. With two writers the order of calls varies
    # between children, so the number of hits per kind of call varies a little; rank 0's are exact.
    ranks = 1 if scenario == "replace" else 2
    assert sum(count for kind, count in hit.items() if "inside" not in kind) >= 25 * ranks
    assert min(hit["open"], hit["unlink"] + hit["removal"]) >= ranks
    assert min(hit["fsync"], hit["write"], hit["inside write"]) >= 4 * ranks
    assert hit["mkdir"] == 1 and hit["replace"] == 1
    assert hit["rename"] == (4 if scenario == "replace" else 1)
    assert hit["rmdir"] == (2 if scenario == "replace" else 0)
