"""The space contains exactly the layouts that validate accepts."""

import dataclasses
import itertools
import random
from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.rules.rule import divisor_list
from megalite.config.validate import validate
from megalite.partition.pipeline import layout_of, schedule_of
from megalite.pipeline.ir.generators import SCHEDULES, build_schedule, placement_for
from megalite.planner.search.search import config_of
from megalite.planner.search.space import Layout, Request, enumerate_space, not_default, parse_constraint
from tests.planner.search.asking import EXPERTS, TINY, asked, layouts_of

STRATEGIES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "distributed-optimizer": {"dp_strategy": "distributed-optimizer"},
    "zero-2": {"dp_strategy": "distributed-optimizer", "shard_gradients": True},
    "fully-sharded": {"dp_strategy": "fully-sharded"},
}

LINEAR = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 2"
)
SPARSE = "--multi-latent-attention --experimental-attention-variant dsa --fix recompute=none"
GROUPED = f"{TINY} --num-query-groups 2 --cp-comm-type"
HIERARCHICAL = f"{GROUPED} a2a+p2p --hierarchical-context-parallel-sizes 2 2"


def legal(request: Request, chosen: dict[str, Any], microbatches: int) -> bool:
    """Whether training accepts a config with these settings."""
    try:
        placement_for(chosen["pipeline_schedule"], chosen["pp"], chosen["vpp"])
        config = replace(request.config, **chosen)
        config = validate(config, request.world_size, not_default(config))
        schedule_of(config, microbatches)
    except ConfigError:
        return False
    return True


def key_of(layout: Layout) -> tuple[Any, ...]:
    p = layout.pipeline
    return (
        *(layout.tp, p.pp, p.vpp, layout.cp, layout.ep, layout.micro_batch_size),
        *(p.schedule, layout.strategy, layout.sequence_parallel),
        *(layout.recompute, layout.dp_instances, layout.offload, p.offloaded),
    )


