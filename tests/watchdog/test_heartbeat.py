"""Heartbeats read from another process."""

import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.topology.group import Group
from megalite.watchdog import heartbeat as heartbeat_module
from megalite.watchdog.heartbeat import (
    LANES,
    SIZE,
    UNWATCHED,
    FileHeartbeat,
    RankState,
    lane_name,
    rank_from_json,
    read_rank,
)
from tests.support.ranks import RankContext, run_ranks

WORK = SimpleNamespace(wait=lambda: None)


def look(path: Path) -> RankState:
    return read_rank(path, rank=3, host="a", pid=os.getpid(), process="running")


def test_state_of_a_rank(tmp_path: Path) -> None:
    beats = FileHeartbeat(tmp_path / "b", rank=3)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    before = look(tmp_path / "b")
    assert before.patient and before.phase == "starting" and before.doing() == "before its first step, starting"
    beats.begin_step(7)
    assert look(tmp_path / "b").patient  # the first step compiles
    beats.begin_step(8)
    beats.begin_action(b"2SEND_F13", 5)
    beats.lane("tp", (3, 4)).start(lambda: WORK, "all_reduce", 4096).wait()
    after = look(tmp_path / "b")
    assert (after.step, after.phase, after.patient) == (8, "step", False)
    assert (after.action, after.position, after.place) == ("2SEND_F13", 5, (8, 1, 5))
    assert after.doing() == "step 8, action 2SEND_F13, last all_reduce 1 of tp [3, 4]"
    assert after.beats > before.beats and after.silent < 5.0
    beats.phase("saving", patient=True)
    assert look(tmp_path / "b").patient and look(tmp_path / "b").action == ""
    assert rank_from_json(asdict(after)) == after
    beats.close()
    assert look(tmp_path / "b").phase == "ended"


@pytest.mark.parametrize("content", [None, b"", b"megabeat", bytes(SIZE), b"x" * SIZE])
def test_invalid_file_is_a_rank_that_has_not_started(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "b").write_bytes(content)
    state = look(tmp_path / "b")
    assert (state.beats, state.step, state.phase, state.patient, state.lanes) == (0, -1, "starting", True, {})


def test_waiting_is_visible_in_the_call_and_after_it(tmp_path: Path) -> None:
    beats = FileHeartbeat(tmp_path / "b", rank=0)
    seen = []

    def note() -> Any:
        seen.append(look(tmp_path / "b").lanes["tp [0, 1]"])
        return SimpleNamespace(wait=note)

    lane = beats.lane("tp", (0, 1))
    work = lane.start(note, "broadcast", 8)
    between = look(tmp_path / "b").lanes["tp [0, 1]"]
    work.wait()
    lane.start(lambda: WORK, "send", 8)
    assert [(state.begun, state.waiting, state.recent[-1].name) for state in (seen[0], between, seen[1])] == [
        (1, 1, "broadcast"),
        (1, 0, "broadcast"),
        (1, 1, "broadcast"),
    ]
    assert look(tmp_path / "b").lanes["tp [0, 1]"].waiting == 0


def test_operation_unlike_the_previous_step_is_odd(tmp_path: Path) -> None:
    beats = FileHeartbeat(tmp_path / "b", rank=0)
    lane = beats.lane("tp", (0, 1))
    odd = []
    for sizes in ((1, 2, 3), (1, 2, 3), (1, 5, 3, 4)):
        beats.begin_step(len(odd))
        for size in sizes:
            lane.start(lambda: WORK, "all_reduce", size)
            odd.append(look(tmp_path / "b").lanes["tp [0, 1]"].recent[-1].odd)
    assert odd == [False] * 7 + [True, False, False]
    lane_state = look(tmp_path / "b").lanes["tp [0, 1]"]
    assert [operation.size for operation in lane_state.recent] == [3, 1, 2, 3, 1, 5, 3, 4]
    assert lane_state.operation(10) == lane_state.recent[-1] and lane_state.operation(3) == lane_state.recent[0]
    assert lane_state.operation(2) is lane_state.operation(11) is None


