"""`Topology`: the process groups of one layout, made once and passed down. The only place that makes any.

torch's DeviceMesh is not underneath: it cannot express the embedding groups or a second grid for experts. The rank
lists of `ParallelLayout` are the single source instead.
"""

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
    """Put this process, and threads that it starts from now on, under SCHED_BATCH; True where that was done.

    A thread that gloo wakes then waits until the core is free; else it interrupts the one that computes or sends, and an
    all-reduce takes three to four times as long (docs/kernels.md). Shares of the cores stay as they are.

    Left alone: systems without the policy, those that forbid it, and a policy that somebody chose (chrt).
    """
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True


_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5
_NAMED = 16  # ranks that a message names
_word, _answer, _seat = "megalite/word/{}".format, "megalite/answer/{}".format, "megalite/{}/come/{}".format
"""Of a rank, or of a meeting and a rank, the key in the store."""


def fresh_prefix_store(
    store: dist.Store, *, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.PrefixStore:
    """A part of `store` that is new and the same on all ranks of this start.

    Each rank says a word that it has made up. Rank 0 answers all words that it finds with the name of a meeting, once more
    whenever one of them has changed: some are of former ranks. A rank goes to a meeting if the answer has its own word in
    it, and a meeting to which all have come is this start's. Nothing here blocks, so that a rank that has waited too long
    can say for whom.

    Raises RuntimeError: not all ranks have come in time; names those that have not."""
    ranks = range(world_size)
    mine = uuid.uuid4().hex
    store.set(_word(rank), mine)
    answered: list[bytes] = []
    meeting, gone_to = "", ""
    end, pause = time.monotonic() + timeout.total_seconds(), _PAUSE_SECONDS
    while True:
        if rank == 0 and store.check([_word(other) for other in ranks]):
            said = store.multi_get([_word(other) for other in ranks])
            if said != answered:
                answered, name = said, uuid.uuid4().hex
                # As one request: thousands would follow one another.
                answers = [f"{heard.decode()} {name}" for heard in said]
                store.multi_set([_answer(other) for other in ranks], answers)  # type: ignore[attr-defined]
        if store.check([_answer(rank)]):
            word, meeting = store.get(_answer(rank)).decode().split()
            if word == mine:
                if gone_to != meeting:
                    store.set(_seat(meeting, rank), mine)
                if store.add(f"megalite/{meeting}/come", int(gone_to != meeting)) == world_size:
                    return dist.PrefixStore(f"megalite/{meeting}", store)
                gone_to = meeting
        if time.monotonic() > end:
            missing = _who_is_missing(store, gone_to, ranks)
            names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
            raise RuntimeError(
                f"{'ranks' if len(missing) > 1 else 'rank'} {names} of {world_size} did not come within "
                f"{timeout.total_seconds():g} s (distributed_timeout_minutes); see what was printed there last"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


def _who_is_missing(store: dist.Store, meeting: str, ranks: range) -> list[int]:
    """The ranks that have not come, as a rank sees it that has gone to `meeting`, or to none."""
    silent = [rank for rank in ranks if not store.check([_word(rank)])]
    if silent or not meeting:
        return silent or [0]  # all words are there, some perhaps of former ranks: rank 0 would have answered them
    return [rank for rank in ranks if not store.check([_seat(meeting, rank)])]


PRIVATE_KINDS = ("cp", "ep")
CONTEXT_KINDS = ("cp", "cp-heads", "cp-keys")
"""Kinds that share no process group with another kind over the same ranks: what layers exchange in the last backward
would queue behind the gradient reductions that run under it."""

GRADIENT_KINDS = ("dp-cp", "expert-dp", *ParallelLayout.INSTANCE_KINDS)
"""Kinds that gradients are summed and parameters gathered over; they share process groups with one another alone. On NCCL
to wait for a number behind them would be to wait for them; on gloo a thread beside the program's exchanges some of them,
in no fixed order with what layers exchange (expert-dp can have tp's ranks)."""

GATHERED = ("dp-cp", "expert-dp")
"""Kinds that parameters are sharded over. To wait for a gather must not be to wait for the reductions started before it."""

_KINDS_IN_MEMORY = ("tp", "expert-tp")
"""Kinds that layers wait for, and that one program orders; over the same ranks they share a process group too."""


def communicator_of(kind: str) -> str:
    """Groups of equal ranks share a process group where this is equal."""
    if kind in CONTEXT_KINDS:
        return "cp"
    return kind if kind in PRIVATE_KINDS else "gradients" if kind in GRADIENT_KINDS else "shared"


_RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPED = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables of torch's flight recorder: how many operations it keeps, where it writes them. The second name is the former."""
_ENTRIES = "2000"

_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where srun and mpirun say how many processes they have started."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher says of this process."""

    rank: int
    world_size: int
    local_rank: int
    error_file: str | None = None  # where torchrun looks for what ended this rank
    flight_recorder: bool = False  # torch notes its collectives
    host: int = 0  # number of this process's host
    store: tuple[str, int] | None = None  # address and port where the ranks meet
    store_is_launchers: bool = False  # the launcher keeps the store, over restarts too; else rank 0 does

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read torchrun's variables; one process where there are none.

        Raises ConfigError: they are no numbers; or there are none, and srun or mpirun has started several processes."""
        env = os.environ
        several = next((name for name in _TASKS if env.get(name, "1") not in ("", "1")), None)
        if several is not None and "WORLD_SIZE" not in env:
            raise ConfigError(
                f"{several} is {env[several]}: so many processes of this command were started, and each would be a run of one "
                "rank; have srun or mpirun start torchrun once on each host, or set WORLD_SIZE=1 if each is a separate run"
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
        """The same with torch's flight recorder on where NCCL communicates; before the first process group.

        Its files, where a collective times out, are `flight-rank-N` in the run's folder. What the user has set stays.
        """
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
        """The device for `auto`, `cpu` or `cuda`; on cuda, the one of this local rank."""
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
    """Have cuBLAS add in one order in every run, which deterministic algorithms need; before the first product of matrices.

    What the user has set stays; torch says if it will not do.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """Where this rank stands and the groups it is in.

    `dp_cp_scalars` has the ranks of `dp_cp`, for numbers that are waited for while parameters are gathered there. `host` is
    all ranks, for tensors of the CPU: what the host alone needs to know makes it wait for no device.
    `cp_heads` are the ranks of cp that exchange heads, `cp_keys` those that exchange keys and values.
    `model` spans tp and pp (one replica of the network), `tp_dp_cp` all ranks at one place of the pipelines;
    `embedding` is None where this rank is neither first nor last in its pipeline. `edges` maps (sender, receiver), as
    pipeline ranks, to the pair's own group, in which the sender has index 0. Those of `ParallelLayout.INSTANCE_KINDS` are
    there where there are several instances, and those of gathers, of the ranks that share parameters, with `gathers_apart`.
    """

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
        made: ProcessGroups | None = None,
        heartbeat: Heartbeat = UNWATCHED,
        group_type: type[Group] = Group,
        shared_memory: bool = True,
        gathers_apart: bool = False,
        max_ctas: Mapping[str, int] | None = None,
    ) -> "Topology":
        """Make the groups that `rank` is in. Every rank of the layout calls this at the same time.

        As torch names process groups by a counter, every rank makes all of them in one order (those that it is not in cost
        microseconds). Groups over the same ranks share a process group where the program orders their collectives; pipeline
        edges have their own, and so have `PRIVATE_KINDS` and `GRADIENT_KINDS`.

        Args:
            made: process groups to re-use and add to, for programs that go through many layouts of one world.
            heartbeat: gets every group's operations.
            group_type: `SanitizedGroup` finds wrong use of asynchronous operations.
            shared_memory: on gloo, tensor-parallel ranks of one host communicate through it.
            gathers_apart, max_ctas: on NCCL, a further communicator for parameters; `ParallelConfig.max_ctas`.
        """
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if made is None:
            made = {}
            if dist.is_initialized() and (dist.get_world_size(), dist.get_backend()) == (layout.world_size, backend):
                # A further communicator of all ranks is the most expensive one to make.
                made["shared", layout.groups("world")[0]] = dist.group.WORLD
        timeout = datetime.timedelta(minutes=timeout_minutes)
        common: dict[str, Any] = {"timeout": timeout, "backend": backend}

        def group(kind: str, rank_lists: RankLists, communicator: str) -> Group | None:
            mine = None
            for ranks in rank_lists:
                key = (communicator, ranks)
                if len(ranks) > 1 and key not in made:
                    chosen = {"pg_options": _options(backend, communicator, kind, max_ctas or {}), **common}
                    words = lane_name(communicator, ranks)  # as the flight recorder calls it
                    made[key] = dist.new_group(list(ranks), group_desc=words, **chosen)
                if rank in ranks:
                    process_group = made[key] if len(ranks) > 1 else None
                    mine = group_type(kind, ranks, ranks.index(rank), process_group, heartbeat, device=device)
            return mine

        groups = {kind: group(kind, layout.groups(kind), communicator_of(kind)) for kind in layout.kinds}
        groups["dp-cp-scalars"] = group("dp-cp", layout.groups("dp-cp"), "shared")
        for kind in GATHERED if gathers_apart and backend == "nccl" else ():
            groups[f"{kind}-gathers"] = group(kind, layout.groups(layout.inside(kind)), "gathers")
        pipeline = groups["pp"].ranks if groups["pp"] else ()
        edges = {}
        for pair in layout.pipeline_edges():
            edge = group(kind := f"pp edge {pair[0]}->{pair[1]}", (pair,), kind)
            if edge is not None:
                edges[pipeline.index(pair[0]), pipeline.index(pair[1])] = edge
        world = groups["world"]
        assert world is not None
        if shared_memory and backend == "gloo":
            _share_memory(groups, made, timeout)
        if backend == "nccl":
            _connect(edges, device)
        return cls(
            layout=layout,
            rank=rank,
            coordinate=layout.coordinate(rank),
            device=device,
            host=host_group(world, "host", timeout=timeout, made=made) if backend == "nccl" else world,
            edges=edges,
            **{kind.replace("-", "_"): value for kind, value in groups.items()},  # type: ignore[arg-type]
        )

    @classmethod
    def solo(cls, device: torch.device | None = None) -> "Topology":
        """One process, no process groups."""
        return cls.create(ParallelLayout(), rank=0, device=device or torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class ServerGroups:
    """gloo groups of an asynchronous parameter server, on dp rank 0 of each (tp, pp) coordinate; each for one thread."""

    pairs: tuple[Group, ...]
    """Server and worker, in this order: on a server one for each other worker, by dp rank; on a worker its own."""
    servers: Group | None  # on a server: those of all coordinates


def server_groups(topology: Topology, *, timeout_minutes: float) -> ServerGroups:
    """Make the groups of an asynchronous parameter server. `timeout_minutes`: for workers. A server waits for as long
    as a worker may compute or a disk take; one that dies ends the wait at once.

    Collectives: makes process groups; every rank calls it at the same time."""
    patient, rank, heartbeat = datetime.timedelta(days=1), topology.rank, topology.world.heartbeat
    pairs: list[Group] = []
    for server, *workers in topology.layout.groups("dp"):
        for worker in workers:
            timeout = datetime.timedelta(minutes=timeout_minutes) if rank == worker else patient
            made = dist.new_group([server, worker], timeout=timeout, backend="gloo")
            if rank in (server, worker):
                pairs.append(Group("server", (server, worker), int(rank == worker), made, heartbeat))
    ranks = tuple(group[0] for group in topology.layout.groups("dp"))
    made = dist.new_group(list(ranks), timeout=patient, backend="gloo") if len(ranks) > 1 else None
    servers = Group("servers", ranks, ranks.index(rank), made, heartbeat) if rank in ranks else None
    return ServerGroups(pairs=tuple(pairs), servers=servers)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise a ConfigError where they do not fit: nccl needs CUDA devices, and gloo exchanges no CUDA tensors between two ranks."""
    fits = {"cpu": "gloo", "cuda": "nccl"}[device.type]
    if backend not in ("auto", fits):
        raise ConfigError(f"distributed_backend is {backend} but the run is on {device.type}; use {fits} or auto")


def start_distributed(
    launch: Launch, device: torch.device, *, backend: str = "auto", timeout_minutes: float = 10.0
) -> None:
    """Join the job that torchrun started; nothing to do for one process. Ranks on CPUs are scheduled as batch jobs."""
    if launch.world_size == 1:
        return
    if device.type == "cpu":
        schedule_as_batch()  # before gloo starts threads, which inherit it
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=timeout_minutes)
    # No device_id: it would make every rank take part in the creation of every NCCL communicator.
    options = _options(backend, "shared", "world", {})
    rank, world_size = launch.rank, launch.world_size
    store = fresh_prefix_store(_store_of(launch, timeout), rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size, pg_options=options)


def of_rank_0(work: Callable[[], Any]) -> Any:
    """What `work` gives on rank 0, plain JSON, on every rank of the launch, before they join. Raises ConfigError: it does
    there. Where the launcher keeps no store, rank 0 keeps it from here on."""
    launch, timeout = Launch.from_environment(), datetime.timedelta(minutes=10)
    if launch.world_size == 1:
        return work()
    apart = dist.PrefixStore("megalite-before", _store_of(launch, timeout))  # of where they join
    store = fresh_prefix_store(apart, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    answer: dict[str, Any] = {}
    if launch.rank == 0:
        try:
            answer["found"] = work()
        except ConfigError as error:
            answer["problems"] = error.problems
        store.set("answer", json.dumps(answer))
    answer = json.loads(store.get("answer"))
    store.set(f"read {launch.rank}", "")
    if launch.rank == 0:  # it may keep the store, and may end by an error
        store.wait([f"read {rank}" for rank in range(launch.world_size)])
    if "problems" in answer:
        raise ConfigError(*answer["problems"])
    return answer["found"]


@functools.cache
def _store_of(launch: Launch, timeout: datetime.timedelta) -> dist.TCPStore:
    """Up to the end of this process: rank 0 keeps it where the launcher does not."""
    assert launch.store is not None
    keeps = launch.rank == 0 and not launch.store_is_launchers
    try:
        return dist.TCPStore(*launch.store, is_master=keeps, wait_for_workers=False, timeout=timeout, multi_tenant=True)
    except dist.DistError as error:
        where, why = "{}:{}".format(*launch.store), str(error).strip().partition(chr(10))[0]
        raise RankError(
            f"rank {launch.rank} cannot {'keep the store' if keeps else 'reach the store of rank 0'} at {where} (MASTER_ADDR, "
            f"MASTER_PORT): {why}; see that all ranks have started and that no other program has the port"
        ) from None


def _options(backend: str, communicator: str, kind: str, max_ctas: Mapping[str, int]) -> Any:
    """On NCCL the kernels of groups that the program waits for come before those that wait for a free multiprocessor, as
    CUDA_DEVICE_MAX_CONNECTIONS=1 gives in other frameworks. Gradients have a whole backward."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=communicator != "gradients")
    name = {"gradients": "dp", "gathers": "dp", "shared": kind}.get(communicator, communicator.split()[0])
    if name in max_ctas:
        options.config.max_ctas = max_ctas[name]
    return options


def _share_memory(groups: dict[str, Group | None], made: ProcessGroups, timeout: datetime.timedelta) -> None:
    """Let the groups of `_KINDS_IN_MEMORY` communicate through memory, those of equal ranks through the same."""
    for kind in _KINDS_IN_MEMORY:
        if (some := groups[kind]) is not None and some.size > 1:
            if (key := ("memory", some.ranks)) not in made:
                memory = imported("megalite.topology.shared_memory:SharedMemory")
                made[key] = memory.open(some, timeout=timeout.total_seconds())
            groups[kind] = dataclasses.replace(some, memory=made[key])


def _connect(edges: dict[tuple[int, int], Group], device: torch.device) -> None:
    """Send one number over every edge.

    NCCL connects an edge at its first message, and holds the caller until the other end comes there: in the midst of a program
    the two could deadlock. The order is the same on all ranks, and no chain: every second place of the pipeline is first.
    """
    number = torch.zeros(1, device=device)
    for _, edge in sorted(edges.items(), key=lambda item: (min(item[0]) % 2, item[0])):
        if edge.rank == 0:
            edge.send_async(number, to=1).wait()
        else:
            edge.receive_async(number, source=0).wait()


def stop_distributed(*, agreed: bool = True) -> None:
    """Leave the job. `agreed`: every rank comes here now. Else the peers may be in a collective that this rank will
    never join; NCCL would wait for them, and the error that led here would not be printed before the timeout."""
    if dist.is_initialized() and (agreed or dist.get_backend() != "nccl"):
        dist.destroy_process_group()


@contextlib.contextmanager
def joined(launch: Launch, device: torch.device) -> Iterator[None]:
    """Inside, the ranks of the launch are one job of a tool. An error that all of them raise lets them leave in order."""
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
