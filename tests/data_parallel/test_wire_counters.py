"""Compare the byte counts of strategies with the counters of a network interface that nothing else uses."""

import ctypes
import datetime
import fcntl
import multiprocessing
import os
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Update
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology
from megalite.training.replica import Precision, build_optimizer, build_strategy
from tests.support.fork_server import fork_server

RANKS = 4
STEPS = 2  # measured, after one warm-up step
BF16 = {"wire_dtype": "bf16"}

CASES: dict[str, dict[str, Any]] = {
    "all-reduce": {"dp_strategy": "all-reduce"},
    "all-reduce-bf16": {"dp_strategy": "all-reduce", **BF16},
    "all-reduce-by-rank": {"dp_strategy": "all-reduce", "reduction_order": "rank"},
    "fused": {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 1.0},
    "fused-bf16": {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 1.0, **BF16},
    "distributed-optimizer": {"dp_strategy": "distributed-optimizer"},
    "distributed-optimizer-bf16": {"dp_strategy": "distributed-optimizer", **BF16},
    "server": {"dp_strategy": "parameter-server", "server_chunk_mb": 0.5},
    "server-bf16": {"dp_strategy": "parameter-server", "server_chunk_mb": 0.5, **BF16},
    "sharded-server": {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.25},
    "sharded-server-bf16": {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.25, **BF16},
}
"""Settings of the compared strategies, over STEPS steps."""

SHAPES = {"table": (512, 512), "up": (512, 500), "bias": (3000,), "down": (512, 256)}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's network namespaces")


class Network(torch.nn.Module):
    """A model with a few MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        factory = ParameterFactory(tp=Group.solo("tp"), seed=5, dtype=torch.float32, device=torch.device("cpu"))
        self.all = torch.nn.ParameterList(
            factory.parameter(name, shape, std=1.0, decay=len(shape) > 1) for name, shape in SHAPES.items()
        )


def measure(topology: Topology, settings: dict[str, Any]) -> tuple[float, int]:
    """Return the bytes that this rank counts, and the measured bytes of all ranks."""
    config = replace(RunConfig(), **{"ddp_bucket_size": 300_000, **settings})
    network = Network()
    strategy = build_strategy(config, {0: network}, topology, Precision.of("fp32"), Kernels())
    optimizer = build_optimizer(config, strategy, topology, Kernels())
    before = 0
    for step in range(1, STEPS + 2):
        strategy.begin_step(step)
        strategy.enable_grad_sync(0)
        for parameter in reversed(list(network.all)):
            parameter.accumulate(torch.randn(parameter.shape))
        strategy.start_grad_sync(0)
        strategy.finish_grad_sync()
        strategy.update(optimizer, Update(step=step, lr=0.01, weight_decay=0.1))
        strategy.wait_for_parameters()
        if step == 1:
            dist.barrier()
            strategy.take_wire_bytes()
            before = bytes_sent()
            dist.barrier()
    dist.barrier()
    measured = bytes_sent() - before
    dist.barrier()
    said = strategy.take_wire_bytes()
    strategy.close()
    return said, measured


def be_rank(rank: int, pipe: Connection) -> None:
    """Measure every case and send {name: (counted, measured)}, or a traceback."""
    try:
        dist.init_process_group(
            *("gloo", "tcp://127.0.0.1:29500"), rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=30)
        )
        topology = Topology.create(ParallelLayout(dp=RANKS), rank=rank, device=torch.device("cpu"))
        pipe.send({name: measure(topology, settings) for name, settings in CASES.items()})
    except Exception:
        pipe.send(traceback.format_exc())


def be_tree(pipe: Connection) -> None:
    """Start the ranks in a separate network and forward their results."""
    reason = enter()
    if reason is not None:
        pipe.send(reason)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=be_rank, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = [pipe.recv() if pipe.poll(60) else "a rank did not end" for pipe in pipes]
    pipe.send(found)
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, tuple[float, int]]]]:
    """Return, by rank, (counted, measured) of each case, from one tree of processes."""
    ours, theirs = multiprocessing.Pipe()
    tree = fork_server().Process(target=be_tree, args=(theirs,))
    tree.start()
    theirs.close()
    try:
        said = ours.recv() if ours.poll(90) else "the ranks did not end"
    finally:
        tree.kill()
        tree.join()
    if isinstance(said, str) and "namespace" in said:
        pytest.skip(said)
    assert isinstance(said, list), said
    for rank in said:
        assert isinstance(rank, dict), rank
    yield said


@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_equal_measured_bytes(found: list[dict[str, tuple[float, int]]], name: str) -> None:
    """The difference is headers and three barriers."""
    said = sum(rank[name][0] for rank in found)
    measured = found[0][name][1]
    assert said > 1e6
    assert 1.0 <= measured / said <= 1.05, (measured, said)


_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def enter() -> str | None:
    """Move this single-threaded process into a new network with `lo` up; return the reason if that failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no user namespace, and may not be allowed to create one.
    if libc.unshare(_NEW_NETWORK) != 0 and libc.unshare(_NEW_USER | _NEW_NETWORK) != 0:
        return f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack_from("16xH", fcntl.ioctl(any_socket, _GET_FLAGS, request))
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
        except OSError as error:
            return f"lo does not come up in a network namespace: {error.strerror}"
    return None


def bytes_sent() -> int:
    """Return the bytes that `lo` has sent since it came up, including headers."""
    table = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in table if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])