def test_failed_operation_is_no_longer_waited_for(tmp_path: Path) -> None:
    beats = FileHeartbeat(tmp_path / "b", rank=0)

    def fails() -> Any:
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError):
        beats.lane("tp", (0, 1)).start(fails, "send")
    with pytest.raises(RuntimeError):
        beats.lane("tp", (0, 1)).start(lambda: SimpleNamespace(wait=fails), "send").wait()
    assert look(tmp_path / "b").lanes["tp [0, 1]"].waiting == 0


def test_device_read_is_visible(tmp_path: Path) -> None:
    beats = FileHeartbeat(tmp_path / "b", rank=3)
    beats.begin_step(1)
    beats.lane("tp", (2, 3)).start(lambda: WORK, "all_reduce", 8).wait()
    assert not look(tmp_path / "b").reads_device
    for number in (1, 2):
        with pytest.raises(ZeroDivisionError), beats.synchronise():
            inside = look(tmp_path / "b")
            assert inside.reads_device and inside.lanes["synchronise [3]"].waiting == number
            assert inside.doing() == "step 1, last all_reduce 1 of tp [2, 3], the host waits for the device"
            _ = 1 / 0
    after = look(tmp_path / "b")
    assert not after.reads_device and after.beats > inside.beats
    with UNWATCHED.synchronise():
        pass


def test_groups_without_a_lane_beat_too(tmp_path: Path) -> None:
    beats = FileHeartbeat(tmp_path / "b", rank=0)
    lanes = [beats.lane("pp edge", (0, peer)) for peer in range(1, LANES + 3)]
    assert beats.lane("pp edge", (0, 1)) is lanes[0]
    for lane in lanes:
        lane.start(lambda: WORK, "send").wait()
    state = look(tmp_path / "b")
    assert len(state.lanes) == LANES and state.last_lane == f"pp edge [0, {LANES}]"
    with beats.synchronise():
        assert not look(tmp_path / "b").reads_device


def test_group_names_are_unique() -> None:
    groups = [(0, 1), (0, 2), tuple(range(9)), tuple(range(0, 18, 2)), (*range(9), 10), (*range(8), 9, 10)]
    names = [lane_name("dp", ranks) for ranks in groups]
    assert len(set(names)) == len(groups)
    assert names[:4] == ["dp [0, 1]", "dp [0, 2]", "dp [0, 1, ..., 8]", "dp [0, 2, ..., 16]"]
    assert max(map(len, [lane_name("position-embedding", tuple(range(0, 10**6, 7)))])) < 112


def test_unwatched_heartbeat_does_nothing() -> None:
    UNWATCHED.begin_step(1)
    assert UNWATCHED.lane("tp", (0, 1)).start(lambda: WORK, "send") is WORK


OPERATIONS = {
    "all_reduce": 32,
    "all_gather": 16,
    "reduce_scatter": 32,
    "all_to_all": 32,
    "broadcast": 32,
    "rotate": 32,
    "send or receive": 32,
}


def test_all_operations_of_a_group_are_counted(tmp_path: Path) -> None:
    first, second = run_ranks(2, count_operations, str(tmp_path))
    assert [(name.replace("send", "send or receive"), size) for name, size in first] == list(OPERATIONS.items())
    assert [(name.replace("receive", "send or receive"), size) for name, size in second] == list(OPERATIONS.items())


def count_operations(context: RankContext, folder: str) -> list[tuple[str, int]]:
    plain = context.topology(dp=2).world
    path = Path(folder, str(context.rank))
    world = Group("world", plain.ranks, plain.rank, plain.process_group, FileHeartbeat(path, rank=context.rank))
    half, whole = torch.ones(4), torch.ones(8)
    seen = []

    def note() -> None:
        (lane,) = look(path).lanes.values()
        assert (lane.begun, lane.waiting) == (len(seen) + 1, 0)
        seen.append(lane.recent[-1][:2])

    for operation in (
        lambda: world.all_reduce(whole),
        lambda: world.all_gather(whole, half),
        lambda: world.reduce_scatter(half, whole),
        lambda: world.all_to_all_equal(torch.empty(8), whole),
        lambda: world.broadcast(whole),
        lambda: world.rotate_async(whole)[1].wait(),
        lambda: (world.receive_async(whole, source=0) if context.rank else world.send_async(whole, to=1)).wait(),
    ):
        operation()
        note()
    return seen


def test_full_disk_is_an_error_before_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heartbeat_module.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FileHeartbeat(tmp_path / "b", rank=0)
