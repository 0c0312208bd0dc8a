"""Run every schedule with the executor: in fp32 bitwise equal to one rank, with the program's memory and order."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import megalite.pipeline.executor as executor
from megalite.data_parallel.buckets import Bucket
from megalite.pipeline.ir import generators
from megalite.pipeline.ir.generators import build_schedule, loop_placement, v_placement
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.validate import validate
from megalite.tensor_parallel.parameter import DeferredWeightGradients
from megalite.topology.group import Work
from tests.pipeline.stages import MESSAGES, ROWS, H, Rank, Watched, gradients, one_rank
from tests.support.ranks import RankContext, run_ranks
from tests.support.traffic import counted

CSV = {
    "mixed": """0F0,0F1,0F2,0I0,0B1,0I2,0W0,0W2
1F0,1I0,1F1,1W0,1B1,1F2,1R2,1I2,1W2
""",
    "turn": """0F0,0F1,3F0,3I0,3F1,3I1,3W0,0B0,3W1,0I1,0W1
1F0,2F0,1F1,2F1,2I0,1I0,2W0,2I1,1I1,1W0,2W1,1W1
""",
    "v": """0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1
1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1
""",
    "early": """0F0,0F1,0R0,0R1,0B0,0B1
1F0,1B0,1F1,1R1,1B1
""",
    "one rank": "0F0,1F0,2F0,0F1,2B0,1B0,1F1,2F1,0B0,2B1,1B1,0B1\n",
}
"""One stage with whole and split backwards, several W at the end, and one forward run again; a V with split backwards and its
turn on rank 1, and one with whole backwards; two graphs of second forwards at once; three stages per rank."""

Case = tuple[str, int, int, int, dict[str, Any]]  # schedule, ranks, chunks, microbatches, options

AHEAD = {"recompute_ahead": True}
CASES: list[Case] = [
    ("gpipe", 2, 1, 3, {}),
    ("1f1b", 4, 1, 7, {"warm_up": "pb"}),
    ("1f1b", 4, 1, 2, {}),
    ("1f1b", 2, 1, 6, AHEAD),
    ("interleaved", 2, 3, 4, {}),
    ("interleaved", 4, 2, 5, AHEAD),
    ("looped-bfs", 4, 2, 3, {}),
    ("zb-h1", 4, 1, 6, {}),
    ("zb-h1", 2, 1, 4, AHEAD),
    ("zb-h2", 4, 1, 8, {}),
    ("zb-v", 2, 2, 4, {}),
    ("zb-v", 4, 2, 3, AHEAD),
    ("dualpipe-v", 2, 2, 5, {}),
    ("mixed", 2, 1, 3, {}),
    ("turn", 2, 2, 2, {}),
    ("early", 2, 1, 2, {}),
    ("v", 2, 2, 2, AHEAD),
    ("one rank", 1, 3, 2, {}),
]


def schedule_of(case: Case) -> Schedule:
    name, ranks, chunks, microbatches, options = case
    if name in CSV:
        schedule = Schedule.from_csv(CSV[name], name=name)
        return generators.with_recompute_ahead(schedule) if options else schedule
    return build_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches, **options)


def name_of(case: Case) -> str:
    return "-".join(map(str, [*case[:4], *case[4]]))


def edges_of(context: RankContext, schedule: Schedule, **axes: int) -> Any:
    return context.topology(pp=schedule.num_ranks, placement=schedule.placement, **axes)


def run_case(context: RankContext | None, case: Case) -> dict[str, Any]:
    """Run two steps of one executor: the second must not depend on the first."""
    schedule = schedule_of(case)
    program = lower(schedule)
    rank, edges = (0, {}) if context is None else (context.rank, edges_of(context, schedule).edges)
    me = Watched(program, rank, edges)
    placement, stages = schedule.placement, schedule.stages_of(rank)
    found = {"steps": [me.step() for _ in range(2)], "stages": stages}
    return found | {
        "outputs": (me.most_held, me.most_full),
        "channels": len({placement[stage + 1] for stage in stages if stage + 1 < len(placement)}),
        "graphs": (me.most_graphs, me.graphs),
        "planned": validate(program).peak_activations[rank],
        "events": me.events[: len(me.events) // 2],
    }


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_are_bitwise_equal_to_one_rank(case: Case) -> None:
    num_stages, microbatches = case[1] * case[2], case[3]
    losses, expected = one_rank(num_stages, range(microbatches))
    seen = set()
    found_ranks = [run_case(None, case)] if case[1] == 1 else run_ranks(case[1], run_case, case)
    for rank in found_ranks:
        for found, grads in rank["steps"]:
            # Only the last chunk returns losses.
            assert found == (losses if num_stages - 1 in rank["stages"] else [])
            for name, grad in grads.items():
                assert torch.equal(grad, expected[name]), name
        seen |= grads.keys()
        # One send per channel may be pending; earlier outputs are freed, although their graphs are needed.
        assert rank["outputs"][1] <= rank["channels"]
        assert rank["graphs"] == (rank["planned"], 0)
        events = rank["events"]
        for stage in rank["stages"]:
            assert events.count(f"enable {stage}") == events.count(f"start {stage}") == 1
            assert events.index(f"enable {stage}") < events.index(f"start {stage}")
    assert seen == expected.keys()
    if case[0] in ("gpipe", "looped-bfs") and not case[4]:
        assert found_ranks[0]["outputs"][0] > 1, "no output was held"


def evaluate(context: RankContext, placement: tuple[int, ...], microbatches: int) -> list[float]:
    schedule = generators.forward_only(placement, microbatches)
    me = Rank(lower(schedule), context.rank, edges_of(context, schedule).edges)
    losses = [loss.item() for loss in me.executor.run()]
    assert all(not grad.any() for grad in gradients(me.stages).values())
    return losses


@pytest.mark.parametrize("placement", [loop_placement(2, 2), v_placement(2)], ids=str)
def test_losses_of_forward_only_schedules(placement: tuple[int, ...]) -> None:
    found = run_ranks(max(placement) + 1, evaluate, placement, 5)
    losses, _ = one_rank(len(placement), range(5))
    for rank, ours in enumerate(found):
        assert ours == (losses if rank == placement[-1] else [])


def on_two_tensor_ranks(context: RankContext, case: Case) -> dict[str, Any]:
    schedule = schedule_of(case)
    topology = edges_of(context, schedule, tp=2)
    me = Rank(lower(schedule), topology.pp.rank, topology.edges, messages=replace(MESSAGES, split_over=topology.tp))
    with counted() as (moved, _):
        losses, grads = me.step()
    return {"losses": losses, "grads": grads, "moved": moved, "pp": topology.pp.rank, "placement": schedule.placement}


@pytest.mark.parametrize(
    "case", [("interleaved", 2, 3, 4, {}), ("zb-v", 2, 2, 4, {}), ("dualpipe-v", 2, 2, 5, AHEAD)], ids=name_of
)
def test_tensor_ranks_send_parts_of_a_message(case: Case) -> None:
    """Each of two ranks sends half, and the receivers gather it: the results are bitwise equal to one rank."""
    num_stages, microbatches = case[1] * case[2], case[3]
    losses, expected = one_rank(num_stages, range(microbatches))
    for rank in run_ranks(4, on_two_tensor_ranks, case):
        placement = rank["placement"]
        borders = sum(
            rank["pp"] in pair and pair[0] != pair[1] for pair in itertools.pairwise(placement)
        )  # each border has an output in one direction and a gradient in the other
        whole = ROWS * H * 4 * microbatches * borders
        assert rank["moved"]["pp", "send"] == whole // 2
        assert rank["moved"]["tp", "all-gather"] == whole
        assert rank["losses"] in ([], losses)
        for name, grad in rank["grads"].items():
            assert torch.equal(grad, expected[name]), name


def on_two_replicas(context: RankContext, case: Case) -> dict[str, Any]:
    schedule = schedule_of(case)
    topology = edges_of(context, schedule, dp=2)
    me = Rank(
        lower(schedule), topology.pp.rank, topology.edges, dp=topology.dp, first_microbatch=topology.dp.rank * case[3]
    )
    events, grads = overlapped(me)
    return {"grads": grads, "events": events}


def overlapped(me: Rank) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Begin and end of each backward and W, and the start of each reduction, in a step."""
    events: list[str] = []
    backward, reduce = executor._engine_backward, me.strategy._reduce

    def noted_backward(output: torch.Tensor, grad: torch.Tensor | None) -> None:
        events.append("begin")
        backward(output, grad)
        events.append("end")

    def noted_reduce(bucket: Bucket) -> Work:
        events.append("reduce")
        return reduce(bucket)

    def noted_run(deferred: DeferredWeightGradients, microbatch: int) -> None:
        events.append("begin")
        run(deferred, microbatch)
        events.append("end")

    run = DeferredWeightGradients.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_engine_backward", noted_backward)
        patch.setattr(me.strategy, "_reduce", noted_reduce)
        patch.setattr(DeferredWeightGradients, "run", noted_run)
        _, grads = me.step()
    return events, grads


