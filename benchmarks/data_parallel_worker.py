"""One rank of data_parallel.py: trains one case after the other in one job and writes a JSON line for each step.

    data_parallel_worker.py JOB.json RESULTS      (RANK, WORLD_SIZE, MASTER_ADDR ... as torchrun gives them)

A case is a name, the settings of a run, a number of steps, and the system: ours or one of torch's (see
data_parallel_peers.py). Times are of whole steps; bytes are the interface's own counters.
"""

import gc
import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_peers import PEERS, train_peer
from shaped_links import sent_and_received

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.strategy import DataParallelStrategy
from megalite.optimizers.schedules import Progress, Schedules
from megalite.planner.pipeline import layout_of
from megalite.topology.group import Work
from megalite.topology.topology import ProcessGroups, Topology
from megalite.training.evaluation import Evaluator, read_batches
from megalite.training.non_finite import NonFiniteError
from megalite.training.replica import Replica, build_replica
from megalite.training.setup import open_data
from megalite.training.step import Stepper


class Recorder:
    """Writes what each step of a case took and sent, on this rank."""

    def __init__(self, path: Path, interface: str) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._interface = interface
        self._case: dict[str, Any] = {}

    def begin(self, case: dict[str, Any]) -> None:
        """A case starts: everybody is here."""
        self._case = {"case": case["name"], "rank": dist.get_rank()}
        dist.barrier()
        self._sent, self._received = sent_and_received(self._interface)
        self._clock = time.perf_counter()

    def step(self, **facts: Any) -> None:
        """A step has ended."""
        now = time.perf_counter()
        sent, received = sent_and_received(self._interface)
        record = {
            "seconds": now - self._clock,
            "sent": sent - self._sent,
            "received": received - self._received,
        }
        self.write(**record, **facts)
        self._sent, self._received = sent_and_received(self._interface)
        self._clock = time.perf_counter()

    def write(self, **facts: Any) -> None:
        """A line of the case."""
        self._file.write(json.dumps({**self._case, **facts}) + "\n")
        self._file.flush()


def train_ours(case: dict[str, Any], groups: ProcessGroups, recorder: Recorder) -> None:
    """A case of megalite: the training loop's own parts, without its log."""
    config = validate(replace(RunConfig(), **case["settings"]), dist.get_world_size())
    device = torch.device("cpu")
    topology = Topology.create(layout_of(config), rank=dist.get_rank(), device=device, made=groups)
    replica = build_replica(config, topology)
    loaders = open_data(replica, None)
    stepper = Stepper(replica, Schedules(config))
    size = config.training.global_batch_size
    assert size is not None
    notes: list[str] = []
    diverged: int | None = None
    progress = Progress(0, 0)
    watch = ReductionWatch(replica.strategy) if case.get("trace") else None
    recorder.begin(case)
    for _ in range(case["steps"]):
        batches, _ = read_batches(
            loaders.train, progress.samples, size, topology=topology, scope=replica.strategy.scope
        )
        if loaders.train is not None:
            loaders.train.prefetch(progress.samples + size, size)
        try:
            result = stepper.step(batches, before=progress, batch_size=size)
        except NonFiniteError:  # on every rank alike
            diverged = progress.step + 1
            break
        progress = Progress(progress.step + 1, progress.samples + size)
        recorder.step(step=progress.step, loss=result.loss, phase=result.phase, wire=result.wire_bytes)
        if case.get("forget_errors"):
            forget_errors(replica)
        notes += [*replica.strategy.notes, *replica.optimizer.notes]
        replica.strategy.notes.clear()
        replica.optimizer.notes.clear()
    facts: dict[str, Any] = {
        "notes": notes,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    facts["state_bytes"] = state_bytes(replica)
    facts["diverged"] = diverged
    if case.get("validate") and diverged is None:
        facts["validation_loss"] = Evaluator(replica, stepper, loaders.valid).loss()
    replica.strategy.finish()
    replica.strategy.close()
    for loader in (loaders.train, loaders.valid, loaders.test):
        if loader is not None:
            loader.close()
    if watch is not None:
        facts["reductions"] = watch.steps
    recorder.write(done=True, **facts)


def forget_errors(replica: Replica) -> None:
    """Compression without error feedback: what rounding has left out is lost."""
    for state in replica.strategy.states():
        if "error" in state.name:
            state.values.zero_()


class ReductionWatch:
    """Notes when reductions of buckets run and how long the step waits for them."""

    def __init__(self, strategy: DataParallelStrategy) -> None:
        self.steps: list[dict[str, Any]] = []
        self._runs: list[list[float]] = []
        self._reduce, self._finish = strategy._reduce, strategy.finish_gradients
        strategy._reduce = self.reduce  # type: ignore[method-assign]
        strategy.finish_gradients = self.finish  # type: ignore[method-assign]

    def reduce(self, bucket: Bucket) -> Work:
        """The strategy's own, timed from its start to the moment at which its last byte has come."""
        run = [time.perf_counter(), math.nan]
        self._runs.append(run)
        work = self._reduce(bucket)
        under_way = getattr(work, "work", work)  # gloo's reduce-scatter ends with a sum of our own
        future = under_way.future if hasattr(under_way, "future") else under_way.get_future()

        def done(_: Any) -> None:
            run[1] = time.perf_counter()

        future.add_done_callback(done)
        return work

    def finish(self) -> None:
        """The strategy's own, timed: what is not hidden behind the backward."""
        start = time.perf_counter()
        self._finish()
        self.steps.append({"runs": self._runs, "exposed": [start, time.perf_counter()]})
        self._runs = []


def state_bytes(replica: Replica) -> int:
    """What parameters, gradients and states of optimizer and strategy take on this rank."""
    tensors = []
    for shard in replica.strategy.shards:
        tensors += [shard.bucket.data, shard.bucket.grad, shard.main_param.data]
        tensors += replica.optimizer.state(shard.main_param).values()
    tensors += [state.values for state in replica.strategy.states()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def main() -> None:
    """Run the cases of the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups: ProcessGroups = {}
    path = Path(sys.argv[2]) / f"rank{dist.get_rank()}.jsonl"
    recorder = Recorder(path, os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    for case in job["cases"]:
        if case.get("system", "megalite") == "megalite":
            train_ours(case, groups, recorder)
        else:
            assert case["system"] in PEERS
            train_peer(case, recorder)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
