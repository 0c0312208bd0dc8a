"""Bad input gives one line that names the problem and a solution, with exit status 2, within seconds, on any number of ranks."""

from dataclasses import dataclass
from pathlib import Path

import pytest

import megalite
from megalite.cli.train import main
from megalite.config.errors import BAD_INPUT
from tests.e2e.forked import train_forked
from tests.e2e.programs import MODEL, TRAINING, Corpus

pytestmark = pytest.mark.e2e

PACKAGE = f"{Path(megalite.__file__).parent}/"

RUN = [*MODEL, *TRAINING, "--train-iters", "2"]


@dataclass(frozen=True)
class Files:
    """Paths that are not what a flag needs."""

    corpus: Corpus
    checkpoints: Path
    """Checkpoints of a model of hidden size 32, at step 2."""
    plain_file: Path
    nothing: Path


@pytest.fixture(scope="module")
def bad(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("bad")
    checkpoints = folder / "checkpoints"
    assert main([*RUN, *corpus.flags, "--save", str(checkpoints)]) == 0
    plain_file = folder / "plain_file"
    plain_file.write_text("not a folder")
    return Files(corpus, checkpoints, plain_file, folder / "nothing")


@dataclass(frozen=True)
class Case:
    """Flags with names of `Files` in braces, and parts of the expected message."""

    flags: str
    says: tuple[str, ...]

    def words(self, files: Files) -> list[str]:
        data = files.corpus
        names = {**vars(files), "tokenizer": data.tokenizer, "data": data.prefix}
        return [word.format(**names) for word in self.flags.split()]


# Errors that only running ranks can detect; tests/cli/refused.txt and tests/config cover those of settings and files.
# {data} and {tokenizer} are valid.
AT_RUN_TIME = {
    "world size": Case("--data-path {data} --tokenizer-model {tokenizer} --tp 4", ("world size 2", "tp·pp·cp = 4·1·1 = 4", "start 4 ranks", "among 1, 2")),
    "no such data": Case("--data-path {data}s --vocab-size 384 --tp 2", ("data path {data}s", "{data}s.bin and {data}s.idx do not exist", "has {data}")),
    "token id": Case("--data-path {data} --vocab-size 100 --pp 2", ("token id 383", "vocab_size is 100", "at least 384")),
    "nothing to load": Case("--data-path {data} --vocab-size 384 --tp 2 --load {nothing}", ("no checkpoint", "{nothing} does not exist", "--fresh-if-missing")),
    "another model": Case("--data-path {data} --vocab-size 384 --load {checkpoints} --num-layers 2 --hidden-size 64", ("step-0000002 is of another model", "num_layers 4 there, 2 here", "hidden_size 32 there, 64 here", "Use the settings of the checkpoint")),
    "run folder": Case("--data-path {data} --vocab-size 384 --tp 2 --run-dir {plain_file}", ("cannot write {plain_file}", "give a folder that can be written")),
    "checkpoints of another run": Case("--data-path {data} --vocab-size 384 --save {checkpoints}", ("{checkpoints} holds checkpoints up to step 2", "starts at step 0", "--load {checkpoints}", "another --save")),
    # Only the last stage computes a loss.
    "kernel of one stage": Case("--data-path {data} --vocab-size 384 --pp 2 --precision fp64 --kernels cross_entropy=triton", ("kernels: cross_entropy=triton cannot be used", "not float64", "use cross_entropy=torch")),
}  # fmt: skip


def check_message(errors: list[str], case: Case, files: Files) -> None:
    """Check that there is one message with all expected parts."""
    assert len(errors) == 1, errors
    names = {**vars(files), "tokenizer": files.corpus.tokenizer, "data": files.corpus.prefix}
    assert [part for part in case.says if part.format(**names) not in errors[0]] == [], errors[0]


def run_with(flags: list[str]) -> list[str]:
    given = {word for word in flags if word.startswith("--")}
    pairs = zip(RUN[::2], RUN[1::2], strict=True)
    return [*(word for pair in pairs if pair[0] not in given for word in pair), *flags]


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_bad_input_is_one_error_on_two_ranks(name: str, bad: Files) -> None:
    case = AT_RUN_TIME[name]
    outcome = train_forked(2, *run_with(case.words(bad)), seconds=120)  # about 1 s on two idle cores; more is a hang
    check_message(outcome.errors, case, bad)
    assert outcome.status == BAD_INPUT  # of both ranks
    assert PACKAGE not in outcome.err, "a traceback with megalite's code"
    assert "step 1/" not in outcome.out


def write_schedule(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_schedule_above_memory_limit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--dry-run --vocab-size 384 --num-layers 4 --pp 2 --global-batch-size 8 --hidden-size 512 --seq-length 512"
    assert main([*flags.split(), "--pipeline-memory-limit", "102.4MiB"]) == 0
    capsys.readouterr()
    assert main([*flags.split(), "--pipeline-schedule", "gpipe", "--pipeline-memory-limit", "102.4MiB"]) == BAD_INPUT
    error = capsys.readouterr().err
    assert "1F7 (rank 1, position " in error and "above the limit of 102.40 MiB" in error
    assert "\nrank 1: " in error and ">1F7<" in error


def test_deadlocking_schedule_is_refused_on_two_ranks(corpus: Corpus, tmp_path: Path) -> None:
    """(`tests/cli/test_schedule.py` tests other faults and their display.)"""
    path = write_schedule(tmp_path, "deadlock", ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"])
    flags = ["--pp", "2", "--global-batch-size", "2", "--pipeline-schedule-file", str(path)]
    outcome = train_forked(2, *run_with([*corpus.flags, *flags]), seconds=120)
    assert outcome.status == BAD_INPUT  # of both ranks
    assert f"pipeline_schedule_file {path}: " in outcome.err and "\nrank 0: " in outcome.err
    assert "deadlocks whenever its sends complete" in outcome.err and "step 1/" not in outcome.out


def test_custom_schedule_file_trains(corpus: Corpus, tmp_path: Path) -> None:
    path = write_schedule(tmp_path, "mine", ["0F0,0F1,0I0,0I1,0W0,0W1", "1F0,1B0,1F1,1B1"])
    flags = ["--pp", "2", "--global-batch-size", "2", "--pipeline-schedule-file", str(path)]
    words = run_with([*corpus.flags, *flags, "--pipeline-check-memory"])
    outcome = train_forked(2, *words).require_success()
    assert "schedule mine.csv" in outcome.out and "step 2/2" in outcome.out
