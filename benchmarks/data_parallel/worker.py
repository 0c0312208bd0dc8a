"""One rank of data_parallel.run: trains the cases of a job and writes a JSON line per step.

    python -m benchmarks.data_parallel.worker JOB.json RESULTS      (RANK, WORLD_SIZE, MASTER_ADDR ... as torchrun sets them)

A case is a name, the settings of a run, a number of steps, and the system: megalite or one of torch's (see
peers.py). Times are of whole steps; bytes are the interface's own counters."""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import common
from benchmarks.data_parallel.links import sent_and_received
from benchmarks.live_bytes import state_bytes
from benchmarks.peers import plain_gpt
from benchmarks.steps.replica import Run
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.topology.group import ProcessGroups
from megalite.training.evaluation import Evaluator
from megalite.training.non_finite import NonFiniteError
from megalite.training.replica import Replica

SIZE = plain_gpt.Size(layers=12, hidden=512, vocab=32768, micro=1, batch=2)
"""54.8 million parameters, for a long backward that can hide the reduction."""
BUCKET = 5_500_000  # a tenth of the parameters
SETTINGS = common.settings(  # the same model for megalite
    f"num_layers={SIZE.layers} hidden_size={SIZE.hidden} num_attention_heads={SIZE.heads} vocab_size={SIZE.vocab} "
    f"seq_length={SIZE.seq} micro_batch_size={SIZE.micro} global_batch_size={SIZE.batch} ddp_bucket_size={BUCKET} "
    "mock_data=true lr=1e-4 train_iters=1000"
)

Built = tuple[nn.Module, torch.optim.Optimizer]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _replicated(bucket: int = BUCKET) -> nn.Module:
    return DistributedDataParallel(plain_gpt.GPT(SIZE), bucket_cap_mb=bucket * 4 / 2**20, gradient_as_bucket_view=True)


def _ddp(bucket: int = BUCKET) -> Built:
    model = _replicated(bucket)
    return model, _adamw(model)


def _ddp_with(state: Any, hook: Callable[..., Any], bucket: int = BUCKET) -> Built:
    model, optimizer = _ddp(bucket)
    model.register_comm_hook(state, hook)
    return model, optimizer


# Each peer imports its own modules of torch: all of them together take seconds.
def _fp16_hook() -> Built:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return _ddp_with(None, default_hooks.fp16_compress_hook)


def _powersgd() -> Built:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    # One bucket: the hook starts further collectives in callbacks, in an order that differs per rank, and gloo fails.
    return _ddp_with(state, powerSGD_hook.powerSGD_hook, bucket=1_000_000_000)


def _zero() -> Built:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _replicated()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return model, optimizer


def _fsdp2() -> Built:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain_gpt.GPT(SIZE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, _adamw(model)


PEERS: dict[str, Callable[[], Built]] = {
    "torch DDP": _ddp,
    "torch DDP, fp16 hook": _fp16_hook,
    "torch DDP, PowerSGD hook": _powersgd,
    "torch ZeroRedundancyOptimizer": _zero,
    "torch FSDP2": _fsdp2,
}


def train_peer(case: dict[str, Any], recorder: Any) -> None:
    """Train a case with one of `PEERS`."""
    torch.manual_seed(0)
    model, optimizer = PEERS[case["system"]]()
    counts = SIZE.batch // SIZE.micro // dist.get_world_size()
    recorder.begin(case)
    for step in range(1, case["steps"] + 1):
        for index in range(counts):
            tokens = torch.randint(0, SIZE.vocab, (SIZE.micro, SIZE.seq + 1))
            with plain_gpt.without_reduction(model, last=index == counts - 1):
                (model(tokens[:, :-1], tokens[:, 1:]) / counts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(step=step, phase="gradients")
    recorder.write(done=True, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class Recorder:
    """Writes time and bytes of each step of a case on this rank."""

    def __init__(self, path: Path, interface: str) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._interface = interface
        self._case: dict[str, Any] = {}

    def begin(self, case: dict[str, Any]) -> None:
        self._case = {"case": case["name"], "rank": dist.get_rank()}
        dist.barrier()
        self._sent, self._received = sent_and_received(self._interface)
        self._clock = time.perf_counter()

    def step(self, **facts: Any) -> None:
        now = time.perf_counter()
        sent, received = sent_and_received(self._interface)
        moved = {"sent": sent - self._sent, "received": received - self._received}
        self.write(seconds=now - self._clock, **moved, **facts)
        self._sent, self._received = sent_and_received(self._interface)
        self._clock = time.perf_counter()

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps({**self._case, **facts}) + "\n")
        self._file.flush()


def train_ours(case: dict[str, Any], groups: ProcessGroups, recorder: Recorder) -> None:
    """Train a case with megalite: the training loop's own parts, without its log."""
    config = validate(replace(RunConfig(), **case["settings"]), dist.get_world_size())
    run = Run(config, rank=dist.get_rank(), device=torch.device("cpu"), reuse=groups)
    replica, size = run.replica, run.batch_size
    notes: list[str] = []
    diverged: int | None = None
    if case.get("as_pushed"):  # parameters are received in the order in which gradients are sent, the last layers first
        strategy: Any = replica.strategy
        strategy._arrivals.first_needed_first = dict.fromkeys(strategy.all_buckets())
    if case.get("sleep"):
        slow_layers(replica, case["sleep"])
    recorder.begin(case)
    for _ in range(case["steps"]):
        try:
            result = run.train(run.read(size), size)
        except NonFiniteError:  # the same on every rank
            diverged = run.progress.step + 1
            break
        recorder.step(step=run.progress.step, loss=result.loss, phase=result.phase, wire=result.wire_bytes)
        if case.get("forget_errors"):
            forget_errors(replica)
        notes += [*replica.strategy.notes, *replica.optimizer.notes]
        replica.strategy.notes.clear()
        replica.optimizer.notes.clear()
    facts = {"notes": notes, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    facts |= {"state_bytes": state_bytes(replica), "diverged": diverged}
    if case.get("validate") and diverged is None:
        facts["validation_loss"] = Evaluator(replica, run.stepper, run.data.valid).loss()
    run.close()
    recorder.write(done=True, **facts)


def slow_layers(replica: Replica, seconds: float) -> None:
    """Make each layer sleep in its forward, and twice as long in its backward, as if a separate device computed."""
    for stage in replica.stages.values():
        for layer in stage.layers.values():
            layer.register_forward_hook(lambda *_: time.sleep(seconds))
            layer.register_full_backward_hook(lambda *_: time.sleep(2 * seconds))


def forget_errors(replica: Replica) -> None:
    """Turn off error feedback: rounding errors are lost."""
    for state in replica.strategy.states():
        if "error" in state.name:
            state.values.zero_()


def main() -> None:
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
