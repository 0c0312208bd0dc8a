"""A newcomer's first commands: --help, --help-all, --dry-run, Ctrl-C."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.cli.train import main
from megalite.config.errors import INTERRUPTED
from tests.e2e.programs import MODEL, REPOSITORY, TRAINING, Corpus, finish, run, start, train_command
from tests.support.patience import wait_until

pytestmark = pytest.mark.e2e

WITHOUT_TORCH = (
    "import runpy, sys\n"
    "sys.modules['torch'] = None  # to import it is now an error\n"
    "sys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\n"
    "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
)
TRILLION = "--preset gpt-1t --tp 8 --pp 64 --world-size 3072 --global-batch-size 3072 --bf16"
FULL = "--bf16 --recompute-granularity full"
LAYOUTS = {
    "gpt3-175b": "--tp 8 --pp 8 --vpp 2 --world-size 1024 --global-batch-size 1536 --bf16",
    "llama3.3-70b": "--tp 8 --cp 4 --pp 4 --world-size 512 --global-batch-size 128 --bf16 --sequence-parallel",
    "gemma3-27b": "--tp 8 --cp 8 --world-size 128 --global-batch-size 64 --bf16 --sequence-parallel",
    "qwen3-235b-a22b": f"--tp 4 --ep 8 --pp 8 --sequence-parallel --world-size 256 --global-batch-size 512 {FULL} "
    "--use-distributed-optimizer",
    "gpt-oss-120b": f"--ep 16 --pp 4 --world-size 128 --global-batch-size 512 {FULL} --use-distributed-optimizer "
    "--seq-length 4096",
    "deepseek-v3": f"--ep 64 --pp 16 --world-size 2048 --global-batch-size 15360 {FULL} --use-distributed-optimizer",
}
"""One preset per kind of model, on a plausible layout; the other presets are covered by the same rules."""


def test_closed_pipe_is_not_an_error() -> None:
    """As in `--help-all | head`. Help does not import torch; `tests/config/test_help.py` tests the text."""
    piped = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(1)\n{WITHOUT_TORCH}", "--help-all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert piped.stdout is not None
    piped.stdout.close()
    assert piped.wait(timeout=30) == 0
    assert piped.stderr is not None
    assert piped.stderr.read() == b""
    piped.stderr.close()


def test_dry_run_of_3072_ranks_is_fast() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    outcome = run(sys.executable, "-c", WITHOUT_TORCH, "--dry-run", *TRILLION.split()).require_success()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8  # CPU seconds; about 1.5
    assert "3072 ranks = tp 8 x cp 1 x dp 6 x pp 64" in outcome.out
    assert len(outcome.out.splitlines()) < 60


@pytest.mark.parametrize("preset", LAYOUTS)
def test_presets_dry_run(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--preset", preset, *LAYOUTS[preset].split()]
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    layers = report["config"]["model"]["num_layers"]
    assert sum(stage["layers"] for stage in report["stages"]) == layers
    largest = report["memory"]["fullest_bytes"]
    assert 1e8 < largest < 200e9  # plausible for one device
    assert main(words) == 0
    text = capsys.readouterr().out
    for title in ("Layout: ", "Stages: ", "Memory", "Schedule: ", "Batch: ", "Model: "):
        assert f"\n{title}" in f"\n{text}"


def test_ctrl_c_exits_without_traceback(corpus: Corpus, folder: Path) -> None:
    """The last checkpoint is kept, and goodput counts from the start of the process."""
    saving = ("--train-iters", "100000", "--run-dir", str(folder), "--save-interval", "5")
    # A shell starts background jobs with the signal ignored, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.time()
    process = start(train_command(1, *MODEL, *TRAINING, *corpus.flags, *saving))
    latest = folder / "checkpoints" / "latest"
    wait_until(latest.exists, running=lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    outcome = finish(process, seconds=20)
    assert outcome.status == INTERRUPTED
    assert outcome.err == "interrupted\n"
    assert latest.exists()
    (session,) = json.loads((folder / "sessions.json").read_text())["sessions"]
    if sys.platform == "linux":  # elsewhere goodput counts from the imports before torch
        # The kernel counts in hundredths of a second; importing torch takes more than one.
        assert -0.05 < session["started"] - began < 0.5
    assert session["seen"] - session["started"] >= session["startup_seconds"] > 0.5
