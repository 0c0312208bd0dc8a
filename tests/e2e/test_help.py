"""What a newcomer types first: --help, --help-all, --dry-run, Ctrl-C."""

import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.cli.train import main
from megalite.config.describe import sections, settings
from megalite.config.exit_codes import INTERRUPTED
from megalite.config.files import preset_names
from tests.e2e.programs import MODEL, TRAINING, Corpus, finish, run, start, train_command

pytestmark = pytest.mark.e2e

WITHOUT_TORCH = (
    "import runpy, sys\n"
    "sys.modules['torch'] = None  # to import it is now an error\n"
    "sys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\n"
    "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
)
TRILLION = [
    "--preset",
    "gpt-1t",
    "--tp",
    "8",
    "--pp",
    "64",
    "--world-size",
    "3072",
    "--global-batch-size",
    "3072",
    "--bf16",
]

LAYOUTS = {
    "gpt2-124m": "--tp 2 --pp 2 --vpp 2 --world-size 8 --global-batch-size 64",
    "gpt3-350m": "--tp 2 --world-size 8 --global-batch-size 256 --use-distributed-optimizer",
    "gpt3-1.3b": "--tp 4 --pp 2 --world-size 32 --global-batch-size 512 --bf16",
    "gpt3-2.7b": "--tp 8 --world-size 32 --global-batch-size 512 --bf16 --sequence-parallel",
    "gpt3-6.7b": "--tp 8 --pp 2 --world-size 64 --global-batch-size 1024 --bf16 --sequence-parallel",
    "gpt3-13b": "--tp 8 --pp 4 --world-size 128 --global-batch-size 1024 --bf16 --sequence-parallel",
    "gpt3-175b": "--tp 8 --pp 8 --vpp 2 --world-size 1024 --global-batch-size 1536 --bf16",
    "gpt-1.7b": "--tp 1 --pp 1 --world-size 32 --global-batch-size 512 --bf16 --recompute-granularity full",
    "gpt-3.6b": "--tp 2 --pp 1 --world-size 64 --global-batch-size 512 --bf16 --recompute-granularity full",
    "gpt-7.5b": "--tp 4 --pp 1 --world-size 128 --global-batch-size 512 --bf16 --recompute-granularity full",
    "gpt-18.4b": "--tp 8 --pp 1 --world-size 256 --global-batch-size 1024 --bf16 --recompute-granularity full",
    "gpt-39.1b": "--tp 8 --pp 2 --world-size 512 --global-batch-size 1536 --bf16 --recompute-granularity full",
    "gpt-76.1b": "--tp 8 --pp 4 --world-size 1024 --global-batch-size 1792 --bf16 --recompute-granularity full",
    "gpt-145.6b": "--tp 8 --pp 8 --world-size 1536 --global-batch-size 2304 --bf16 --recompute-granularity full",
    "gpt-310.1b": "--tp 8 --pp 16 --world-size 1920 --global-batch-size 2160 --bf16 --recompute-granularity full",
    "gpt-529.6b": "--tp 8 --pp 35 --world-size 2520 --global-batch-size 2520 --bf16 --recompute-granularity full",
    "gpt-1t": "--tp 8 --pp 64 --world-size 3072 --global-batch-size 3072 --bf16 --recompute-granularity full",
    "llama2-7b": "--tp 4 --pp 2 --world-size 64 --global-batch-size 1024 --bf16 --sequence-parallel",
    "llama3-8b": "--tp 4 --pp 2 --world-size 64 --global-batch-size 512 --bf16 --use-distributed-optimizer",
    "llama3-70b": "--tp 8 --pp 8 --vpp 5 --world-size 512 --global-batch-size 1024 --bf16 --sequence-parallel",
    "llama3.1-8b": "--tp 4 --cp 4 --world-size 64 --global-batch-size 64 --bf16 --sequence-parallel",
    "llama3.2-1b": "--tp 2 --cp 4 --world-size 64 --global-batch-size 64 --bf16 --sequence-parallel",
    "llama3.2-3b": "--tp 2 --cp 8 --world-size 64 --global-batch-size 64 --bf16 --sequence-parallel",
    "llama3.3-70b": "--tp 8 --cp 4 --pp 4 --world-size 512 --global-batch-size 128 --bf16 --sequence-parallel",
    "llama3-405b": "--tp 16 --pp 16 --world-size 2048 --global-batch-size 128 --seq-length 8192 --bf16 --sequence-parallel",
    "phi-3-mini": "--tp 2 --world-size 64 --global-batch-size 512 --bf16 --use-distributed-optimizer",
    "mistral-7b": "--tp 4 --cp 2 --world-size 64 --global-batch-size 512 --bf16 --sequence-parallel",
    "qwen2-7b": "--tp 4 --pp 2 --world-size 64 --global-batch-size 512 --bf16 --use-distributed-optimizer",
    "qwen3-8b": "--tp 4 --pp 2 --world-size 64 --global-batch-size 512 --bf16 --use-distributed-optimizer",
    "gemma-7b": "--tp 8 --world-size 64 --global-batch-size 512 --bf16 --sequence-parallel",
    "gemma2-9b": "--tp 4 --world-size 64 --global-batch-size 512 --bf16 --sequence-parallel --recompute-granularity full",
    "gemma3-27b": "--tp 8 --cp 8 --world-size 128 --global-batch-size 64 --bf16 --sequence-parallel",
    "olmo2-7b": "--tp 4 --pp 2 --world-size 64 --global-batch-size 1024 --bf16 --use-distributed-optimizer",
    "qwen3-30b-a3b": "--ep 8 --pp 2 --world-size 64 --global-batch-size 512 --bf16 --use-distributed-optimizer "
    "--recompute-granularity full --micro-batch-size 1",
    "qwen3-235b-a22b": "--tp 4 --ep 8 --pp 8 --sequence-parallel --world-size 256 --global-batch-size 512 --bf16 "
    "--use-distributed-optimizer --recompute-granularity full --micro-batch-size 1",
    "deepseek-moe-16b": "--ep 8 --pp 4 --world-size 64 --global-batch-size 512 --bf16",
    "deepseek-v2-lite": "--ep 8 --pp 3 --world-size 48 --global-batch-size 512 --bf16 --use-distributed-optimizer",
    "gpt-oss-20b": "--ep 8 --pp 2 --world-size 64 --global-batch-size 512 --bf16 --use-distributed-optimizer "
    "--recompute-granularity full --micro-batch-size 1 --seq-length 4096",
    "gpt-oss-120b": "--ep 16 --pp 4 --world-size 128 --global-batch-size 512 --bf16 --use-distributed-optimizer "
    "--recompute-granularity full --micro-batch-size 1 --seq-length 4096",
    "deepseek-v3": "--ep 64 --pp 16 --world-size 2048 --global-batch-size 15360 --bf16 --use-distributed-optimizer "
    "--recompute-granularity full --micro-batch-size 1",
    "moonlight-16b-a3b": "--ep 8 --pp 3 --world-size 48 --global-batch-size 512 --bf16 --use-distributed-optimizer",
    "kimi-k2": "--ep 64 --pp 16 --world-size 2048 --global-batch-size 15360 --bf16 --use-distributed-optimizer "
    "--recompute-granularity full --micro-batch-size 1",
    "mixtral-8x7b": "--tp 2 --pp 4 --ep 8 --world-size 128 --global-batch-size 1024 --bf16",
}


