"""The planner for chains: all ways of planning, one judge, the fastest."""

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.config.byte_size import format_bytes
from megalite.config.errors import ConfigError
from megalite.planner.chain.cluster import ChainCluster
from megalite.planner.chain.dapple import Search
from megalite.planner.chain.judging import Judge, Judged, Problem
from megalite.planner.chain.pipedream import pipedream_plan
from megalite.planner.chain.plan import Stages
from megalite.planner.chain.profile import ChainProfile
from megalite.planner.chain.refine import refine
from megalite.planner.chain.seeds import data_parallel, even_stages, straight

PIPEDREAM, DATA_PARALLEL, STRAIGHT = "PipeDream", "data parallel", "straight pipeline"
BASELINES = (PIPEDREAM, DATA_PARALLEL, STRAIGHT)

_NODES = 2000
"""Partial plans that the search looks into for each number of microbatches."""
_KEEP = 20
"""Plans that it hands to the judge."""
_REFINED = 6
"""Of its plans, how many are changed a little, and how many microbatches times stages are simulated for each."""
_WORK = 40_000
_MOST_COUNTS = 48
_REACH = 1.1
"""A plan this much slower than the fastest may still be the one that small changes make the fastest."""


@dataclass(frozen=True)
class Planned:
    """What `plan_chain` found."""

    best: Judged
    """The fastest plan that fits the memory."""
    baselines: Mapping[str, Judged]
    """The plans to compare with, each with the microbatches and the warm-up that suit it best. Where none of them
    fits the memory, those that are fastest if there were enough."""
    nodes: int
    """Partial plans that the search looked into."""
    complete: bool
    """The search never stopped at its limit: memory aside, no plan placed in the three ways has a lower latency formula
    than those that were judged."""
    simulations: int
    """Plans that were simulated."""


def plan_chain(
    profile: ChainProfile, cluster: ChainCluster, global_batch: int, *, memory: float | None = None
) -> Planned:
    """The fastest plan of synchronous training: stages, replicas, placement and microbatches.

    Judged are the baselines, pipelines of equal stages, what the branch and bound finds for each number of
    microbatches, and small changes to the best of these: so the result is never slower than a baseline that fits.

    Args:
        global_batch: Samples a step.
        memory: Bytes of a device; default what the cluster has. `inf` lifts the limit.

    Raises:
        ConfigError: the batch cannot be used, or no plan fits the memory (the nearest miss is named).
    """
    limit = cluster.memory_gb * 1e9 if memory is None else memory
    if global_batch < 1:
        raise ConfigError(
            f"global_batch_size is {global_batch}; it must be 1 or more, such as {profile.batch_size}"
        )
    problem = Problem(profile, cluster, global_batch, limit)
    counts = problem.microbatch_counts()
    if len(counts) > _MOST_COUNTS:
        raise ConfigError(
            f"global_batch_size {global_batch} can be cut into microbatches in {len(counts)} ways, more than the "
            f"{_MOST_COUNTS} that are searched; use a power of 2 near it, such as {1 << global_batch.bit_length() - 1}"
        )
    judge = Judge(problem)
    baselines = _baselines(judge)
    candidates: dict[Stages, None] = {plan.plan.stages: None for plan in baselines.values()}
    for count in range(2, min(cluster.num_gpus, len(profile.layers)) + 1):
        candidates[even_stages(profile, cluster, count)] = None
        candidates[even_stages(profile, cluster, count, each=1)] = None
    judged = _judge(judge, candidates, {})
    nodes, complete = 0, True
    # Coarse searches first: what they find lets the fine one drop most of its prefixes.
    for grain in _grains(cluster.gpus_per_machine):
        complete = True
        for count in counts:
            fastest = min((plan.seconds for plan in judged.values()), default=float("inf"))
            found = Search(problem, count, limit=_NODES, keep=_KEEP, grain=grain).run(fastest)
            nodes, complete = nodes + found.nodes, complete and found.complete
            judged = _judge(judge, dict.fromkeys(stages for _, stages in found.plans), judged)
    if not judged:
        raise _nothing_fits(problem, judge, candidates)
    refined = [refine(judge, plan, work=_WORK) for plan in _unlike(judged)[:_REFINED]]
    best = min([*judged.values(), *refined], key=lambda plan: plan.seconds)
    return Planned(best, baselines, nodes, complete, judge.simulations)


def _baselines(judge: Judge) -> dict[str, Judged]:
    profile, cluster = judge.problem.profile, judge.problem.cluster
    stages = {
        PIPEDREAM: pipedream_plan(profile, cluster),
        DATA_PARALLEL: data_parallel(profile, cluster),
        STRAIGHT: straight(profile, cluster),
    }
    found = {}
    for name, its in stages.items():
        plan = judge.best(its) or judge.best(its, within_memory=False)
        assert plan is not None
        found[name] = plan
    return found


def _judge(
    judge: Judge, candidates: dict[Stages, None], judged: dict[Stages, Judged]
) -> dict[Stages, Judged]:
    """With the candidates that may come within reach of the fastest."""
    judged = dict(judged)
    fastest = min((plan.seconds for plan in judged.values()), default=float("inf"))
    for promise, stages in sorted((judge.promise(stages), stages) for stages in candidates):
        if stages in judged or promise == float("inf"):
            continue
        found = judge.best(stages, below=_REACH * fastest)
        if found is not None:
            judged[stages] = found
            fastest = min(fastest, found.seconds)
    return judged


def _grains(gpus_per_machine: int) -> list[int]:
    """Whole machines, halves of them, single devices."""
    return sorted({gpus_per_machine, max(1, gpus_per_machine // 2), 1}, reverse=True)


def _unlike(judged: dict[Stages, Judged]) -> list[Judged]:
    """The fastest plan of each number of stages, the fastest first: small changes seldom lead from one to another."""
    found: dict[int, Judged] = {}
    for plan in sorted(judged.values(), key=lambda plan: plan.seconds):
        found.setdefault(len(plan.plan.stages), plan)
    return list(found.values())


def _nothing_fits(problem: Problem, judge: Judge, candidates: dict[Stages, None]) -> ConfigError:
    counts = problem.microbatch_counts()
    needs = [
        (max(judge.memory(problem.plan(stages, count))), len(stages))
        for stages in candidates
        for count in counts
    ]
    least, stages = min(needs)
    return ConfigError(
        f"no plan for {problem.profile.name} on {problem.cluster.name} fits {format_bytes(problem.memory)} a device: the "
        f"nearest, in {stages} stage{'s' * (stages > 1)}, needs {format_bytes(least)}; give more memory, more devices or smaller layers"
    )
