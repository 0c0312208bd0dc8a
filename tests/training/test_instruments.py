"""Phases and goodput in the metrics of a run, profiles of its steps, and no cost if they are turned off."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite.config.errors import ConfigError
from megalite.topology.group import Group
from megalite.training.records import FAILED, FINISHED, STOPPED, read_sessions
from megalite.training.saving import Saver
from megalite.training.step import Stepper
from tests.e2e.programs import records
from tests.support.listeners import listening_here
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import TINY, build, tiny_config, words
from tests.support.trainer import ReplicaTrainer, fit

RUN: dict[str, Any] = words(
    "mock_data eod_mask_loss=false num_layers=2 train_iters=6 log_interval=3 eval_interval=3 eval_iters=1 "
    "save_interval=4 lr_warmup_iters=0"
)


def run(folder: Path, **changes: Any) -> list[str]:
    return fit(**{**TINY, **RUN, "run_dir": str(folder), **changes})


def test_run_reports_phase_times(tmp_path: Path) -> None:
    lines = run(tmp_path, metrics=["csv"], log_phases=True)
    phases = [line for line in lines if line.startswith("  ms/step: forward ")]
    assert len(phases) == 2 and "evaluation" in phases[0] and "save" in phases[1]
    found = records(tmp_path, "train")
    assert [("forward_ms" in record, "goodput" in record) for record in found] == [
        (step in (3, 6),) * 2 for step in range(1, 7)
    ]
    last = found[-1]
    parts = ("forward_ms", "backward_ms", "reduce_ms", "optimizer_ms", "other_ms")
    mean = sum(record["ms_per_step"] for record in found[3:]) / 3
    waited = sum(record["data_wait_ms"] for record in found[3:]) / 3
    assert all(last[name] >= 0.0 for name in parts) and last["forward_ms"] > 0.0
    assert sum(last[name] for name in parts) + waited == pytest.approx(mean, rel=1e-6)
    assert 0.0 < last["goodput"] < 1.0 and last["memory_allocated_bytes"] > 1 << 20
    assert re.match(r"goodput \d+\.\d%: .* start-up .*, evaluation .*, saving .*, other ", lines[-1])
    (session,) = read_sessions(tmp_path)
    assert (session.ended, session.last_step, session.first_step) == (FINISHED, 6, 0)
    assert session.steps_seconds == pytest.approx(sum(record["ms_per_step"] for record in found) / 1e3)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 6 + 3


def test_sessions_record_stop_failure_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = {"load": str(tmp_path / "checkpoints"), "fresh_if_missing": True, "eval_interval": None}
    run(tmp_path, **resume, exit_interval=2)

    def broken(self: Saver, *arguments: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "begin", broken)
        with pytest.raises(RuntimeError, match="broken"):
            run(tmp_path, **resume)
    lines = run(tmp_path, **resume)
    first, second, third = read_sessions(tmp_path)
    assert [one.ended for one in (first, second, third)] == [STOPPED, FAILED, FINISHED]
    assert [one.first_step for one in (first, second, third)] == [0, 2, 2]
    assert (third.lost_steps, third.last_step) == (2, 6)
    assert "2 steps made again" in lines[-1] and "between 3 starts" in lines[-1]
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]


def test_timers_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracers: list[Any] = []
    init = Stepper.__init__

    def noted(self: Stepper, *arguments: Any, **named: Any) -> None:
        tracers.append(named["tracer"])
        init(self, *arguments, **named)

    monkeypatch.setattr(Stepper, "__init__", noted)
    lines = run(tmp_path, timing_log_level=0)
    assert tracers == [None]
    assert not any("ms/step:" in line for line in lines)
    assert not any("forward_ms" in record for record in records(tmp_path, "train"))


def gathers_of(context: RankContext, steps: int) -> int:
    """Count all-gathers over the world in a run with one log line."""
    config = tiny_config(
        2, **{**RUN, "dp": 2, "train_iters": steps, "log_interval": 100, "eval_interval": None, "save_interval": None}
    )
    count, gather = [0], Group.all_gather

    def counted(self: Group, *arguments: Any) -> None:
        count[0] += self.name == "world"
        gather(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_gather", counted)
        # From the first step on: setting up gathers too.
        ReplicaTrainer(build(context, config), on_open=lambda _: count.__setitem__(0, 0)).fit()
    return count[0]


def listening(context: RankContext, folder: str) -> tuple[int, int]:
    """Return new listening sockets of this rank in a run that traces and saves, and its process groups."""
    more = {"save": folder, "run_dir": folder, "trace": True, "metrics": ["csv"], "log_interval": 1}
    config = tiny_config(2, **{**RUN, "tp": 2, **more})
    made, make = [0], dist.new_group
    before = listening_here()  # groups of earlier tests among them, which may close at any time

    def counted(*arguments: Any, **named: Any) -> Any:
        group = make(*arguments, **named)
        made[0] += group is not dist.GroupMember.NON_GROUP_MEMBER
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        ReplicaTrainer(build(context, config)).fit()
    return len(listening_here() - before), made[0]


def test_rank_has_no_sockets_beyond_its_process_groups(tmp_path: Path) -> None:
    """gloo has one socket per rank of the pool (tests/support/forks.py); megalite has none."""
    for sockets, groups in run_ranks(2, listening, str(tmp_path)):
        assert sockets == 0 < groups


def test_ranks_exchange_times_once_per_log_line() -> None:
    short, long = run_ranks(2, gathers_of, 2), run_ranks(2, gathers_of, 6)
    assert short == long == [1, 1]


def test_profile_has_the_pipeline_actions(tmp_path: Path) -> None:
    _, lines = run_ranks(2, profiled, str(tmp_path))
    trace, table = (tmp_path / "profile" / f"rank-1-steps-2-3{end}" for end in (".json", "-cpu.txt"))
    assert [path.name for path in sorted((tmp_path / "profile").iterdir())] == [table.name, trace.name]
    assert any(line.startswith(f"profiled steps 2 to 3: wrote {trace}") for line in lines)
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    for microbatch in range(8):
        for kind in "FB":
            action = f"1{kind}{microbatch} stage 1 microbatch {microbatch}"
            assert names.count(action) == 2, "two steps; the one before warmed up"
    assert names.count("reduce") == names.count("optimizer") == 2
    assert "aten::" in table.read_text() and "Self CPU" in table.read_text()


def profiled(context: RankContext, folder: str) -> list[str]:
    more = words("profile profile_ranks=[1] pipeline_schedule=1f1b profile_step_start=2 profile_step_end=4")
    config = tiny_config(2, **{**RUN, "pp": 2, "run_dir": folder, "train_iters": 3, "eval_interval": None, **more})
    lines: list[str] = []
    ReplicaTrainer(build(context, config), lines.append).fit()
    return lines


def test_unwritable_profile_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("")
    with pytest.raises(ConfigError, match=r"^cannot write profiles to .*profile: File exists; give a --run-dir"):
        run(tmp_path, profile=True, profile_step_start=2, profile_step_end=3)


def test_profile_starts_after_a_skipped_step(tmp_path: Path) -> None:
    lines = run(tmp_path, profile=True, profile_step_start=3, profile_step_end=5, iterations_to_skip=[2])
    assert any(line.startswith("profiled steps 4 to 4: wrote ") for line in lines)


def test_profile_beyond_the_last_step_is_reported(tmp_path: Path) -> None:
    run(tmp_path, exit_interval=4)
    more = {"load": str(tmp_path / "checkpoints"), "profile": True, "profile_step_start": 3, "profile_step_end": 5}
    assert "step 8 is beyond the last step, 6: no profile will be written" in run(tmp_path, **more)
    assert list((tmp_path / "profile").iterdir()) == []
