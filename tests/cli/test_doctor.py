"""Test `megalite doctor` (report, JSON, flags, status), `megalite kernels`, and messages of a run about unavailable kernels."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.cli import doctor
from megalite.cli.main import main
from megalite.config.compute import OPERATIONS
from megalite.doctor import host
from megalite.doctor.host import Finding
from megalite.kernels.registry import backends_of
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


def asked(capsys: Captured, *words: str) -> dict[str, Any]:
    assert main(["kernels", "--json", "--device", "cpu", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_table_of_backends(capsys: Captured) -> None:
    assert main(["kernels", "--device", "cpu"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")[1:]
    lines = first.splitlines()
    assert len(lines) == 1 + sum(len(backends_of(operation)) for operation in OPERATIONS)
    assert lines[1].split(maxsplit=2)[:2] == ["rmsnorm", "apex"]
    assert lines[1].endswith(" apex needs a CUDA device, not cpu")
    assert lines[3].split() == ["torch", "ready"]
    chosen = [line.split()[:4] for line in second.splitlines()[1:]]
    assert ["rmsnorm", "4096", "bfloat16", "torch"] in chosen
    assert ["rope", "128", "float32", "torch"] in chosen
    assert {row[0] for row in chosen} == set(OPERATIONS)


def test_json_output(capsys: Captured) -> None:
    found = asked(capsys)
    assert found["device"] == "cpu" and found["torch"] == torch.__version__
    rows = {(row["operation"], row["backend"]): row for row in found["kernels"]}
    assert set(rows) == {(name, backend) for name in OPERATIONS for backend in backends_of(name)}
    assert rows["adam", "torch"] == {"operation": "adam", "backend": "torch", "reason": None, "not_for": {}}
    assert rows["adam", "apex"]["reason"] == "apex needs a CUDA device, not cpu"
    adam = [row for row in found["chosen"] if row["operation"] == "adam"]
    assert adam == [
        {"operation": "adam", "size": 1 << 24, "dtype": "torch.float32", "backend": "torch", "why": "no rule: torch"}
    ]


def test_result_of_a_choice(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.kernels.registry.why_not_triton", lambda device: None)
    rows = {(row["operation"], row["dtype"]): row for row in asked(capsys, "--kernels", "triton,adam=torch")["chosen"]}
    assert rows["swiglu", "torch.bfloat16"]["backend"] == "triton"
    assert rows["swiglu", "torch.bfloat16"]["why"] == "requested for all operations"
    assert (rows["adam", "torch.float32"]["backend"], rows["adam", "torch.float32"]["why"]) == ("torch", "requested")
    assert rows["softmax", "torch.float32"]["backend"] == "torch"
    assert rows["softmax", "torch.float32"]["why"] == "no rule: torch; triton: it has none"


def test_run_logs_unserved_operations_once(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN, which every CPU has, implements only matrix products."""
    monkeypatch.setattr("megalite.kernels.registry.why_not_onednn", lambda device: None)
    words = [*TINY.split(), "--train-iters", "2", "--device", "cpu", "--kernels", "onednn"]
    assert main(["train", *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "kernels: not onednn but " in line]
    assert len(lines) == 1
    assert "torch for layernorm, " in lines[0] and "(it has none)" in lines[0] and "matmul" not in lines[0]


TINY = "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8"


def test_unavailable_kernel_is_an_error(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.kernels.registry.why_not_triton", lambda device: "not interpreted")
    assert main(["train", *TINY.split(), "--train-iters", "1", "--device", "cpu", "--kernels", "adam=apex"]) == 2
    reason = "adam=apex cannot be used: apex needs a CUDA device, not cpu; use adam=torch"
    assert capsys.readouterr().err == f"error: kernels: {reason}\n"