def test_help_fits_a_screen() -> None:
    out = run(sys.executable, "-c", WITHOUT_TORCH, "--help").require_success().out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 110] == []
    assert lines[0].startswith("usage: pretrain_gpt.py ")
    groups = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    shown = {setting.section for setting in settings().values() if setting.basic}
    assert groups == ["run", *(name for name in sections() if name in shown)]
    assert "--help-all" in out


def test_help_all_lists_every_setting() -> None:
    out = run(sys.executable, "pretrain_gpt.py", "--help-all").require_success().out
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", out))
    for setting in settings().values():
        assert set(setting.flags) <= flags, setting.name


def test_reader_that_stops_early() -> None:
    """`--help-all | head` is no error."""
    piped = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(1)\n{WITHOUT_TORCH}", "--help-all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert piped.stdout is not None
    piped.stdout.close()
    assert piped.wait(timeout=30) == 0
    assert piped.stderr is not None
    assert piped.stderr.read() == b""
    piped.stderr.close()


def test_dry_run_as_json() -> None:
    words = [
        "--dry-run",
        "--json",
        "--preset",
        "gpt2-124m",
        "--tp",
        "2",
        "--pp",
        "2",
        "--world-size",
        "8",
        "--global-batch-size",
        "16",
    ]
    out = run(sys.executable, "-c", WITHOUT_TORCH, *words).require_success().out
    report = json.loads(out)
    documented = (Path(__file__).parents[2] / "docs" / "dry-run.md").read_text(encoding="utf-8")
    assert list(report) == [
        "world_size",
        "layout",
        "stages",
        "memory",
        "communication",
        "schedule",
        "batch",
        "model",
        "config",
    ]
    assert [key for key in report if f"`{key}" not in documented] == []
    assert report["layout"]["axes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "vpp": 1, "ep": 1, "etp": 2}


def test_dry_run_of_three_thousand_ranks() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    outcome = run(sys.executable, "-c", WITHOUT_TORCH, "--dry-run", *TRILLION).require_success()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8  # seconds of CPU; about 1.5
    assert "3072 ranks = tp 8 x cp 1 x dp 6 x pp 64" in outcome.out
    assert len(outcome.out.splitlines()) < 60


def test_presets_have_a_layout_here() -> None:
    assert set(LAYOUTS) == set(preset_names())


@pytest.mark.parametrize("preset", LAYOUTS)
def test_every_preset_dry_runs(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--preset", preset, *LAYOUTS[preset].split()]
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    layers = report["config"]["model"]["num_layers"]
    assert sum(stage["layers"] for stage in report["stages"]) == layers
    largest = report["memory"]["fullest_bytes"]
    assert 1e8 < largest < 200e9  # a rank of a layout that someone would use holds it
    assert main(words) == 0
    text = capsys.readouterr().out
    for title in ("Layout: ", "Stages: ", "Memory", "Schedule: ", "Batch: ", "Model: "):
        assert f"\n{title}" in f"\n{text}"


def test_ctrl_c(corpus: Corpus, folder: Path) -> None:
    """No traceback, and what was saved is there to continue from."""
    saving = ("--train-iters", "100000", "--run-dir", str(folder), "--save-interval", "5")
    # A shell starts background jobs with the signal ignored, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(train_command(1, *MODEL, *TRAINING, *corpus.flags, *saving))
    latest = folder / "checkpoints" / "latest"
    end = time.monotonic() + 60
    while not latest.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    outcome = finish(process, seconds=20)
    assert outcome.status == INTERRUPTED
    assert outcome.err == "interrupted\n"
    assert latest.exists()
