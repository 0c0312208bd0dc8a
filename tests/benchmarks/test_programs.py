"""Every benchmark is in the README with a command, and runs in its smallest size."""

import importlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import common
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
    *("benchmarks.gpu.child", "benchmarks.peers.plain_gpt"),
}
"""Programs that other programs start."""
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = [*common.ROOT.glob("*.md"), *common.ROOT.glob("docs/**/*.md"), *FOLDER.rglob("*.md"), common.ROOT / "Makefile"]
SMALLEST = (
    ("cpu.attention", ["--rounds", "1", "--shapes", "1x2x16x8"], "milliseconds"),
    ("cpu.products", ["--rounds", "1", "--shapes", "16x8x16"], "flops_per_second"),
    ("cpu.scheduling", ["--rounds", "1", "--ranks", "2"], "rows"),
    ("cpu.shared_memory", ["--rounds", "1", "--ranks", "2", "--sizes", "1024"], "rows"),
    ("checkpoint.run", ["--tiny", "--rounds", "1"], "conversion"),
    ("data.run", ["--tiny"], "preprocess"),
    ("pipeline.run", ["--quick", "--memory", "--only", "1f1b"], "memory"),
    ("planner.chain", ["--models", "gnmt-16", "--clusters", "2x8"], "rows"),
    ("planner.search", ["--cases", "8B x 64", "--refined", "2"], "cases"),
    ("scale.run", ["--worlds", "8", "64"], "exponents"),
    ("steps.soak", ["--steps", "5"], "ranks"),
)


def test_each_program_has_a_command_in_the_readme() -> None:
    named = set(re.findall(r"-m (benchmarks\.[\w.]+)", README))
    assert named == PROGRAMS - PARTS


def test_commands_of_all_pages_name_programs() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"-m (benchmarks\.\w+\.\w+)", text)) <= PROGRAMS, page
        for path in re.findall(r"\bbenchmarks/[\w/]+\.py\b", text):
            assert (common.ROOT / path).exists(), (page, path)


@pytest.mark.parametrize("line", sorted(re.findall(r"`(?:python|torchrun [^`]*?)(?: -m benchmarks[^`]+)`", README)))
def test_the_options_of_each_command_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line.strip("`"))
    at = words.index("-m")
    module = importlib.import_module(words[at + 1])
    if words[at + 1] == "benchmarks.steps.breakdown":
        return  # it takes the flags of pretrain_gpt.py
    with pytest.raises(SystemExit) as ended:
        module.main([*words[at + 2 :], "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert {word for word in words[at + 2 :] if word.startswith("--")} <= set(re.findall(r"--[\w-]+", shown))


@pytest.mark.e2e
@pytest.mark.parametrize(("program", "words", "key"), SMALLEST, ids=[program for program, _, _ in SMALLEST])
def test_it_runs(program: str, words: Sequence[str], key: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"benchmarks.{program}")
    with forked_pools():
        module.main([*words, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith(f"python -m benchmarks.{program} ")
    assert found["torch"] and found["machine"] and found[key]


def test_no_file_is_long() -> None:
    """Lines of all together have their ceiling in tests/support/measures.py."""
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= 500


def test_settings_are_read_as_json_where_they_are() -> None:
    found = common.settings("lr=1e-3 tie_embeddings=false activation=swiglu num_layers=4")
    assert found == {"lr": 1e-3, "tie_embeddings": False, "activation": "swiglu", "num_layers": 4}


def test_the_processor_is_named(tmp_path: Path) -> None:
    about = tmp_path / "cpuinfo"
    about.write_text("processor\t: 0\nmodel name\t: A Processor 9000\nmodel name\t: A Processor 9000\n")
    assert common.processor(about) == "A Processor 9000"
    assert common.processor(tmp_path / "none")


def test_turns_are_shuffled_and_each_has_its_turn() -> None:
    rounds = list(common.shuffled("abcd", 20, seed=1))
    assert all(sorted(turns) == list("abcd") for turns in rounds)
    assert len({tuple(turns) for turns in rounds}) > 1
    seconds = common.take_turns({"a": lambda: None, "b": lambda: None}, rounds=3, warm_up=2)
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3}
    assert common.ratio([1.0, 2.0, 9.0], [2.0, 1.0, 3.0]) == 2.0


def test_a_table_is_aligned_markdown() -> None:
    assert common.markdown([["a", "b"], [1, "two"]]) == "| a | b   |\n|---|-----|\n| 1 | two |"
