"""A run on four ranks, stopped halfway and resumed on other layouts, equals a run on one rank."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.cli.main import main
from megalite.config import files
from megalite.config.flags import parse_arguments
from tests.docs.execution import in_process, run_script
from tests.e2e.forked import train_forked
from tests.e2e.programs import MODEL, REPOSITORY, TRAINING, Corpus, Outcome, losses, records

pytestmark = pytest.mark.e2e

STEPS, SWITCH = 8, 4
SCHEDULED = [*MODEL, *TRAINING, *f"--train-iters {STEPS} --eval-interval 2 --eval-iters 2".split()]
FIRST = ["--tp", "2", "--pp", "2", "--vpp", "2", "--pipeline-schedule", "zb-v", "--trace", "--trace-steps", "2"]
SECOND = ["--tp", "1", "--pp", "2", "--dp", "2"]


@dataclass(frozen=True)
class Runs:
    """Run folders and outputs."""

    switched: Path
    """tp 2, pp 2 with a V schedule and its second step traced; then pp 2, dp 2."""
    shrunk: Path
    """The same first half, then one rank."""
    whole: Path
    """One process, uninterrupted."""
    first_half: Outcome
    second_half: Outcome


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of all tests below."""
    folder = tmp_path_factory.mktemp("runs")
    switched, shrunk, whole = folder / "switched", folder / "shrunk", folder / "whole"

    def words(run_dir: Path, *flags: str) -> list[str | Path]:
        resume = ("--save-interval", "2", "--load", run_dir / "checkpoints", "--fresh-if-missing")
        return [*SCHEDULED, *corpus.flags, "--run-dir", run_dir, *resume, *flags]

    first_half = train_forked(4, *words(switched, *FIRST, "--exit-interval", str(SWITCH))).require_success()
    shutil.copytree(switched, shrunk)
    second_half = train_forked(4, *words(switched, *SECOND)).require_success()
    train_forked(1, *words(shrunk)).require_success()
    train_forked(1, *words(whole)).require_success()
    return Runs(switched, shrunk, whole, first_half, second_half)


def test_validation_loss_is_continuous_at_the_switch(runs: Runs) -> None:
    (expected,) = [row["valid_loss"] for row in records(runs.whole, "valid") if row["step"] == SWITCH]
    for folder in (runs.switched, runs.shrunk):
        at_switch = [row["valid_loss"] for row in records(folder, "valid") if row["step"] == SWITCH]
        assert len(at_switch) == 2  # before and after the switch
        assert at_switch == pytest.approx([expected, expected], abs=1e-5, rel=0)
    shown = rf"step {SWITCH}/{STEPS}  validation loss (\S+) "
    before, after = (re.findall(shown, half.out) for half in (runs.first_half, runs.second_half))
    assert len(before) == len(after) == 1
    assert float(before[0]) == pytest.approx(float(after[0]), abs=1.01e-4)  # four digits are printed
    assert float(after[0]) == pytest.approx(expected, abs=1e-4)


