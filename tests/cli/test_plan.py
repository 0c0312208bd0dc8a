"""Test the command line of `megalite plan`."""

import json
from pathlib import Path

import pytest

from megalite.cli.tool_commands import PLAN as main
from megalite.config.describe import values_of
from megalite.sweep.candidates import check_all, expand, read_machine
from megalite.sweep.spec import read_spec
from tests.planner.search.asking import TINY, asked

SMALL = f"{TINY} --gpus 4 --fix mbs=1,2 --fix recompute=none --top 2"


def test_plan_prints_layouts_and_draws_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--pp", "2", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "layouts are legal" in said
    assert "The step of the best layout" in said
    assert "rank 1" in said


def test_json_and_files_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--output", str(tmp_path / "plan.yaml"), "--html", str(tmp_path / "plan.html")]
    assert main([*SMALL.split(), "--json", "--tokens", "1.5B", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 1.5e9
    assert len(found["layouts"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [*("plan-alternatives.yaml", "plan.html", "plan.yaml")]
    assert sorted(map(str, tmp_path.iterdir())) == sorted(found["written"])
    assert "torchrun --standalone --nproc-per-node 4 pretrain_gpt.py" in found["launch"][0]


def test_resolve_writes_a_sweep_of_close_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ties.yaml"
    flags = f"--preset llama3-8b --cluster dgx-h100 --gpus 64 --global-batch-size 512 --top 4 --resolve {path} --json"
    assert main(flags.split()) == 0
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
    assert main([*f"{SMALL[:-1]}1".split(), "--resolve", str(none)]) == 0
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
