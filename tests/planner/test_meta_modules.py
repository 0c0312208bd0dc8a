"""Memory of single ranks of large layouts by `--dry-run --rank`, compared with real modules, buckets and optimizers.

They are built on the meta device with groups without communication: nothing is allocated or sent, and every shape and size
is that of training on that many ranks."""

from collections.abc import Iterable

import pytest
import torch

from megalite.cli.dry_run import rank_report
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.pipeline import layout_of
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology
from megalite.training.replica import Programs, Replica, build_replica

TRILLION = "--preset gpt-1t --tp 8 --pp 64 --global-batch-size 192"
MOE = "--preset mixtral-8x7b --vocab-size 32001 --bf16 --global-batch-size 4096"
ZERO_1 = "--dp-strategy distributed-optimizer"
CASES = {
    "zero-1, cp, chunks": (3072, f"{TRILLION} --bf16 --vpp 2 --cp 2 --sequence-parallel {ZERO_1}"),
    "zero-2": (3072, f"{TRILLION} --bf16 {ZERO_1} --shard-gradients"),
    "moments in bf16": (3072, f"{TRILLION} --bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --stochastic-rounding"),
    "parameter server": (3072, f"{TRILLION} --fp32 --dp-strategy parameter-server"),
    "tied ends on one rank": (3072, f"{TRILLION} --fp32 --pipeline-schedule zb-v --vpp 2 --optimizer sgd"),
    "zero-3": (3072, "--preset gpt3-175b --tp 8 --global-batch-size 384 --bf16 --dp-strategy fully-sharded"),
    "experts over ep": (4096, f"{MOE} --tp 4 --etp 1 --ep 8 --cp 2 --pp 8 --vpp 4 --sequence-parallel {ZERO_1}"),
    "sinks, and biases of experts over their own tp": (
        4096,
        "--preset gpt-oss-120b --vocab-size 201088 --tp 4 --etp 2 --ep 8 --cp 2 --pp 4 --bf16 --sequence-parallel "
        f"--global-batch-size 4096 {ZERO_1}",
    ),
    "shared experts, dense first layers": (
        2048,
        "--preset deepseek-moe-16b --vocab-size 102400 --tp 2 --ep 64 --pp 4 --bf16 --global-batch-size 4096",
    ),
    "experts, sharded inside instances": (
        1024,
        "--preset mixtral-8x7b --tp 2 --pp 4 --ep 8 --etp 1 --sequence-parallel --bf16 --vocab-size 32000 "
        "--global-batch-size 1024 --dp-strategy fully-sharded --num-distributed-optimizer-instances 8",
    ),
    "swiglu, grouped queries, 100,000 ranks": (
        102400,
        "--preset llama3-70b --tp 8 --pp 8 --cp 2 --bf16 --vocab-size 128256 --global-batch-size 12800",
    ),
    "tied and scaled embedding, uneven stages": (
        1024,
        "--preset gemma-7b --tp 8 --pp 4 --vpp 2 --pipeline-layers 1,4,4,4,4,4,4,3 --bf16 --vocab-size 255999 "
        "--global-batch-size 1024",
    ),
}


def topology_of(layout: ParallelLayout, rank: int) -> Topology:
    """The topology of a single rank; its groups have no process groups."""
    groups = {}
    for kind in layout.kinds:
        ranks = layout.group_of(kind, rank)
        groups[kind.replace("-", "_")] = None if ranks is None else Group(kind, ranks, ranks.index(rank))
    return Topology(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        device=torch.device("meta"),
        edges={},
        host=groups["world"],  # type: ignore[arg-type]
        dp_cp_scalars=groups["dp_cp"],  # type: ignore[arg-type]
        **groups,  # type: ignore[arg-type]
    )


def nbytes(tensors: Iterable[torch.Tensor], *, besides: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the tensors' distinct storages."""
    known = {tensor.untyped_storage()._cdata for tensor in besides}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for storage, size in storages.items() if storage not in known)


def state_bytes(replica: Replica) -> dict[str, int]:
    """Bytes of a rank's buckets."""
    strategy, weights, gradients, optimizer = replica.strategy, [], [], []
    for shard in strategy.shards:
        weights += [strategy.weights(shard).values, shard.bucket.data]
        assert shard.main_param.grad is not None
        gradients += [shard.bucket.grad, shard.main_param.grad]
        optimizer += [shard.main_param.data, *replica.optimizer.state(shard.main_param).values()]
    optimizer += [state.values for state in strategy.states()]
    return {
        "parameter_bytes": nbytes(weights),
        "gradient_bytes": nbytes(gradients),
        "optimizer_bytes": nbytes(optimizer, besides=weights),
    }


def parsed(name: str) -> RunConfig:
    world_size, flags = CASES[name]
    invocation = parse_arguments(flags.split())
    return validate(invocation.config, world_size, invocation.explicit)


@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_rank_equals_the_dry_run(name: str) -> None:
    config = parsed(name)
    world_size, programs = CASES[name][0], Programs(config)
    # Ranks of the first and the last stage, and one in between that is not the first of any group.
    for rank in (0, 2 * world_size // 5 - 1, world_size - 1):
        said = rank_report(config, rank)
        replica = build_replica(config, topology_of(layout_of(config), rank), programs)
        real: dict[str, tuple[object, ...]] = {}
        for stage, module in replica.stages.items():
            for parameter in module.parameters():
                assert isinstance(parameter, ShardedParameter)
                spec = parameter.info.spec
                size = parameter.numel() * parameter.element_size()
                row = (stage, list(parameter.shape), list(map(list, spec.slice)), list(spec.global_shape))
                real.setdefault(spec.name, (*row, size))
        keys = ("stage", "shape", "slice", "global_shape", "bytes")
        assert {row["name"]: tuple(row[key] for key in keys) for row in said["parameters"]} == real
        assert len(said["parameters"]) == len(real)
        buckets = [
            (stage, bucket.data.numel(), sorted(placed.parameter.info.spec.name for placed in bucket.placed))
            for stage, own in replica.strategy.buckets.items()
            for bucket in own
        ]
        reported = [(row["stage"], row["elements"], sorted(row["parameters"])) for row in said["buckets"]]
        assert sorted(reported) == sorted(buckets)
        state = state_bytes(replica)
        assert {part: said["memory"][part] for part in state} == state
        program = programs.program(said["schedule"]["microbatches"])
        assert said["actions"] == [str(action) for action in program.actions[said["coordinate"]["pp"]]]
