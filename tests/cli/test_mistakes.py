"""Test every command with every kind of mistake: status 2, one line that names the problem, no traceback."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.cli.main import COMMANDS, main
from megalite.cli.output import BAD_INPUT, DEBUG_VARIABLE
from megalite.config.describe import settings as all_settings
from megalite.conversion.native import write_native
from tests.cli.test_plan import PROFILE
from tests.cli.test_schedule import COSTS
from tests.config.rows import lines, parts_of, says
from tests.conversion.samples import GPT, LLAMA, MadeUp, byte_tokenizer
from tests.e2e.commands import Command, check
from tests.planner.search.asking import TINY
from tests.sweep.sweeps import write_sweep

Captured = pytest.CaptureFixture[str]

NESTED = ("data verify", "data inspect", "data merge", "data split", "data index", "config --show", "config --explain")
SPOKEN = [*COMMANDS, *NESTED]  # everything that takes its own flags

PATHS = {
    "train --config {path} --dry-run": "",
    "train --tokenizer-model {path} --dry-run": "missing under long",
    "train --vocab-file {path} --merge-file {path} --tokenizer-type GPT2BPETokenizer --dry-run": "missing under long",
    "port {path}": "",
    "train --vocab-size 64 --pp 2 --pipeline-schedule-file {path} --dry-run": "",
    "train --vocab-size 64 --pp 2 --pipeline-costs {path} --pipeline-schedule auto --dry-run": "",
    "train --data-args-path {path} --vocab-size 64 --dry-run": "text",
    "train --per-split-data-args-path {path} --vocab-size 64 --dry-run": "",
    "train --data-path {path} --vocab-size 64 --train-iters 1": "folder empty text under long",
    "train --mock-data --vocab-size 64 --train-iters 1 --load {path}": "folder empty bytes text long",
    "rehearse --config {path}": "",
    "config --show --config {path}": "",
    "config --explain --config {path}": "",
    "preprocess --input {path} --output-prefix {out} --tokenizer-type ByteLevelTokenizer": "",
    "preprocess --input {text} --output-prefix {out} --tokenizer-model {path}": "",
    "preprocess --input {text} --output-prefix {file}/x --tokenizer-type ByteLevelTokenizer": "",
    "train-tokenizer --input {path} --output-prefix {out}": "",
    "data verify {path}": "",
    "data inspect {path}": "",
    "data inspect {out} --tokenizer-model {path}": "",
    "data merge --input {path} --output-prefix {out}": "",
    "data split --input {path} --output-prefix {out} --parts 2": "",
    "data index --data-path {path} --vocab-size 64 --train-iters 1": "",
    "generate --load {path} --prompt x": "",
    "generate --load {folder} --prompts {path}": "text",
    "evaluate --load {path} --input {text}": "",
    "runs {path}": "",
    "inspect {path}": "",
    "inspect --diff {path} {path}": "",
    "convert {path} {out} --to native": "",
    "convert {path} {out} --to huggingface": "",
    "convert {path} {out} --to native --from megatron": "",
    "convert {path} {out} --to megatron --from huggingface": "",
    "schedule --csv {path}": "",
    "schedule --pp 2 --microbatches 2 --costs {path}": "",
    "schedule --pp 2 --microbatches 2 --svg {file}/x.svg": "",
    "plan --config {path} --cluster dgx-a100 --gpus 8 --global-batch-size 8": "",
    "plan --preset gpt2-124m --cluster {path} --gpus 8 --global-batch-size 8": "",
    "plan --preset gpt2-124m --cluster dgx-a100 --stack {path} --gpus 8 --global-batch-size 8": "",
    "plan-fit {path} --cluster dgx-a100": "",
    "plan-chain {path} --cluster 2x8 --global-batch-size 8": "",
    "plan-chain vgg-19 --cluster {path} --global-batch-size 8": "",
    "profile --output {file}/x.yaml": "",
    "profile --output {out}.yaml --like {path}": "",
    "sweep {path} --dry-run": "",
    "parity --config {path}": "",
}
"""Command line with the tested path as {path} -> kinds of path that are valid there, or not tried, as runs are slow."""

KINDS = ("missing", "folder", "empty", "bytes", "text", "under", "long")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return paths that commands cannot read, by kind."""
    folder = tmp_path_factory.mktemp("mistakes")
    found = {kind: folder / f"{kind}.yaml" for kind in KINDS} | {"file": folder / "file"}
    found["folder"].mkdir()
    found["empty"].touch()
    found["bytes"].write_bytes(bytes(range(256)) * 8)
    found["text"].write_text("nothing: [of, that\n")
    found["file"].touch()
    found["under"] = found["file"] / "x.yaml"
    found["long"] = folder / ("x" * 300 + ".yaml")
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run outside the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)


