"""Test `megalite plan-chain`: text, data, picture, errors."""

import json
from pathlib import Path

import pytest

from megalite.cli.tool_commands import PLAN_CHAIN as main

Captured = pytest.CaptureFixture[str]

PROFILE = """\
name: tiny
batch_size: 1
layers:
  - {name: a, repeat: 2, forward_ms: 10, backward_ms: 20, output_bytes: 1000, activation_bytes: 1000000, parameter_bytes: 4000000}
  - {name: b, forward_ms: 20, backward_ms: 40, output_bytes: 1000, activation_bytes: 1000000, parameter_bytes: 800000000}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(PROFILE)
    return str(path)


def test_text_output(tiny: str, capsys: Captured) -> None:
    assert main([tiny, "--cluster", "2x1", "--global-batch-size", "8", "--compare"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("tiny on 2x1@25 (2 devices of 14.90 GiB), 8 samples per step\nprofile: not stated\n")
    # Two stages of 60 ms each, (8 + 1) turns and messages of a thousandth of a ms.
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert float(rows["this plan"][2]) == pytest.approx(0.54, abs=1e-3)
    assert rows["data parallel"][4] > "1.2"
    assert {"PipeDream:", "data parallel:", "straight pipeline:"} <= set(rows)
    assert "the search is complete" in said and "rank 1" in said and "F7" in said and "idle devices" not in said
    assert main(["gnmt-16", "--cluster", "A", "--global-batch-size", "1024"]) == 0
    assert "\n1 microbatches of 1024 samples, idle devices: 8\n" in capsys.readouterr().out


def test_json_and_drawing(tiny: str, capsys: Captured, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    assert main([tiny, "--cluster", "2x1", "--global-batch-size", "8", "--json", "--svg", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["profile"], found["cluster"], found["devices"]) == ("tiny", "2x1@25", 2)
    plan = found["plan"]
    assert [(stage["first_layer"], stage["last_layer"], stage["devices"]) for stage in plan["stages"]] == [
        (0, 2, [0]),
        (2, 3, [1]),
    ]
    assert plan["samples_per_second"] == pytest.approx(8 / plan["step_seconds"])
    assert plan["fits"] and plan["microbatches"] == 8
    assert set(found["baselines"]) == {"PipeDream", "data parallel", "straight pipeline"}
    assert all(other["step_seconds"] >= plan["step_seconds"] for other in found["baselines"].values())
    text = picture.read_text()
    assert text.startswith("<svg") and "tiny on 2x1@25" in text


def test_memory_limit(tiny: str, capsys: Captured) -> None:
    flags = [tiny, "--cluster", "2x1", "--global-batch-size", "8"]
    assert main([*flags, "--memory", "3.205GB"]) == 0
    said = capsys.readouterr().out
    (row,) = (line for line in said.splitlines() if line.startswith("data parallel"))
    assert row.endswith("does not fit")
    assert main([*flags, "--memory", "3GB"]) == 2
    assert "no plan for tiny on 2x1@25 fits 2.79 GiB per device" in capsys.readouterr().err
