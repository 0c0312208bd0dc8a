"""The report of a plan: data, text, page, files."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megalite.cli.dry_run import report
from megalite.config.errors import ConfigError
from megalite.config.files import read_level
from megalite.config.flags import parse_arguments
from megalite.config.validate import require_startable, validate
from megalite.planner.report import PARTS, drawn_timeline, format_plan, html_page, launch_lines, plan_data, write_files
from megalite.planner.search.search import Plan, find
from megalite.planner.whole_run import WholeRun
from tests.planner.search.asking import asked

FLAGS = (
    "--preset gpt3-2.7b --cluster dgx-a100 --gpus 16 --global-batch-size 32 --fix pp=2,4 "
    "--fix schedule=1f1b,interleaved"
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = asked(FLAGS)
    return find(request.request, request.cluster, request.stack, top=3)


def test_data_is_consistent(plan: Plan) -> None:
    data = plan_data(plan, WholeRun(tokens=1e12))
    for layout in data["layouts"]:
        assert sum(layout["parts"].values()) == pytest.approx(layout["step_seconds"])
        assert set(layout["parts"]) <= set(PARTS)
        memory = layout["memory"]
        held = sum(size for name, size in memory.items() if name.endswith("_bytes") and name != "total_bytes")
        assert held == memory["total_bytes"]
        assert layout["training_seconds"] == pytest.approx(1e12 / layout["tokens_per_second"])
        assert 0 < layout["mfu"]["megatron"] < layout["mfu"]["palm"] < 1
    assert data["layouts"][0]["why"] == ""
    assert all("slower: more " in layout["why"] for layout in data["layouts"][1:])
    assert data["space"]["fitting"] <= data["space"]["layouts"]


def test_text_has_a_line_per_layout(plan: Plan) -> None:
    whole = WholeRun(tokens=300e9, gpu_hour_price=2.0, mtbf_hours=5e4, save_seconds=30.0)
    text = format_plan(plan_data(plan, whole))
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 4
    assert table[0].split()[:3] == ["tp", "pp", "vpp"]
    best = plan.candidates[0]
    assert table[1].split()[1:4] == [
        str(size) for size in (best.layout.tp, best.layout.pipeline.pp, best.layout.pipeline.vpp)
    ]
    words = ("constraints: pp 2 or 4", "parameters", "activations", "bubble", "300B tokens take", "goodput     9")
    assert all(
        word in text for word in (*words, "2 per GPU hour", "J per token, at 400 W per GPU", "Why the others lose")
    )


def test_page_is_standalone(plan: Plan) -> None:
    timeline = drawn_timeline(plan.candidates[0], plan.cluster)
    whole = WholeRun(tokens=300e9, gpu_hour_price=2.0)
    page = html_page(plan_data(plan, whole), timeline)
    assert re.findall(r"(?:src|href)=", page) == [] and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<script>") == page.count("<script") == 1, "no external resources"
    assert 'name="viewport"' in page and "prefers-color-scheme:dark" in page
    assert page.count("<svg") == 2 and page.count("<circle") == 3
    assert page.count("<rect") > 2 * timeline.schedule.num_stages
    assert all(word in page for word in ("Speed against memory", "matrix products", "vendor", "2 per GPU hour"))


def test_training_accepts_the_plan(plan: Plan, tmp_path: Path) -> None:
    path, others = write_files(plan, tmp_path / "plan.yaml", 300e9)
    invocation = parse_arguments(["--config", str(path), "--mock-data"])
    config = validate(invocation.config, 16, invocation.explicit)
    require_startable(config)
    best = plan.candidates[0].config
    assert config.parallel == best.parallel
    assert config.model == best.model
    assert config.training.train_iters == -(-300_000_000_000 // (32 * 2048))
    shown = report(invocation.config, 16, invocation.explicit)
    assert shown["memory"]["fullest_bytes"] == plan.candidates[0].fullest[1].total_bytes
    assert {"tp", "pp", "vpp", "cp", "dp", "micro_batch_size"} <= set(yaml.safe_load(path.read_text()))
    for world in (8, 32):
        with pytest.raises(ConfigError, match=r"dp .* does not fit|not a multiple"):
            validate(invocation.config, world, invocation.explicit)
    tree = yaml.safe_load(others.read_text())
    assert len(tree["plans"]) == 3
    for each in tree["plans"]:
        (tmp_path / "one.yaml").write_text(yaml.safe_dump(each))
        assert read_level(tmp_path / "one.yaml").given["dp"].value == each["dp"]


def test_train_iters_and_data_of_the_request_are_kept(tmp_path: Path) -> None:
    request = asked(f"{FLAGS} --train-iters 7 --mock-data")
    plan = find(request.request, request.cluster, request.stack, top=1)
    path, _ = write_files(plan, tmp_path / "plan.yaml", 300e9)
    assert yaml.safe_load(path.read_text())["train_iters"] == 7
    assert all("--data-path" not in line for line in launch_lines(plan, path))


def test_launch_lines_start_all_ranks(plan: Plan) -> None:
    torchrun, sbatch = map(shlex.split, launch_lines(plan, Path("plan.yaml")))
    assert torchrun[torchrun.index("--nnodes") + 1] == "2"
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == "8"
    flags = torchrun[torchrun.index("pretrain_gpt.py") + 1 :]
    assert flags == ["--config", "plan.yaml", "--data-path", "PREFIX"]
    assert sbatch[:3] == ["sbatch", "--nodes", "2"]
    wrapped = shlex.split(sbatch[-1])
    assert wrapped[:2] == ["srun", "torchrun"]
    assert wrapped[wrapped.index("pretrain_gpt.py") + 1 :] == flags
    for one in (plan, replace(plan, request=replace(plan.request, world_size=4))):
        direct, sbatch = (shlex.split(line) for line in launch_lines(one, Path("it's my plan.yaml")))
        assert "it's my plan.yaml" in direct
        assert "it's my plan.yaml" in shlex.split(sbatch[-1])
