"""Create the process groups of one layout (`Topology`). No other module creates process groups.

The rank lists come from `ParallelLayout`. torch's DeviceMesh cannot express the embedding groups or a second grid for
experts."""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.config.errors import ConfigError, RankError
from megalite.config.registry import imported
from megalite.topology.group import Group, ProcessGroups, host_group
from megalite.topology.layout import Coordinate, ParallelLayout, RankLists
from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat, lane_name


def schedule_as_batch() -> bool:
    """Put this process, and the threads that it starts later, under SCHED_BATCH. Return whether the policy changed.

    A thread that gloo wakes then waits until a core is free. Under the default policy it interrupts the thread that
    computes or sends, and an all-reduce takes three to four times as long (docs/kernels.md). CPU shares do not change.
    Nothing happens if the system lacks or forbids the policy, or if the user chose another one (chrt)."""
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True


_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5
_MOST_NAMED = 16  # ranks that an error message lists
_token_key, _answer_key = "megalite/word/{}".format, "megalite/answer/{}".format  # keys in the store, of a rank
_arrival_key = "megalite/{}/come/{}".format  # of a meeting and a rank


def fresh_prefix_store(
    store: dist.Store, *, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.PrefixStore:
    """Return a part of `store` with a new prefix, the same on all ranks of this start.

    The store may hold keys of earlier starts. Each rank writes a random token. Rank 0 reads all tokens, picks the name of
    a meeting, and answers each token with it; it does so again whenever a token changes. A rank joins a meeting if the
    answer repeats its token. When all ranks have joined one meeting, its name is the prefix. No call blocks, so a rank
    that times out can name the ranks that are missing.

    Raises RuntimeError: some ranks did not come in time; the message names them."""
    ranks = range(world_size)
    own_token = uuid.uuid4().hex
    store.set(_token_key(rank), own_token)
    answered: list[bytes] = []
    meeting, joined_meeting = "", ""
    end, pause = time.monotonic() + timeout.total_seconds(), _PAUSE_SECONDS
    while True:
        if rank == 0 and store.check([_token_key(other) for other in ranks]):
            tokens = store.multi_get([_token_key(other) for other in ranks])
            if tokens != answered:
                answered, name = tokens, uuid.uuid4().hex
                # One request: with thousands of ranks, a request for each would take too long.
                answers = [f"{token.decode()} {name}" for token in tokens]
                store.multi_set([_answer_key(other) for other in ranks], answers)  # type: ignore[attr-defined]
        if store.check([_answer_key(rank)]):
            token, meeting = store.get(_answer_key(rank)).decode().split()
            if token == own_token:
                if joined_meeting != meeting:
                    store.set(_arrival_key(meeting, rank), own_token)
                if store.add(f"megalite/{meeting}/come", int(joined_meeting != meeting)) == world_size:
                    return dist.PrefixStore(f"megalite/{meeting}", store)
                joined_meeting = meeting
        if time.monotonic() > end:
            missing = _missing_ranks(store, joined_meeting, ranks)
            names = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
            raise RuntimeError(
                f"{'ranks' if len(missing) > 1 else 'rank'} {names} of {world_size} did not come within "
                f"{timeout.total_seconds():g} s (distributed_timeout_minutes); see their last output"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


def _missing_ranks(store: dist.Store, meeting: str, ranks: range) -> list[int]:
    """Return the ranks that have not come. `meeting`: the one that this rank joined, or empty."""
    silent = [rank for rank in ranks if not store.check([_token_key(rank)])]
    if silent or not meeting:
        return silent or [0]  # all tokens exist, some perhaps of an earlier start: a live rank 0 would have answered
    return [rank for rank in ranks if not store.check([_arrival_key(meeting, rank)])]


PRIVATE_KINDS = ("cp", "ep")
CONTEXT_KINDS = ("cp", "cp-heads", "cp-keys")
"""Kinds that share no process group with another kind over the same ranks: in the last backward, the exchanges of
layers would queue behind the gradient reductions that overlap it."""

GRADIENT_KINDS = ("dp-cp", "expert-dp", *ParallelLayout.INSTANCE_KINDS)
"""Kinds over which gradients are summed and parameters gathered. They share process groups only with one another. On
NCCL, a small collective queued behind them would wait for them. On gloo, a background thread runs some of them, in no
fixed order relative to the collectives of layers (expert-dp can have the ranks of tp)."""

GATHERED_KINDS = ("dp-cp", "expert-dp")
"""Kinds over which parameters are sharded. A gather must not wait for the reductions started before it."""

_SHARED_MEMORY_GROUPS = ("tp", "expert_tp")
"""Groups that layers wait for, all from one thread; groups with the same ranks share a process group too."""


def communicator_of(kind: str) -> str:
    """Return the key by which groups with the same ranks share a process group."""
    if kind in CONTEXT_KINDS:
        return "cp"
    return kind if kind in PRIVATE_KINDS else "gradients" if kind in GRADIENT_KINDS else "shared"


def group_sources(layout: ParallelLayout, *, separate_gathers: bool) -> dict[str, tuple[str, str]]:
    """Return group of a `Topology` -> (kind of its rank lists, communicator), for all but `host` and the edges."""
    found = {kind: (kind, communicator_of(kind)) for kind in layout.kinds} | {"dp-cp-scalars": ("dp-cp", "shared")}
    if separate_gathers:
        found |= {f"{kind}-gathers": (layout.inside(kind), "gathers") for kind in GATHERED_KINDS}
    return {name.replace("-", "_"): source for name, source in found.items()}


_RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPED = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables of torch's flight recorder: number of operations to keep, file to write; each with its older name."""
_ENTRIES = "2000"

_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which srun and mpirun report how many processes they started."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher reports about this process."""

    rank: int
    world_size: int
    local_rank: int
    error_file: str | None = None  # the file from which torchrun reads the error of this rank
    flight_recorder: bool = False  # torch records its collectives
    host: int = 0  # index of this process's host
    store: tuple[str, int] | None = None  # address and port of the rendezvous store
    store_is_launchers: bool = False  # the launcher hosts the store, across restarts too; else rank 0 does

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read torchrun's variables; without them, return a launch of one process.

        Raises ConfigError: a variable is not a number; or none is set and srun or mpirun started several processes."""
        env = os.environ
        several = next((name for name in _TASKS if env.get(name, "1") not in ("", "1")), None)
        if several is not None and "WORLD_SIZE" not in env:
            raise ConfigError(
                f"{several} is {env[several]}: that many processes of this command were started, and each would be a run of "
                "one rank; have srun or mpirun start torchrun once on each host, or set WORLD_SIZE=1 if each is a separate run"
            )
        try:
            address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
            made = cls(
                rank=int(env.get("RANK", 0)),
                world_size=int(env.get("WORLD_SIZE", 1)),
                local_rank=int(env.get("LOCAL_RANK", 0)),
                error_file=env.get("TORCHELASTIC_ERROR_FILE"),
                flight_recorder=any(env.get(name, "0") != "0" for name in _RECORDED),
                host=int(env.get("GROUP_RANK", 0)),
                store=None if address is None or port is None else (address, int(port)),
                store_is_launchers=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK and MASTER_PORT must be integers ({error}); use torchrun"
            ) from None
        if made.world_size > 1 and (made.store is None or not 0 <= made.rank < made.world_size):
            raise RankError(
                f"WORLD_SIZE is {made.world_size}, with RANK {made.rank}, MASTER_ADDR {address} and MASTER_PORT {port}; start "
                f"each process with its own RANK, 0 to {made.world_size - 1}, and all with one address and port, or use torchrun"
            )
        return made

    def recorded(self, backend: str, device: torch.device, run_dir: str | None) -> "Launch":
        """Return this launch with torch's flight recorder enabled if the backend is NCCL.

        Call it before the first process group is created. When a collective times out, torch writes `flight-rank-N` to the
        run folder. Variables that the user has set are kept."""
        if self.world_size == 1 or ("nccl" if backend == "auto" and device.type == "cuda" else backend) != "nccl":
            return self
        wanted: list[tuple[tuple[str, ...], str]] = [(_RECORDED, _ENTRIES), (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")]
        if run_dir is not None:
            wanted.append((_DUMPED, str(Path(run_dir).absolute() / "flight-rank-")))
        for names, value in wanted:
            if not any(name in os.environ for name in names):
                os.environ[names[0]] = value
        return dataclasses.replace(self, flight_recorder=any(os.environ.get(name, "0") != "0" for name in _RECORDED))

    def device(self, name: str) -> torch.device:
        """Return the device for `auto`, `cpu` or `cuda`; on cuda, the device of this local rank."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu":
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            fewer = f"start at most {count} processes on it (--nproc-per-node {count}) or " if count else ""
            raise RankError(
                f"local rank {self.local_rank} has no CUDA device: this host has {count}; {fewer}use --device cpu"
            )
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device


def fix_cublas_workspace() -> None:
    """Make cuBLAS add in one order in every run, as deterministic algorithms require. Call it before the first matmul.
    A value that the user has set is kept; torch raises an error if it does not suffice."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """The position of this rank in the layout and the groups that it belongs to.

    - `dp_cp_scalars`: the ranks of `dp_cp`, for small values that are needed while parameters are gathered over `dp_cp`.
    - `host`: all ranks, for CPU tensors, so that the host does not wait for the device.
    - `cp_heads`, `cp_keys`: the ranks of cp that exchange heads, and those that exchange keys and values.
    - `model`: the ranks of tp and pp, one replica of the network. `tp_dp_cp`: all ranks with this pipeline rank.
    - `embedding`: None if this rank is neither first nor last in its pipeline.
    - `edges`: (sender, receiver), as pipeline ranks -> the group of the pair, in which the sender has index 0.
    - The groups of `ParallelLayout.INSTANCE_KINDS` exist if there are several instances, the `gathers` groups with
      `separate_gathers`."""

    layout: ParallelLayout
    rank: int
    coordinate: Coordinate
    device: torch.device
    world: Group
    host: Group
    tp: Group
    cp: Group
    cp_heads: Group
    cp_keys: Group
    dp: Group
    pp: Group
    dp_cp: Group
    dp_cp_scalars: Group
    model: Group
    tp_cp: Group
    tp_dp_cp: Group
    ep: Group
    expert_tp: Group
    expert_dp: Group
    embedding: Group | None
    edges: dict[tuple[int, int], Group]
    intra_dp_cp: Group | None = None
    inter_dp_cp: Group | None = None
    intra_expert_dp: Group | None = None
    inter_expert_dp: Group | None = None
    dp_cp_gathers: Group | None = None
    expert_dp_gathers: Group | None = None

    @classmethod
    def create(
        cls,
        layout: ParallelLayout,
        *,
        rank: int,
        device: torch.device,
        backend: str = "auto",
        timeout_minutes: float = 10.0,
        reuse: ProcessGroups | None = None,
        heartbeat: Heartbeat = UNWATCHED,
        group_type: type[Group] = Group,
        shared_memory: bool = True,
        separate_gathers: bool = False,
        max_ctas: Mapping[str, int] | None = None,
    ) -> "Topology":
        """Create the groups of `rank`. Every rank of the layout calls this at the same time.

        torch names process groups by a counter, so every rank creates all of them in the same order (a group without this
        rank costs microseconds). Groups over the same ranks share a process group if the program orders their collectives.
        Pipeline edges, `PRIVATE_KINDS` and `GRADIENT_KINDS` have separate ones.

        Args:
            reuse: process groups to reuse and extend, for programs that use many layouts of one world.
            heartbeat: records the operations of every group.
            group_type: `SanitizedGroup` detects wrong use of asynchronous operations.
            shared_memory: on gloo, tensor-parallel ranks of one host communicate through shared memory.
            separate_gathers, max_ctas: on NCCL, a separate communicator to gather parameters; `ParallelConfig.max_ctas`.
        """
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if reuse is None:
            reuse = {}
            if dist.is_initialized() and (dist.get_world_size(), dist.get_backend()) == (layout.world_size, backend):
                # Another communicator of all ranks would be the most expensive one to create.
                reuse["shared", layout.groups("world")[0]] = dist.group.WORLD
        timeout = datetime.timedelta(minutes=timeout_minutes)
        new_group = functools.partial(dist.new_group, timeout=timeout, backend=backend)

        def group(kind: str, rank_lists: RankLists, communicator: str) -> Group | None:
            own = None
            for ranks in rank_lists:
                key = (communicator, ranks)
                if len(ranks) > 1 and key not in reuse:
                    options = _options(backend, communicator, kind, max_ctas or {})
                    text = lane_name(communicator, ranks)  # the flight recorder reports it
                    reuse[key] = new_group(list(ranks), pg_options=options, group_desc=text)
                if rank in ranks:
                    process_group = reuse[key] if len(ranks) > 1 else None
                    own = group_type(kind, ranks, ranks.index(rank), process_group, heartbeat, device=device)
            return own

        sources = group_sources(layout, separate_gathers=separate_gathers and backend == "nccl")
        groups = {name: group(kind, layout.groups(kind), queue) for name, (kind, queue) in sources.items()}
        world, pipeline = groups["world"], groups["pp"]
        assert world is not None and pipeline is not None
        edges = {}
        for pair in layout.pipeline_edges():
            edge = group(kind := f"pp edge {pair[0]}->{pair[1]}", (pair,), kind)
            if edge is not None:
                edges[pipeline.ranks.index(pair[0]), pipeline.ranks.index(pair[1])] = edge
        if shared_memory and backend == "gloo":
            _share_memory(groups, reuse, timeout)
        if backend == "nccl":
            _connect(edges, device)
        return cls(
            layout=layout,
            rank=rank,
            coordinate=layout.coordinate(rank),
            device=device,
            host=host_group(world, "host", timeout=timeout, reuse=reuse) if backend == "nccl" else world,
            edges=edges,
            **groups,  # type: ignore[arg-type]
        )

    @classmethod
    def solo(cls, device: torch.device | None = None) -> "Topology":
        """Return the topology of one process, without process groups."""
        return cls.create(ParallelLayout(), rank=0, device=device or torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class ServerGroups:
    """gloo groups of an asynchronous parameter server; each is used by one thread. Servers are the ranks with dp rank 0."""

    pairs: tuple[Group, ...]
    """Groups (server, worker): on a server one for each other worker, in the order of dp ranks; on a worker one."""
    servers: Group | None  # on a server: the servers of all (tp, pp) coordinates


def server_groups(topology: Topology, *, timeout_minutes: float) -> ServerGroups:
    """Create the groups of an asynchronous parameter server. `timeout_minutes`: for workers. A server has no practical
    limit, as a worker may compute or write a checkpoint for long; if the worker dies, the wait ends at once.

    Collectives: creates process groups; every rank calls it at the same time."""
    unlimited, rank, heartbeat = datetime.timedelta(days=1), topology.rank, topology.world.heartbeat
    pairs: list[Group] = []
    for server, *workers in topology.layout.groups("dp"):
        for worker in workers:
            timeout = datetime.timedelta(minutes=timeout_minutes) if rank == worker else unlimited
            made = dist.new_group([server, worker], timeout=timeout, backend="gloo")
            if rank in (server, worker):
                pairs.append(Group("server", (server, worker), int(rank == worker), made, heartbeat))
    ranks = tuple(group[0] for group in topology.layout.groups("dp"))
    made = dist.new_group(list(ranks), timeout=unlimited, backend="gloo") if len(ranks) > 1 else None
    servers = Group("servers", ranks, ranks.index(rank), made, heartbeat) if rank in ranks else None
    return ServerGroups(pairs=tuple(pairs), servers=servers)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ConfigError if the backend does not fit the device: nccl needs CUDA, and gloo cannot send CUDA tensors."""
    fits = {"cpu": "gloo", "cuda": "nccl"}[device.type]
    if backend not in ("auto", fits):
        raise ConfigError(f"distributed_backend is {backend} but the run is on {device.type}; use {fits} or auto")


def start_distributed(
    launch: Launch, device: torch.device, *, backend: str = "auto", timeout_minutes: float = 10.0
) -> None:
    """Join the job that torchrun started; return at once for one process. Ranks on CPUs run under SCHED_BATCH."""
    if launch.world_size == 1:
        return
    if device.type == "cpu":
        schedule_as_batch()  # before gloo starts threads, which inherit it
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=timeout_minutes)
    # No device_id: with it, every rank would take part in the creation of every NCCL communicator.
    options = _options(backend, "shared", "world", {})
    rank, world_size = launch.rank, launch.world_size
    store = fresh_prefix_store(_store_of(launch, timeout), rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size, pg_options=options)


def run_on_rank_0(work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and return its result, plain JSON, on every rank, before the ranks join the job. If the
    launcher hosts no store, rank 0 hosts it from now on. Raises ConfigError: `work` raised it on rank 0."""
    launch, timeout = Launch.from_environment(), datetime.timedelta(minutes=10)
    if launch.world_size == 1:
        return work()
    # A prefix that `start_distributed` does not use.
    separate = dist.PrefixStore("megalite-before", _store_of(launch, timeout))
    store = fresh_prefix_store(separate, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    answer: dict[str, Any] = {}
    if launch.rank == 0:
        try:
            answer["found"] = work()
        except ConfigError as error:
            answer["problems"] = error.problems
        store.set("answer", json.dumps(answer))
    answer = json.loads(store.get("answer"))
    store.set(f"read {launch.rank}", "")
    if launch.rank == 0:  # rank 0 may host the store, and may exit with an error
        store.wait([f"read {rank}" for rank in range(launch.world_size)])
    if "problems" in answer:
        raise ConfigError(*answer["problems"])
    return answer["found"]


@functools.cache
def _store_of(launch: Launch, timeout: datetime.timedelta) -> dist.TCPStore:
    """Connect to the rendezvous store, or host it on rank 0 if the launcher does not; until the end of this process."""
    assert launch.store is not None
    hosts = launch.rank == 0 and not launch.store_is_launchers
    try:
        return dist.TCPStore(*launch.store, is_master=hosts, wait_for_workers=False, timeout=timeout, multi_tenant=True)
    except dist.DistError as error:
        where, why = "{}:{}".format(*launch.store), str(error).strip().partition(chr(10))[0]
        raise RankError(
            f"rank {launch.rank} cannot {'host the store' if hosts else 'reach the store of rank 0'} at {where} (MASTER_ADDR, "
            f"MASTER_PORT): {why}; check that all ranks have started and that no other program uses the port"
        ) from None


def _options(backend: str, communicator: str, kind: str, max_ctas: Mapping[str, int]) -> Any:
    """Return the options of an NCCL process group. All groups but those of gradients get a high-priority stream: their
    kernels start before queued compute kernels, which other frameworks achieve by CUDA_DEVICE_MAX_CONNECTIONS=1."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=communicator != "gradients")
    name = {"gradients": "dp", "gathers": "dp", "shared": kind}.get(communicator, communicator.split()[0])
    if name in max_ctas:
        options.config.max_ctas = max_ctas[name]
    return options


def _share_memory(groups: dict[str, Group | None], reuse: ProcessGroups, timeout: datetime.timedelta) -> None:
    """Make the groups of `_SHARED_MEMORY_GROUPS` use shared memory, one segment per list of ranks."""
    for name in _SHARED_MEMORY_GROUPS:
        if (group := groups[name]) is not None and group.size > 1:
            if (key := ("memory", group.ranks)) not in reuse:
                memory = imported("megalite.topology.shared_memory:SharedMemory")
                reuse[key] = memory.open(group, timeout=timeout.total_seconds())
            groups[name] = dataclasses.replace(group, memory=reuse[key])


def _connect(edges: dict[tuple[int, int], Group], device: torch.device) -> None:
    """Send one number over every edge: NCCL connects an edge at its first message and blocks until the other end does the
    same, which could deadlock in the middle of a pipeline program. All ranks use the same order. Edges with an even lower
    pipeline rank come first, so that the edges do not wait for one another in a chain."""
    number = torch.zeros(1, device=device)
    for _, edge in sorted(edges.items(), key=lambda item: (min(item[0]) % 2, item[0])):
        if edge.rank == 0:
            edge.send_async(number, to=1).wait()
        else:
            edge.receive_async(number, source=0).wait()


def stop_distributed(*, agreed: bool = True) -> None:
    """Leave the job. `agreed`: every rank calls this now. Otherwise the peers may be in a collective that this rank never
    joins: NCCL would wait for them, and the error of this rank would not be printed before the timeout."""
    if dist.is_initialized() and (agreed or dist.get_backend() != "nccl"):
        dist.destroy_process_group()


@contextlib.contextmanager
def joined(launch: Launch, device: torch.device) -> Iterator[None]:
    """Join the ranks of the launch into one job inside the block. If all ranks raise the same error, all leave in order."""
    agreed = False
    try:
        start_distributed(launch, device, backend="auto", timeout_minutes=10.0)
        yield
        agreed = True
    except ConfigError as error:
        agreed = not isinstance(error, RankError)
        raise
    finally:
        stop_distributed(agreed=agreed)
