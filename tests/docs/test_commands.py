"""Every command and code block of a page is run by a test: by this file, or by the test named here."""

import re
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.inspecting import flip_last_bit
from tests.docs.execution import Said, execute, link_clone, rehearse, training_of
from tests.e2e.commands import Command, commands_in, documents
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY

pytestmark = pytest.mark.e2e

RUN_BY = {
    "docs/conversion.md": "tests/conversion/test_docs.py",
    "docs/data.md": "tests/data/test_docs.py",
    "docs/generation.md": "tests/docs/test_generation.py",
    "docs/kernels.md": "tests/docs/test_kernels.py",
    "docs/plan.md": "tests/docs/test_planner.py",
    "docs/planner_chain.md": "tests/docs/test_planner.py",
    "docs/schedules.md": "tests/docs/test_schedules.py",
    "docs/walkthrough.md": "tests/docs/test_walkthrough.py",
    "examples/chain/README.md": "tests/docs/test_planner.py",
    "examples/from_megatron/README.md": "tests/conversion/megatron/test_migration.py",
    "examples/hugging_face/README.md": "tests/examples/test_hugging_face.py",
    "examples/large_batch/README.md": "tests/examples/test_large_batch.py",
    "examples/lm_eval/README.md": "tests/generation/test_lm_eval.py",
    "examples/mup/README.md": "tests/examples/test_mup.py",
    "examples/shakespeare/README.md": "tests/examples/test_shakespeare.py",
    "examples/six_strategies/README.md": "tests/examples/test_six_strategies.py",
}
"""Page -> the test that runs its commands. Commands of other pages are run by this file."""

