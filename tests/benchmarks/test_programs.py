"""Every benchmark has a command in the README and runs at its smallest size."""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.generation import run as generation
from benchmarks.steps import soak
from tests.e2e.forked import train_forked
from tests.support.ranks import forked_pools

FOLDER = common.ROOT / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))
PROGRAMS = {
    str(path.relative_to(common.ROOT).with_suffix("")).replace("/", ".")
    for path in FILES
    if '__name__ == "__main__"' in path.read_text()
}
PARTS = {
    *("benchmarks.data.preprocess", "benchmarks.data.read", "benchmarks.data_parallel.worker"),
    "benchmarks.gpu.child",
}
"""Programs that other programs start."""
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = [*common.ROOT.glob("*.md"), *common.ROOT.glob("docs/**/*.md"), *FOLDER.rglob("*.md"), common.ROOT / "Makefile"]
TINY = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64"
MODEL = f"{TINY} --bf16 --mock-data --micro-batch-size 1 --train-iters 10 --sequence-parallel"
SETTINGS = common.settings(
    "num_layers=2 hidden_size=32 num_attention_heads=4 vocab_size=64 seq_length=16 global_batch_size=4"
)
PLAN = {"175B x 512": "--preset llama3-8b --cluster dgx-h100 --gpus 8 --global-batch-size 64"}
# Sizes that have no option are reduced in the module.
SMALLEST: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("cpu.attention", "--rounds 1 --shapes 1x2x16x8", "milliseconds", {}),
    ("cpu.products", "--rounds 1 --shapes 16x8x16", "flops_per_second", {}),
    ("cpu.shared_memory", "--rounds 1 --ranks 2 --sizes 1024", "rows", {"CPU_MODEL": SETTINGS}),
    ("checkpoint.run", "--tiny --rounds 1", "conversion", {}),
    ("data.run", "--tiny", "preprocess", {"WORKERS": (1,)}),
    ("generation.run", "--tiny --rounds 1", "rows", {}),
    ("pipeline.run", "--quick --fidelity --only 1f1b", "fidelity", {"FIDELITY_RANKS": 2, "OPERATION_SECONDS": 0.001}),
    ("planner.chain", "--models gnmt-16 --clusters 2x8", "rows", {}),
    ("planner.search", "--cases '175B x 512' --refined 2", "cases", {"CASES": PLAN, "RUNS": 1}),
    ("scale.run", "--worlds 8 16", "exponents", {"MODEL": MODEL, "LAYOUTS": {8: (2, 2), 16: (2, 2)}}),
)


def test_readme_has_a_command_per_program() -> None:
    named = set(re.findall(r"-m (benchmarks\.[\w.]+)", README))
    assert named == PROGRAMS - PARTS


def test_commands_in_pages_name_existing_programs() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"-m (benchmarks\.\w+\.\w+)", text)) <= PROGRAMS, page
        for path in re.findall(r"\bbenchmarks/[\w/]+\.py\b", text):
            assert (common.ROOT / path).exists(), (page, path)


@pytest.mark.parametrize("line", sorted(re.findall(r"`python -m benchmarks[^`]+`", README)))
def test_options_of_commands_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line.strip("`"))
    at = words.index("-m")
    module = importlib.import_module(words[at + 1])
    with pytest.raises(SystemExit) as ended:
        module.main([*words[at + 2 :], "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert {word for word in words[at + 2 :] if word.startswith("--")} <= set(re.findall(r"--[\w-]+", shown))


def run_here(*words: str, **more: str) -> str:
    """Replace `common.run_python` without a new process, which would need seconds to import torch."""
    printed, module = io.StringIO(), words[0] == "-m"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is already imported
        patch.setattr(sys, "argv", [*words[1 if module else 0 :]])
        for name, value in more.items():
            patch.setenv(name, value)
        try:
            (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, (words, printed.getvalue())
    return printed.getvalue()


@pytest.mark.e2e
@pytest.mark.parametrize(("program", "words", "key", "small"), SMALLEST, ids=[program for program, *_ in SMALLEST])
def test_program_runs_at_smallest_size(
    program: str, words: str, key: str, small: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{program}")
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(common, "run_python", run_here)
    monkeypatch.chdir(common.ROOT)
    with forked_pools():
        module.main([*shlex.split(words), "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith(f"python -m benchmarks.{program} ")
    assert found["torch"] and found["machine"] and found[key]


@pytest.mark.e2e
def test_soak_reads_step_times_and_resources(tmp_path: Path) -> None:
    train_forked(2, *soak.FLAGS, "--train-iters", "5", "--run-dir", tmp_path).require_success()
    assert len(soak.step_times(tmp_path / "metrics.jsonl")) == 4, "no step after a save"
    here = soak.sample(os.getpid())
    row = soak.rank_row([here] * 5, here.seconds + 9.0)
    assert row["growth"] == 0.0 and (row["open_files"], row["threads"]) == ([here.files], [here.threads])
    assert os.getpid() in soak.children(os.getppid())


def test_generation_refuses_to_time_different_tokens() -> None:
    made = {"megalite": lambda count: [[1] * count], "transformers": lambda count: [[1] * (count - 1) + [2]]}
    case = generation.Case(1, 1, 3)
    with pytest.raises(SystemExit, match="do not give the same tokens"):
        generation.agree(made, case, exact=True)
    generation.agree(made, case, exact=False)


def test_files_have_at_most_500_lines() -> None:
    """The total of lines has its ceiling in tests/support/measures.py."""
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= 500


def test_turns_are_shuffled_and_complete() -> None:
    rounds = list(common.shuffled("abcd", 20, seed=1))
    assert all(sorted(turns) == list("abcd") for turns in rounds)
    assert len({tuple(turns) for turns in rounds}) > 1
    seconds = common.take_turns({"a": lambda: None, "b": lambda: None}, rounds=3, warm_up=2)
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3}
    assert common.ratio([1.0, 2.0, 9.0], [2.0, 1.0, 3.0]) == 2.0
