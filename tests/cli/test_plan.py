"""Test the command lines of `megalite plan` and `megalite plan-chain`: text, data, picture, errors."""

import json
from pathlib import Path

import pytest

from megalite.cli.tool_commands import PLAN, PLAN_CHAIN
from megalite.config.describe import values_of
from megalite.sweep.candidates import check_all, expand, read_machine
from megalite.sweep.spec import read_spec
from tests.planner.search.asking import TINY, asked

SMALL = f"{TINY} --gpus 4 --fix mbs=1,2 --fix recompute=none --top 2"


def test_plan_prints_layouts_and_draws_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert PLAN([*SMALL.split(), "--pp", "2", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "layouts are legal" in said
    assert "The step of the best layout" in said
    assert "rank 1" in said


def test_json_and_files_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "plan.yaml"), "--html", str(tmp_path / "plan.html")]
    assert PLAN([*SMALL.split(), "--json", "--tokens", "1.5B", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 1.5e9
    assert len(found["layouts"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [*("plan-alternatives.yaml", "plan.html", "plan.yaml")]
    assert sorted(map(str, tmp_path.iterdir())) == sorted(found["written"])
    assert "torchrun --standalone --nproc-per-node 4 pretrain_gpt.py" in found["launch"][0]


def test_resolve_writes_a_sweep_of_close_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ties.yaml"
    flags = f"--preset llama3-8b --cluster dgx-h100 --gpus 64 --global-batch-size 512 --top 4 --resolve {path} --json"
    assert PLAN(flags.split()) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    tied = [layout["settings"] for layout in layouts if layout["tie"]]
    assert len(tied) > 1
    expansion = expand(read_spec(path))
    runs = check_all(expansion, memory_limit=None, machine=read_machine("dgx-h100", "fused"))
    assert [run.refused for run in runs] == [None] * len(tied)
    for run, chosen, layout in zip(runs, tied, layouts, strict=False):
        assert run.ranks == 64
        assert {name: values_of(run.config)[name] for name in chosen} == chosen
        assert run.predicted is not None
        assert run.predicted.step_seconds == pytest.approx(layout["step_seconds"])
    none = tmp_path / "none.yaml"
    assert PLAN([*f"{SMALL[:-1]}1".split(), "--resolve", str(none)]) == 0
    assert "there is nothing to resolve" in capsys.readouterr().out
    assert not none.exists()


def test_default_precision_is_the_fastest() -> None:
    model = "--preset gpt3-1.3b --gpus 8 --global-batch-size 8"
    assert asked(f"{model} --cluster dgx-a100").request.config.training.precision == "bf16"
    assert asked(f"{model} --cluster v100").request.config.training.precision == "fp16"
    assert asked(f"{model} --cluster dgx-a100 --fp32").request.config.training.precision == "fp32"


def test_strategies_fit_the_optimizer() -> None:
    assert asked(f"{TINY} --gpus 4").request.fixed == {}
    fixed = asked(f"{TINY} --gpus 4 --optimizer onebit-adam").request.fixed
    assert fixed == {"dp_strategy": ("all-reduce",)}
    fixed = asked(f"{TINY} --gpus 4 --use-distributed-optimizer --shard-gradients").request.fixed
    assert fixed == {"dp_strategy": ("zero-2",)}


Captured = pytest.CaptureFixture[str]

PROFILE = """\
name: tiny
batch_size: 1
layers:
  - {name: a, repeat: 2, forward_ms: 10, backward_ms: 20, output_bytes: 1000, activation_bytes: 1000000, parameter_bytes: 4000000}
  - {name: b, forward_ms: 20, backward_ms: 40, output_bytes: 1000, activation_bytes: 1000000, parameter_bytes: 800000000}"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(PROFILE)
    return str(path)


def test_text_output(tiny: str, capsys: Captured) -> None:
    assert PLAN_CHAIN([tiny, "--cluster", "2x1", "--global-batch-size", "8", "--compare"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("tiny on 2x1@25 (2 devices of 14.90 GiB), 8 samples per step\nprofile: not stated\n")
    # Two stages of 60 ms each, (8 + 1) turns and messages of a thousandth of a ms.
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert float(rows["this plan"][2]) == pytest.approx(0.54, abs=1e-3)
    assert rows["data parallel"][4] > "1.2"
    assert {"PipeDream:", "data parallel:", "straight pipeline:"} <= set(rows)
    assert "the search is complete" in said and "rank 1" in said and "F7" in said and "idle devices" not in said
    assert PLAN_CHAIN(["gnmt-16", "--cluster", "A", "--global-batch-size", "1024"]) == 0
    assert "\n1 microbatches of 1024 samples, idle devices: 8\n" in capsys.readouterr().out


def test_json_and_drawing(tiny: str, capsys: Captured, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    assert PLAN_CHAIN([tiny, "--cluster", "2x1", "--global-batch-size", "8", "--json", "--svg", str(picture)]) == 0
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
    assert PLAN_CHAIN([*flags, "--memory", "3.205GB"]) == 0
    said = capsys.readouterr().out
    (row,) = (line for line in said.splitlines() if line.startswith("data parallel"))
    assert row.endswith("does not fit")
    assert PLAN_CHAIN([*flags, "--memory", "3GB"]) == 2
    assert "no plan for tiny on 2x1@25 fits 2.79 GiB per device" in capsys.readouterr().err