READ_ONLY = {
    "make ": "minutes; what it runs is tested by itself",
    "megalite profile": "a minute of measuring: tests/profiling",
    "torchrun --nproc-per-node 4 -m megalite.cli.main profile": "a minute of measuring: tests/profiling",
    "torchrun --nnodes 2 --nproc-per-node 8 -m megalite.cli.main profile": "two hosts: tests/profiling",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m megalite.cli.main doctor": "two hosts: tests/doctor",
    "NODES=": "hosts: tests/examples runs the script with a torchrun that records, tests/e2e/test_two_hosts.py really",
    **dict.fromkeys(("sbatch ", "kubectl ", "sky ", "torchx "), "a scheduler: tests/examples plays it"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun": "two hosts, of which one is lost: tests/e2e/test_elastic.py",
    "megalite train --config examples/quickstart/run.yaml --save s3://": "a store: tests/e2e/test_save_to_store.py",
    "megalite sweep": "fourteen runs: tests/sweep; the dry run of the same file is run",
    ".venv/bin/python -m pytest": "the tests themselves",
}
"""First words -> reason why a command is not run. `tests/e2e/test_examples.py` parses its flags by the program's parser."""

BLOCKS = {
    ("docs/api.md", "python"): "tests/docs/test_api.py",
    ("docs/data.md", "json"): "tests/data/test_docs.py",
    ("docs/data.md", "yaml"): "tests/data/test_docs.py",
    ("docs/extend.md", "python"): "tests/docs/test_api.py",
    ("docs/failures.md", "json"): "tests/docs/test_facts.py",
    ("docs/kernels.md", "yaml"): "tests/docs/test_kernels.py",
    ("docs/planner.md", "csv"): "tests/cli/test_plan_fit.py",
    ("docs/schedules.md", "json"): "tests/docs/test_schedules.py",
    ("docs/sweep.md", "yaml"): "tests/sweep/test_docs.py",
    ("docs/walkthrough.md", "python"): "tests/docs/test_walkthrough.py",
}
"""(page, language) -> the test that runs or reads those blocks."""

SMALLER = {"32000": "1024", "2048": "1024"}
"""Words of commands for a smaller corpus than the page's."""
QUICKER = {"rehearse": {"--num-layers": "6", "--workers": "1"}, "parity": {"--steps": "1"}}
"""Command of megalite -> flags that make it faster than the page's."""


def shown() -> list[Command]:
    """Commands that this file runs, without duplicates, in order."""
    elsewhere = {
        command.line
        for page in RUN_BY
        for command in commands_in((REPOSITORY / page).read_text(encoding="utf-8"), page)
    }
    found: dict[str, Command] = {}
    for path in documents():
        source = str(path.relative_to(REPOSITORY))
        for command in commands_in(path.read_text(encoding="utf-8"), source):
            if command.line not in elsewhere:
                found.setdefault(command.line, command)
    return list(found.values())


def is_read_only(command: Command) -> bool:
    return "--dry-run" not in command.words and any(command.line.startswith(words) for words in READ_ONLY)


SHOWN = shown()
TRAINING = [command for command in SHOWN if training_of(command)[0] and not (is_read_only(command) or command.is_cheap)]
OTHERS = [command for command in SHOWN if not (training_of(command)[0] or is_read_only(command) or command.is_cheap)]
"""Cheap commands are run by tests/e2e/test_examples.py."""
PREPARING = [command for command in OTHERS if command.source == "examples/quickstart/README.md"]


def sized(command: Command) -> Command:
    """The command with half a megabyte of text, few layers and few steps."""
    words = [SMALLER.get(word, word) for word in re.split(r" (?=\S)", command.line)]
    if "build_corpus.py" in command.line:
        words += ["--max-megabytes", "0.5"]
    if words[1] == "doctor":
        words.append("--no-self-test")  # tests/cli/test_doctor.py has one with it
    for flag, value in QUICKER.get(words[1], {}).items():
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return Command(command.source, " ".join(words))


def run(command: Command) -> Said:
    """Run a command and check that it ends as the page says."""
    said = execute(sized(command))
    differs = "--diff" in command.words  # status 1: the checkpoints differ
    assert said.status in ((0, 1) if differs else (0,)), f"{command.line}\n{said.out}\n{said.err}"
    return said


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages' commands expect: a corpus, a run, its copies."""
    folder = tmp_path_factory.mktemp("clone")
    link_clone(folder)
    runs = folder / "runs"
    data = runs / "quickstart" / "data"
    data.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = [command for command in PREPARING if "--load" not in command.words]
        assert len(first) == 3
        for command in first:
            run(command)
    shutil.copy(data / "corpus.jsonl", folder / "corpus.jsonl")
    train_three_hundred_steps(runs / "quickstart", data)
    for name in ("a", "b", "1", "experts"):
        shutil.copytree(runs / "quickstart", runs / name)
    shutil.copytree(runs / "quickstart" / "checkpoints", folder / "SOUND")
    shutil.copytree(folder / "SOUND", folder / "DAMAGED")
    flip_last_bit(next((folder / "DAMAGED" / "step-0000300").glob("weights-*")))
    (runs / "schedules").mkdir()
    return folder


def train_three_hundred_steps(run_dir: Path, data: Path) -> None:
    """A fast replacement of the quickstart's run."""
    sizes = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 128"
    length = "--train-iters 300 --save-interval 100 --micro-batch-size 1 --global-batch-size 1 --log-interval 100"
    files = ["--data-path", data / "corpus_text_document", "--tokenizer-model", data / "tokenizer.model"]
    train_forked(1, *sizes.split(), *length.split(), *files, "--run-dir", run_dir, seconds=120).require_success()


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: f"{command.source}: {command.line}"[:80])
def test_command_of_a_page_runs(command: Command, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    if command in PREPARING and "--load" not in command.words:
        return  # it has created the clone
    if command.line.startswith("megalite convert model-megatron"):
        source = "megalite convert runs/quickstart/checkpoints model-megatron --to megatron"
        run(Command("the page before", source))
        tokenizer = "megalite convert runs/quickstart/checkpoints model-hf --to huggingface"
        run(Command("the page before", tokenizer))
    said = run(command)
    assert said.out


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: f"{command.source}: {command.line}"[:80])
def test_training_command_dry_runs(command: Command, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dry run: layout, stages, schedule and memory of the ranks that it would start."""
    monkeypatch.chdir(clone)
    if "--pipeline-schedule-file" in command.words:
        written = [each for each in SHOWN if "--write-csv" in each.words and each.source == command.source]
        run(written[0])
    if command.line.startswith("torchrun --nnodes 16"):
        shutil.copy(clone / "runs/quickstart/data/tokenizer.model", clone / "tokenizer.json")
    said = rehearse(command)
    assert said.status == 0, said.err
    assert f"{training_of(command)[0]} ranks = tp" in said.out


def test_every_command_is_in_a_list() -> None:
    """Every command is in one of the lists, and no list has an unused entry."""
    for command in SHOWN:
        kinds = [command in TRAINING, command in OTHERS, is_read_only(command) or command.is_cheap]
        assert any(kinds), command
    for words, why in READ_ONLY.items():
        assert why and any(command.line.startswith(words) for command in SHOWN), f"no page shows {words}"
    assert len(TRAINING) >= 10 and len(OTHERS) >= 15


def test_named_tests_run_their_pages() -> None:
    for page, test in (RUN_BY | {page: test for (page, _), test in BLOCKS.items()}).items():
        text = (REPOSITORY / test).read_text(encoding="utf-8")
        assert Path(page).name in text or Path(page).parent.name in text, f"{test} does not read {page}"


def test_every_block_is_tested() -> None:
    found = set()
    for path in documents():
        source = str(path.relative_to(REPOSITORY))
        for language in re.findall(r"^```(\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            if language not in ("console", "bash", "text"):
                found.add((source, language))
    assert found == set(BLOCKS), "name the test that runs these blocks in BLOCKS"