def refused(words: list[str], capsys: Captured) -> str:
    """Run a command that must fail; return its one line."""
    capsys.readouterr()
    status = main(words)
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert status == BAD_INPUT, (words, status, said.err)
    assert "Traceback" not in said.err and len(errors) == 1, (words, said.err)
    assert " has a bug: " not in errors[0], (words, errors)
    return said.err[said.err.index(errors[0]) :]


@pytest.mark.parametrize("line", PATHS)
def test_unreadable_paths_are_one_error(line: str, places: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    for kind in KINDS if "{path}" in line else KINDS[:1]:
        if kind in PATHS[line].split():
            continue
        path = places[kind]
        known = {"out": tmp_path / "out", "file": places["file"], "folder": places["folder"], "text": text}
        words = line.format(path=path, **known).split()
        said = refused(words, capsys)
        named = path if "{path}" in line else places["file"]
        assert named.stem[:40] in said, (words, said)


@pytest.mark.parametrize("name", SPOKEN)
def test_help_has_an_example_that_parses(name: str, capsys: Captured) -> None:
    """Help states the purpose and an example that parses."""
    words = [word for word in name.split() if not word.startswith("--")]
    assert main([*words, "--help"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith("usage: ") and "`" not in said.out
    assert max(map(len, said.out.splitlines())) <= 130
    if name.startswith("config"):
        return
    _, _, below = said.out.partition("example")
    shown = re.findall(r"(?:megalite|torchrun) [^\n]*", below.partition("\n\n")[0])
    assert shown, said.out
    for line in shown:
        if "{" not in line and "--config" not in line:
            check(Command(f"{name} --help", line))


def flags_of(name: str, capsys: Captured) -> list[str]:
    words = [word for word in name.split() if not word.startswith("--")]
    main([*words, "--help"])
    lines = capsys.readouterr().out
    return sorted(set(re.findall(r"^ +(--[a-z][a-z-]{2,}\w)", lines, re.MULTILINE)) - {"--help", "--help-all"})


@pytest.mark.parametrize("name", SPOKEN)
def test_misspelled_flag_names_the_nearest(name: str, capsys: Captured) -> None:
    """The error names the nearest flag, even if other flags are missing."""
    takes_settings = name.startswith("config --") or name == "data index"
    flags = ["--num-layers", "--preset"] if takes_settings else flags_of(name, capsys)
    assert flags or name in ("data", "config", "completion")
    for flag in flags[:: max(1, len(flags) // 4)]:
        slip = flag[:-2] + flag[-1] + flag[-2]
        if slip == flag:
            continue
        said = refused([*name.split(), slip, "1"], capsys)
        assert f"unknown flag {slip}" in said and flag in said, said
    assert "--no-such-thing-at-all" in refused([*name.split(), "--no-such-thing-at-all"], capsys)


WORDS = {
    "TINY": TINY,
    "CHAIN": "plan-chain tiny.yaml --global-batch-size 8",
    "GENERATE": "generate --device cpu --load llama",
    "EVALUATE": "evaluate --device cpu --load gpt",
    "MODEL": "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1",
    "LEARN": "train-tokenizer --input body.jsonl --output-prefix own --json-keys body",
}
"""Abbreviations in `refused.txt`."""


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files used in `refused.txt`: schedules, a profile, a sweep, text, and two models with byte tokenizers."""
    folder = tmp_path_factory.mktemp("things")
    write_sweep(folder)
    (folder / "good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (folder / "forward.csv").write_text("0F0\n1F0\n")
    (folder / "costs.json").write_text(json.dumps(COSTS))
    (folder / "tiny.yaml").write_text(PROFILE)
    (folder / "a.txt").write_text("def main():\n" * 8)
    (folder / "body.jsonl").write_text("".join(json.dumps({"body": f"line {i} of many"}) + "\n" for i in range(300)))
    vocabulary = byte_tokenizer(folder / "vocabulary")
    write_native(MadeUp(folder, GPT, tokenizer_files=vocabulary), folder / "gpt")
    write_native(MadeUp(folder, {**LLAMA, "vocab_size": 257}, tokenizer_files=vocabulary), folder / "llama")
    return folder


@pytest.mark.parametrize("row", lines(Path(__file__).with_name("refused.txt")))
def test_bad_command_lines_are_one_error(
    row: str, things: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """One error names all problems, and nothing is written."""
    monkeypatch.chdir(things)
    before = sorted(things.iterdir())
    ((asked, parts),) = parts_of([row])
    words = [part for word in shlex.split(asked) for part in WORDS.get(word, word or "''").split()]
    said = refused([word if word != "''" else "" for word in words], capsys)
    assert says(said, parts), said
    assert said.count("\n") == 1 or said.startswith("error: there are "), said
    assert sorted(things.iterdir()) == before


def test_dashes_and_underscores_are_equivalent(capsys: Captured) -> None:
    for flag in ("--max_shard_size", "--max-shard-size"):
        said = refused(["convert", "nowhere", "out", "--to", "native", f"{flag}=1XB"], capsys)
        assert said.startswith("error: --max-shard-size: takes a size with its unit such as 500MB or 4GiB, got 1XB")


def test_every_command_is_tested_with_paths() -> None:
    without = {"kernels", "doctor", "completion"}  # they read no file
    assert {line.split()[0] for line in PATHS} == set(COMMANDS) - without


VALUES = (
    "",
    *["0", "-1", "1", "2", "1.5", "nan", "1e400", "x", "none", "nowhere/x", "2,2", "a=b", "--", "-"],
    "9" * 30,
    "é\udcff",
)


def command_lines() -> st.SearchStrategy[list[str]]:
    """Draw known flags with values of all kinds and junk, for commands that fail before they start any work."""
    ours = {
        "convert": ("--to", "--from", "--step", "--dtype", "--max-shard-size", "--family", "--tp", "--verify"),
        "inspect": ("--diff", "--step", "--tensors", "--config", "--json", "--no-verify"),
        "data verify": ("--vocab-size", "--tokenizer-type", "--no-hash", "--json"),
        "data split": ("--input", "--output-prefix", "--parts", "--documents", "--split"),
        "generate": ("--load", "--prompt", "--max-new-tokens", "--temperature", "--top-k", "--seed"),
        "preprocess": ("--input", "--output-prefix", "--workers", "--tokenizer-type", "--split-sentences"),
        "plan": ("--cluster", "--gpus", "--fix", "--max-memory", "--tokens", "--top", "--json"),
        "plan-chain": ("--cluster", "--global-batch-size", "--memory", "--svg"),
        "sweep": ("--output", "--timeout", "--limit", "--dry-run"),
        "profile": ("--seconds", "--dtype", "--like"),
        "config --show": tuple(setting.flags[0] for setting in all_settings().values()),
        "train --help": ("--tp",),
    }  # fmt: skip

    def of(name: str) -> st.SearchStrategy[list[str]]:
        word = st.sampled_from([*ours[name], *VALUES, "--debug", "--unknown"])
        return st.lists(word, max_size=7).map(lambda words: [*name.split(), *words])

    return st.sampled_from(sorted(ours)).flatmap(of)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=command_lines())
def test_random_words_do_not_crash_a_command(words: list[str], capsys: Captured) -> None:
    capsys.readouterr()
    status = main(words)
    said = capsys.readouterr()
    assert status in (0, BAD_INPUT), (words, status, said.err)
    assert " has a bug: " not in said.err, (words, said.err)
    silent = {*words} <= {"plan", "--debug"}
    assert ("error: " in said.err) == (status == BAD_INPUT) or silent, (words, status, said.err)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("line", [line for line in PATHS if "{path}" in line and "convert" not in line])
@pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
def test_pipes_and_devices_are_refused_quickly(line: str, device: str, tmp_path: Path, capsys: Captured) -> None:
    """The commands neither wait for them nor read without end."""
    path = tmp_path / "pipe.yaml" if device == "pipe" else Path(device)
    if device == "pipe":
        os.mkfifo(path)
    (tmp_path / "text.txt").write_text("some text")
    known = {"out": tmp_path / "out", "file": tmp_path / "text.txt", "folder": tmp_path, "text": tmp_path / "text.txt"}
    assert path.stem in refused(line.format(path=path, **known).split(), capsys)