def brute_force(request: Request, eps: tuple[int, ...], schedules: tuple[str, ...]) -> set[tuple[Any, ...]]:
    """All valid combinations without duplicates of equal layouts."""
    world, batch = request.world_size, request.config.training.global_batch_size
    assert batch is not None
    found = set()
    sizes = itertools.product(
        divisor_list(world), divisor_list(world), (1, 2, 3), divisor_list(world), eps, (1, 3, 8), schedules
    )
    for tp, pp, vpp, cp, ep, micro, schedule in sizes:
        dp, rest = divmod(world, tp * pp * cp)
        if rest or batch % (dp * micro) or not request.allows("micro_batch_size", micro):
            continue
        for name, sequence, recompute, instances, states, layers in itertools.product(
            STRATEGIES,
            request.of("sequence_parallel"),
            request.of("recompute_granularity"),
            request.fixed.get("dp_instances", divisor_list(dp * cp) if request.node < world else (1,)),
            request.fixed.get("optimizer_cpu_offload", (False,)),
            request.fixed.get("cpu_offloading_num_layers", (0,)),
        ):
            if (pp == 1 and schedule != "1f1b") or (tp == 1 and sequence):
                continue
            if batch == dp * micro and schedule in ("gpipe", "looped-bfs"):
                continue  # equals 1f1b or interleaved with one microbatch
            alone = dp * cp == 1 and tp * cp * dp <= tp * ep
            if alone and name != "all-reduce":
                continue
            chosen = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "micro_batch_size": micro}
            chosen |= {"pipeline_schedule": schedule, "sequence_parallel": sequence, "recompute_granularity": recompute}
            chosen |= {"optimizer_cpu_offload": states, "cpu_offloading_num_layers": layers, **STRATEGIES[name]}
            chosen |= {} if instances == 1 else {"dp_instances": instances}
            if legal(request, chosen, batch // (dp * micro)) and in_nodes(request, chosen):
                key = (tp, pp, vpp, cp, ep, micro, schedule, name, sequence, recompute, instances, states, layers)
                found.add(key)
    return found


def in_nodes(request: Request, chosen: dict[str, Any]) -> bool:
    """The number of instances is 1, a fixed one, or the smallest with each instance in a node."""
    if "dp_instances" not in chosen or "dp_instances" in request.fixed:
        return True
    config = validate(replace(request.config, **chosen), request.world_size)
    layout = layout_of(config)

    def nodes(kind: str) -> int:
        """The most nodes that a group spans."""
        groups = (layout.group_of(kind, rank) or [] for rank in range(request.world_size))
        return max(len({rank // request.node for rank in group}) for group in groups)

    fewer = [n for n in divisor_list(layout.dp * layout.cp) if 1 < n < chosen["dp_instances"]]
    return (
        nodes("dp-cp") > 1
        and nodes("intra-dp-cp") == 1
        and not any(in_nodes(request, {**chosen, "dp_instances": n}) for n in fewer)
    )


@pytest.mark.parametrize(
    ("flags", "eps", "schedules"),
    [
        (f"{TINY} --fix recompute=none", (1,), SCHEDULES),
        (
            f"{GROUPED} a2a --fix recompute=none --fix schedule=1f1b,zb-h2,interleaved",
            (1,),
            ("1f1b", "zb-h2", "interleaved"),
        ),
        (f"{TINY} {SPARSE} --fix schedule=1f1b,zb-h1,gpipe", (1,), ("1f1b", "zb-h1", "gpipe")),
        (f"{TINY} {SPARSE} --fix schedule=1f1b --cp-comm-type allgather", (1,), ("1f1b",)),
        (f"{HIERARCHICAL} --fix recompute=none --fix schedule=1f1b,zb-v", (1,), ("1f1b", "zb-v")),
        (f"{EXPERTS} --fix recompute=full --fix schedule=1f1b,interleaved", (1, 2, 3, 4), ("1f1b", "interleaved")),
        (
            f"{TINY} --fix optimizer_cpu_offload=yes,no --fix cpu_offloading_num_layers=0,1,3 --fix recompute=none,full "
            "--fix schedule=1f1b,interleaved --fix sp=no",
            (1,),
            ("1f1b", "interleaved"),
        ),
    ],
)
def test_space_has_all_valid_layouts(flags: str, eps: tuple[int, ...], schedules: tuple[str, ...]) -> None:
    request = asked(f"{flags} --gpus 4 --fix mbs=1,8").request
    assert_all_legal(request, eps, schedules)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("node", [2, 4])
def test_instances_are_inside_a_node(node: int, order: str) -> None:
    flags = f"{TINY} --gpus 8 --fix recompute=none --fix schedule=1f1b --fix mbs=1 --fix sp=no --rank-order {order}"
    request = dataclasses.replace(asked(flags).request, node=node)
    assert_all_legal(request, (1,), ("1f1b",))
    assert {layout.dp_instances for layout in layouts_of(request)} == {1, 2, 8 // node}


def assert_all_legal(request: Request, eps: tuple[int, ...], schedules: tuple[str, ...]) -> None:
    mine = {key_of(layout) for layout in layouts_of(request)}
    assert mine == brute_force(request, eps, schedules)
    assert len(mine) > 40
    assert {key[4] for key in mine} == set(eps) - {3}


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--preset gpt3-175b --cluster dgx-a100 --gpus 512 --global-batch-size 1536", 150),
        ("--preset mixtral-8x7b --cluster dgx-h100 --gpus 64 --global-batch-size 96 --etp 1", 80),
        ("--preset llama3-8b --cluster dgx-h100 --gpus 48 --global-batch-size 96 --cp-comm-type a2a", 80),
        (f"{TINY} --gpus 8 --fix cp=4,1 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 80),
        (f"{EXPERTS} --gpus 8 --rank-order tp-cp-ep-pp-dp --rampup-batch-size 4 4 100", 80),
        (f"{TINY.replace('length 64', 'length 36')} --gpus 8 --fix tp=4 --fix cp=2 --fix pp=1", 60),
        (f"{TINY} --gpus 4 --optimizer lamb --recompute-modules core_attn mlp", 80),
        (f"{EXPERTS} --gpus 16 --fix dp_instances=2,4", 80),
        (f"{TINY} --gpus 8 {LINEAR}", 80),
        (f"{EXPERTS} --gpus 32 --fix optimizer_cpu_offload=true --fix cpu_offloading_num_layers=2,4", 80),
    ],
)
def test_space_has_only_valid_layouts(flags: str, count: int) -> None:
    request = asked(flags).request
    space = enumerate_space(request)
    draw = random.Random(1)
    for _ in range(count):
        block = draw.choice(space.blocks)
        layout = block.layout(draw.randrange(len(block.pipelines)), draw.randrange(len(block.shares)))
        config = config_of(request, layout.settings())
        placement_for(config.parallel.schedule_name, layout.pipeline.pp, layout.pipeline.vpp)
        assert config.parallel.dp == layout.dp
        assert config.training.global_batch_size == (layout.pipeline.microbatches * layout.dp * layout.micro_batch_size)


def test_constraints_are_kept() -> None:
    flags = f"{TINY} --gpus 8 --tp 2 --fix vpp=2 --fix schedule=zb-v,interleaved --fix sp=true"
    layouts = layouts_of(asked(flags).request)
    assert {each.tp for each in layouts} == {2}
    assert {each.pipeline.vpp for each in layouts} == {2}
    assert {each.pipeline.schedule for each in layouts} == {"zb-v", "interleaved"}
    assert all(each.sequence_parallel for each in layouts)
    request = asked(f"{TINY} --gpus 4 --pipeline-layers 1 1 1 1").request
    assert {(each.pipeline.pp, each.pipeline.vpp) for each in layouts_of(request)} == {(2, 2), (4, 1)}
    sharded = asked(f"{TINY} --gpus 8 --dp-strategy distributed-optimizer --shard-gradients").request
    assert sharded.fixed["dp_strategy"] == ("zero-2",)


def test_no_duplicates_with_one_rank_or_microbatch() -> None:
    def schedules(flags: str) -> set[str]:
        return {each.pipeline.schedule for each in layouts_of(asked(f"{TINY} --gpus 2 {flags}").request)}

    assert schedules("--fix pp=1") == {"1f1b"}
    assert schedules("--fix pp=1 --fix schedule=gpipe,zb-h2") == {"zb-h2"}
    assert schedules("--fix pp=1 --fix schedule=gpipe") == {"gpipe"}
    one = "--fix pp=2 --fix tp=1 --fix mbs=8"  # the whole batch
    assert schedules(f"{one} --fix schedule=1f1b,gpipe,interleaved,looped-bfs") == {"1f1b", "interleaved"}
    assert schedules(f"{one} --fix schedule=gpipe,looped-bfs") == {"gpipe", "looped-bfs"}
    for more, less in (("gpipe", "1f1b"), ("looped-bfs", "interleaved")):
        chunks = 1 if less == "1f1b" else 3
        same = [
            build_schedule(name, num_ranks=4, num_chunks=chunks, num_microbatches=1).actions for name in (more, less)
        ]
        assert same[0] == same[1]


def test_text_of_constraints() -> None:
    assert parse_constraint("schedule=zb-v") == ("pipeline_schedule", ("zb-v",))
    assert parse_constraint("tp=4,8") == ("tp", (4, 8))
    assert parse_constraint("sp=no") == ("sequence_parallel", (False,))
    assert parse_constraint("optimizer-cpu-offload=yes,no") == ("optimizer_cpu_offload", (True, False))
    assert parse_constraint("cpu_offloading_num_layers=0,4") == ("cpu_offloading_num_layers", (0, 4))
    for text, message in (
        ("tp", "write NAME=VALUE"),
        ("schedules=zb-v", "did you mean schedule"),
        ("tp=0", "takes whole numbers of at least 1"),
        ("schedule=zbv", "did you mean zb-v"),
        ("sp=maybe", "takes true or false"),
        ("lr=1", "is not searched"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_constraint(text)
