"""The data-parallel benchmark, without its timings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.data_parallel import links as shaped_links
from benchmarks.data_parallel import run as data_parallel
from benchmarks.data_parallel.links import ShapedLinks, unavailable
from benchmarks.data_parallel.run import GPT, ONEBIT, Bench, end_of, seconds, sent, steps_of
from benchmarks.data_parallel.worker import PEERS, Recorder, train_ours
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import words

SMALL: dict[str, Any] = GPT | words(
    "num_layers=1 hidden_size=32 micro_batch_size=1 global_batch_size=2 dp=2 mock_data vocab_size=64"
)
SERVER = {**SMALL, "dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.01}
ORDERED: list[dict[str, Any]] = [{**each, "steps": 3, "settings": SERVER} for each in data_parallel.ORDERS[:2]]
CASES: list[dict[str, Any]] = [
    {"name": "plain", "steps": 3, "settings": SMALL},
    {"name": "frozen", "steps": 4, "settings": {**SMALL, **ONEBIT, "freeze_step": 2}, "forget_errors": True},
]


def work(context: RankContext, folder: Path) -> None:
    """Do the worker's cases on the host's loopback interface."""
    recorder = Recorder(folder / f"rank{context.rank}.jsonl", "lo")
    for case in (*CASES, *ORDERED):
        train_ours(case, context.groups, recorder)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Records that two ranks of the worker write."""
    folder = tmp_path_factory.mktemp("job")
    run_ranks(2, work, folder)
    lines = [json.loads(line) for path in folder.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    return {case["name"]: [line for line in lines if line["case"] == case["name"]] for case in (*CASES, *ORDERED)}


def test_each_rank_writes_a_record_per_step(records: dict[str, list[dict[str, Any]]]) -> None:
    for case in CASES:
        for rank in range(2):
            rows = steps_of(records[case["name"]], rank)
            assert [row["step"] for row in rows] == list(range(1, case["steps"] + 1))
            assert all(row["sent"] >= row["wire"] > 0 and row["seconds"] > 0 for row in rows)
            assert end_of(records[case["name"]], rank)["state_bytes"] > 0
    phases = [row["phase"] for row in steps_of(records["frozen"])]
    assert phases == ["gradients"] * 2 + ["momentum"] * 2
    # Volumes by the strategies' own count: the host's interface also counts other programs.
    wire = {name: sum(row["wire"] for row in steps_of(found)) for name, found in records.items()}
    assert wire["frozen"] < wire["plain"] * 4 / 3
    assert sent(records["plain"]) >= wire["plain"]
    assert seconds(records["plain"], 2) < seconds(records["plain"])


def test_order_of_pulls_does_not_change_losses(records: dict[str, list[dict[str, Any]]]) -> None:
    first, pushed = ([(row["loss"], row["wire"]) for row in steps_of(records[case["name"]])] for case in ORDERED)
    assert first == pushed and len({loss for loss, _ in first}) == 3


def test_each_peer_has_a_megalite_counterpart() -> None:
    assert set(data_parallel.PAIRS) == set(PEERS)


def test_error_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shaped_links.os, "geteuid", lambda: 1000)

    with pytest.raises(SystemExit, match="nothing measured: it needs root"):
        data_parallel.main(["--parts", "volume"])


@pytest.mark.skipif(unavailable() is not None, reason=f"no shaped links here: {unavailable()}")
def test_links_connect_ranks_and_are_removed() -> None:
    """Each rank's namespace has an interface with counters from 0. Afterwards these and those of ended processes are removed,
    while those of a running process stay."""
    gone, other = subprocess.Popen("true"), f"mgl-{os.getppid()}-rank0"
    gone.wait()
    for name in (f"mgl-{gone.pid}-rank0", other):
        subprocess.run(["ip", "netns", "add", name], check=True)
    with ShapedLinks(2) as links:
        links.set_rate(100.0)
        say = "from benchmarks.data_parallel.links import sent_and_received as s; print(*s())"
        started = subprocess.run(
            ["ip", "netns", "exec", f"mgl-{os.getpid()}-rank1", sys.executable, "-c", say],
            cwd=common.ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert all(int(number) < 10_000 for number in started.stdout.split())
        assert Bench(links, "text").case("one")["settings"]["data_path"] == ["text"]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    subprocess.run(["ip", "netns", "del", other], check=True)
    assert other in listed.stdout and not any(f"mgl-{pid}-" in listed.stdout for pid in (os.getpid(), gone.pid))
