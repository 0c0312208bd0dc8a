"""Test the roll call after a timeout of a collective, over a store like torchrun's."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from megalite.topology.lost_peers import NoAnswerError, RollCall, is_connection_error, is_timeout
from megalite.topology.topology import Launch
from tests.support.ranks import RankContext, run_ranks

SECONDS = 1.0
TIMED_OUT = RuntimeError("[unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")


NCCL_TIMED_OUT = (
    # Megatron-LM#935; NeMo Speech#14399; HLLM#20; pytorch#82091
    "[PG 1 Rank 6] Process group watchdog thread terminated with exception: [Rank 6] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, NumelIn=7098994688, NumelOut=443687168, "
    "Timeout(ms)=600000) ran for 882722 milliseconds before timing out.\nException raised from checkTimeout at "
    "/opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:567 (most recent call first):\nframe #0: c10",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
    "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: Socket Timeout",
    "[1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: Timeout waiting for key: default_pg/0/0 after 1800000 ms",
)
NCCL_LOST = (
    # nccl#2076; nccl#1928; nccl#834 (with the socket's words)
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network "
    "error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.16.0.1<33759> failed : Connection reset "
    "by peer",
    "NCCL error in: /opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3763, remote process exited or "
    "there was a network error, NCCL version 2.28.8",
    "NCCL communicator was aborted on rank 0.",
)
NCCL_SYSTEM = (  # pytorch#149984
    "Collective WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1000000) raised the following async "
    "exception: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.25.1\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
)
NCCL_OURS = (  # nccl#1241; and a fault of the device
    "NCCL error in: /opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1287, invalid usage, NCCL version "
    "2.17.1\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error, NCCL version 2.18.6\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.",
)


def launch_of(rank: int, world: int, port: int) -> Launch:
    """Return a launch with two ranks per host."""
    store = ("127.0.0.1", port)
    return Launch(rank=rank, world_size=world, local_rank=rank % 2, host=rank // 2, store=store)


def explained(
    context: RankContext,
    world: int,
    port: int,
    absent: tuple[int, ...] = (),
    twice: bool = False,
    seconds: float = SECONDS,
    text: str | None = None,
) -> Any:
    """Return a rank's error after a timeout in which `absent` ranks do not answer."""
    group = context.topology(dp=world).world
    launch = launch_of(context.rank, world, port)
    roll = RollCall.open(group, launch)
    if twice:  # another start of the run with the same store
        assert roll is not None
        roll.missing(SECONDS)
        roll = RollCall.open(group, launch)
    assert roll is not None
    if context.rank in absent:
        return None
    try:
        roll.explain(TIMED_OUT if text is None else dist.DistBackendError(text), seconds=seconds)
    except NoAnswerError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture
def port() -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def test_ranks_without_an_answer_are_named_with_their_host(port: int) -> None:
    said = run_ranks(4, explained, 4, port, (2, 3))
    assert said[2:] == [None, None]
    for text in said[:2]:
        assert "ranks 2, 3 on host 1 (" in text
        assert "do not answer within" in text
        assert "Timed out waiting 5000ms" in text


def test_no_rank_is_lost_if_all_answer(port: int) -> None:
    began = time.monotonic()
    for text in run_ranks(2, explained, 2, port, seconds=60.0):
        assert "but every rank still answers" in text
    assert time.monotonic() - began < 30.0, "it must not wait once all have answered"


def test_answers_of_an_earlier_start_do_not_count(port: int) -> None:
    said = run_ranks(2, explained, 2, port, (1,), True)
    assert "rank 1 on host 0 (" in said[0]
    assert "does not answer within" in said[0]


def test_error_without_a_store_says_this_host_may_be_cut_off() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    roll = RollCall(rank=1, hosts=("host 0 (a)", "host 1 (b)"), key="k", store=("127.0.0.1", port))
    assert roll.missing(0.5) is None
    text = roll._finding(None, SECONDS)
    assert f"the store at 127.0.0.1:{port} does not answer either: host 1 (b), with rank 1, is cut off" in text


def test_other_errors_are_unchanged() -> None:
    roll = RollCall(rank=0, hosts=("host 0 (a)", "host 1 (b)"), key="k", store=("127.0.0.1", 1))
    for error in (RuntimeError("shape mismatch"), ValueError("Timed out waiting"), KeyError("x")):
        assert not is_timeout(error)
        roll.explain(error)
    assert is_timeout(TIMED_OUT)


@pytest.mark.parametrize("text", NCCL_TIMED_OUT)
def test_nccl_timeouts_are_recognized(text: str) -> None:
    assert is_timeout(dist.DistBackendError(text)) and is_timeout(RuntimeError(text))
    assert not is_timeout(ValueError(text))


@pytest.mark.parametrize("text", NCCL_LOST)
def test_lost_nccl_connections_are_recognized(text: str) -> None:
    assert is_connection_error(dist.DistBackendError(text)) and not is_timeout(dist.DistBackendError(text))


@pytest.mark.parametrize("text", [NCCL_SYSTEM, *NCCL_OURS])
def test_nccl_errors_of_this_rank_are_neither(text: str) -> None:
    assert not is_connection_error(dist.DistBackendError(text)) and not is_timeout(dist.DistBackendError(text))


def test_roll_call_after_an_nccl_timeout(port: int) -> None:
    said = run_ranks(2, explained, 2, port, (1,), text=NCCL_TIMED_OUT[0])[0]
    assert "rank 1 on host 0 (" in said and "does not answer within" in said
    assert "WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE" in said and "frame #0" not in said


@pytest.mark.parametrize("text", [NCCL_LOST[1], NCCL_SYSTEM])
def test_ranks_without_an_answer_after_an_nccl_failure(port: int, text: str) -> None:
    said = run_ranks(2, explained, 2, port, (1,), text=text)[0]
    assert said.startswith("NCCL has lost a connection, and rank 1 on host 0 (")
    assert "gone, cut off, or still waiting in NCCL" in said


def test_nccl_error_is_unchanged_if_all_answer(port: int) -> None:
    assert run_ranks(2, explained, 2, port, seconds=60.0, text=NCCL_LOST[0]) == 2 * ["nothing was raised"]


@pytest.mark.parametrize("text", NCCL_OURS)
def test_no_roll_call_after_an_error_of_this_rank(text: str) -> None:
    roll = RollCall(rank=0, hosts=("host 0 (a)", "host 1 (b)"), key="k", store=("127.0.0.1", 1))
    began = time.monotonic()
    roll.explain(dist.DistBackendError(text), seconds=60.0)
    assert time.monotonic() - began < 30.0