def test_losses_equal_those_of_one_rank(runs: Runs) -> None:
    expected = losses(runs.whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert expected[-1][1] < expected[0][1] - 0.2
    for folder in (runs.switched, runs.shrunk):
        assert [step for step, _ in losses(folder)] == [step for step, _ in expected]
        assert [loss for _, loss in losses(folder)] == pytest.approx([loss for _, loss in expected], rel=1e-4)
        for name in ("grad_norm", "lr", "consumed_samples"):
            values = [[row[name] for row in records(of, "train")] for of in (folder, runs.whole)]
            assert values[0] == pytest.approx(values[1], rel=1e-3)


def test_run_folder_contents(runs: Runs, corpus: Corpus) -> None:
    files_and_folders = "checkpoints config.yaml exit.json metrics.jsonl sessions.json tensorboard trace-2.json"
    assert {path.name for path in runs.switched.iterdir()} == set(files_and_folders.split())
    config = files.load(runs.switched / "config.yaml")
    p = config.parallel
    assert (p.tp, p.pp, p.vpp, p.dp) == (1, 2, 1, 2)
    # from the tokenizer and from run_dir
    assert (config.model.vocab_size, config.checkpoint.save) == (None, None)
    assert config.data.data_path == [str(corpus.prefix)]
    assert files.dump(config) == (runs.switched / "config.yaml").read_text()
    assert parse_arguments(["--config", str(runs.switched / "config.yaml")]).config == config

    saved = sorted(path.name for path in (runs.switched / "checkpoints").iterdir())
    assert saved == ["latest", *(f"step-{step:07}" for step in range(2, STEPS + 1, 2))]
    latest = (runs.switched / "checkpoints" / "latest").read_text().strip()
    assert latest == f"step-{STEPS:07}"
    assert (runs.switched / "checkpoints" / latest / "manifest.json").is_file()

    assert [row["step"] for row in records(runs.switched, "valid")] == [0, 2, 4, 4, 6, 8]


def test_tensorboard_holds_the_metrics(runs: Runs) -> None:
    events = EventAccumulator(str(runs.switched / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("lm loss")]
    assert shown == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(runs.switched)]
    by_samples = [event.step for event in events.Scalars("lm loss vs samples")]
    assert by_samples == [row["consumed_samples"] for row in records(runs.switched, "train")]
    assert {"learning-rate", "grad-norm", "lm loss validation", "iteration-time"} <= set(events.Tags()["scalars"])


def test_trace_holds_measured_and_simulated_pipelines(runs: Runs) -> None:
    """The trace has the pipelines of both tensor-parallel ranks and the simulated one; only the traced step logs its bubble."""
    trace = json.loads((runs.switched / "trace-2.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert names == ["measured: tp 0 cp 0 dp 0", "measured: tp 1 cp 0 dp 0", "simulated"]
    kinds = {event["cat"] for event in trace if event["ph"] == "X"}
    assert kinds == {"forward", "backward", "input gradient", "weight gradient"}
    measured = {
        row["step"]: row["bubble_fraction"] for row in records(runs.switched, "train") if "bubble_fraction" in row
    }
    assert list(measured) == [2] and 0.0 <= measured[2] < 1.0
    assert "step 2: measured bubble " in runs.first_half.out
    events = EventAccumulator(str(runs.switched / "tensorboard"))
    events.Reload()
    (shown,) = events.Scalars("pipeline-bubble-fraction")
    assert (shown.step, shown.value) == (2, pytest.approx(measured[2]))


LINE = re.compile(
    r"\d\d:\d\d:\d\d step (\d+)/\d+ +(\d+|\d\.\d\dk) tok  loss (\d\.\d{4})  lr \d\.\d\de-\d+  grad norm [\d.e-]+ +"
    r"[\d.]+k? tok/s/rank  ETA \d+[smh\d]*"
)


def test_log_line_format(runs: Runs) -> None:
    lines = [line for line in runs.first_half.out.splitlines() if "grad norm" in line]
    assert len(lines) == SWITCH  # one line per step, from rank 0 only
    train = records(runs.switched, "train")
    for number, line in enumerate(lines, start=1):
        found = LINE.fullmatch(line)
        assert found is not None, line
        assert (found[1], found[3]) == (str(number), f"{train[number - 1]['loss']:.4f}")
    assert "4 ranks = tp 2 x cp 1 x dp 1 x pp 2 (vpp 2) on " in runs.first_half.out
    assert f"stopping at step {SWITCH}: exit_interval is {SWITCH}" in runs.first_half.out
    assert f"{SWITCH:07} (written by tp 2, pp 2, dp 1)" in runs.second_half.out


def test_finished_run_has_nothing_to_do(runs: Runs, corpus: Corpus) -> None:
    before = (runs.whole / "metrics.jsonl").read_text()
    words = ("--run-dir", runs.whole, "--save-interval", "2", "--load", runs.whole / "checkpoints")
    again = train_forked(1, *SCHEDULED, *corpus.flags, *words).require_success()
    assert f"step {STEPS} of {STEPS}: nothing to do" in again.out
    assert (runs.whole / "metrics.jsonl").read_text() == before


def test_trained_model_generates_text(runs: Runs) -> None:
    prompt = "The import statement"
    words = ["--load", str(runs.switched / "checkpoints"), "--prompt", prompt, "--max-new-tokens", "12", "--top-k", "8"]
    script = in_process(run_script, [str(REPOSITORY / "tools" / "generate_text.py"), *words, "--seed", "3"])
    assert script.status == 0 and script.out.startswith(prompt), script.err
    assert len(script.out) > len(prompt) + 4
    assert in_process(main, ["generate", *words, "--seed", "3"]).out == script.out
