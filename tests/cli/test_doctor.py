"""Test `megalite doctor`: report, JSON, flags, status."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.cli import doctor
from megalite.cli.main import main
from megalite.doctor import host
from megalite.doctor.host import Finding
from tests.support.ranks import forked_pools

Captured = pytest.CaptureFixture[str]
TOPICS = ["versions", "host", "devices", "kernels", "network", "disk", "products", "collectives"]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BYTES", 1 << 20)
    monkeypatch.setattr(host, "SYNCS", 3)


def test_complete_report(monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    with forked_pools():
        status = main(["doctor", "--device", "cpu", "--seconds", "0.5", "--run-dir", str(tmp_path / "runs")])
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    lines = said.out.splitlines()
    assert [line for line in lines if line in TOPICS] == TOPICS
    assert any(line.startswith("  ok       torch           ") for line in lines)
    assert any(line.startswith("  ok       all-reduce      ") for line in lines)
    assert f"{torch.__version__}" in said.out
    assert "\n  ok       chosen          torch: rmsnorm, " in said.out
    assert "\nwhat to fix" in said.out
    assert list(tmp_path.iterdir()) == []


def test_json_without_self_test(capsys: Captured) -> None:
    assert main(["doctor", "--device", "cpu", "--no-self-test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] in ("ok", "warning")
    assert list(dict.fromkeys(row["topic"] for row in found["findings"])) == TOPICS[:-2]
    assert {"topic", "name", "level", "text", "remedy", "data"} == set(found["findings"][0])


def test_errors_are_reported_with_status_1(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def found(*_: object) -> Iterator[Finding]:
        yield Finding(topic="a", name="one", text="well")
        yield Finding(topic="a", name="two", level="warning", text="so so", remedy="fix it a little")
        yield Finding(topic="b", name="three", level="error", text="bad\x1b[2J", remedy="fix it")

    monkeypatch.setattr(doctor, "_local_findings", found)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a",
        "  ok       one             well",
        "  warning  two             so so",
        "",
        "b",
        "  error    three           bad\\x1b[2J",
        "",
        "what to fix",
        "  error    b, three: bad\\x1b[2J",
        "           fix it",
        "  warning  a, two: so so",
        "           fix it a little",
    ]
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "error"
