"""Who answers once a collective has timed out, over a store as torchrun keeps one."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.topology.lost_peers import NoAnswerError, RollCall, is_timeout
from megalite.topology.topology import Launch
from tests.support.ranks import RankContext, run_ranks

SECONDS = 1.0
TIMED_OUT = RuntimeError("[unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")


def launch_of(rank: int, world: int, port: int) -> Launch:
    """Two ranks a host."""
    store = ("127.0.0.1", port)
    return Launch(rank=rank, world_size=world, local_rank=rank % 2, host=rank // 2, store=store)


def explained(
    context: RankContext,
    world: int,
    port: int,
    absent: tuple[int, ...] = (),
    twice: bool = False,
    seconds: float = SECONDS,
) -> Any:
    """What a rank says after a timeout in which `absent` ranks give no answer."""
    group = context.topology(dp=world).world
    launch = launch_of(context.rank, world, port)
    roll = RollCall.open(group, launch, torch.device("cpu"))
    if twice:  # another start of the run that meets in the same store
        assert roll is not None
        roll.missing(SECONDS)
        roll = RollCall.open(group, launch, torch.device("cpu"))
    assert roll is not None
    if context.rank in absent:
        return None
    try:
        roll.explain(TIMED_OUT, seconds=seconds)
    except NoAnswerError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture
def port() -> Any:
    """Of a store outside the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def test_ranks_that_give_no_answer_are_named_with_their_host(port: int) -> None:
    said = run_ranks(4, explained, 4, port, (2, 3))
    assert said[2:] == [None, None]
    for text in said[:2]:
        assert "ranks 2, 3 on host 1 (" in text
        assert "do not answer within" in text
        assert "Timed out waiting 5000ms" in text


def test_where_all_answer_none_is_gone(port: int) -> None:
    began = time.monotonic()
    for text in run_ranks(2, explained, 2, port, seconds=60.0):
        assert "but every rank still answers" in text
    assert time.monotonic() - began < 30.0, "it does not wait once all have answered"


def test_answers_of_an_earlier_start_do_not_count(port: int) -> None:
    said = run_ranks(2, explained, 2, port, (1,), True)
    assert "rank 1 on host 0 (" in said[0]
    assert "does not answer within" in said[0]


def test_no_store_means_that_this_host_may_be_cut_off() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    roll = RollCall(rank=1, hosts=("host 0 (a)", "host 1 (b)"), key="k", store=("127.0.0.1", port))
    assert roll.missing(0.5) is None
    text = roll._finding(None, SECONDS)
    assert f"the store at 127.0.0.1:{port} does not answer either: host 1 (b), with rank 1, is cut off" in text


def test_other_errors_are_left_alone() -> None:
    roll = RollCall(rank=0, hosts=("host 0 (a)", "host 1 (b)"), key="k", store=("127.0.0.1", 1))
    for error in (RuntimeError("shape mismatch"), ValueError("Timed out waiting"), KeyError("x")):
        assert not is_timeout(error)
        roll.explain(error)
    assert is_timeout(TIMED_OUT)


def test_one_rank_has_nobody_to_ask() -> None:
    from megalite.topology.group import Group

    assert RollCall.open(Group.solo("world"), launch_of(0, 1, 1), torch.device("cpu")) is None