@pytest.mark.parametrize(
    "case",
    [("zb-h1", 2, 1, 4, {}), ("zb-v", 2, 2, 4, {}), ("mixed", 2, 1, 3, {}), ("1f1b", 2, 1, 3, AHEAD)],
    ids=name_of,
)
def test_reductions_overlap_the_last_weight_gradients(case: Case) -> None:
    """An all-reduce that starts too early would miss or double gradients."""
    num_stages, microbatches = case[1] * case[2], case[3]
    halves = [one_rank(num_stages, range(first, first + microbatches))[1] for first in (0, microbatches)]
    for rank in run_ranks(4, on_two_replicas, case):
        for name, grad in rank["grads"].items():
            assert torch.equal(grad, halves[0][name] + halves[1][name]), name
        events = rank["events"]
        last = len(events) - 1 - events[::-1].index("begin")
        inside = events[last + 1 : events.index("end", last)]
        assert inside.count("reduce") >= 2, "buckets of weights fill one after the other"
        assert set(events[events.index("end", last) + 1 :]) <= {"reduce"}
        assert "reduce" not in events[: events.index("end")]


def test_buckets_without_pending_weights_start_first() -> None:
    """Norms and biases are complete before the last W; buckets of its weights start inside it, none after it."""
    program = lower(Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n"))
    me = Rank(program, 0, {})
    events, grads = overlapped(me)
    early = sum(all_of_one(bucket, "norm", "bias") for bucket in buckets(me))
    late = len(buckets(me)) - early
    assert early == 3 and late == 2
    assert events == ["begin", "end"] * 3 + ["reduce"] * early + ["begin"] + ["reduce"] * late + ["end"]
    for name, grad in one_rank(1, range(2))[1].items():
        assert torch.equal(grads[name], grad), name


def buckets(me: Rank) -> list[Bucket]:
    return list(me.strategy.all_buckets())


def all_of_one(bucket: Bucket, *kinds: str) -> bool:
    names = [placed.parameter.info.spec.name for placed in bucket.placed]
    return all(name.rpartition(".")[2] in kinds for name in names)
