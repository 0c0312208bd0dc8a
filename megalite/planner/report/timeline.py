"""The step of a layout on a clock, short enough to be drawn."""

from megalite.pipeline.ir.simulate import Timeline
from megalite.planner.cost.links import links_of
from megalite.planner.cost.step import pipeline_run
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.search.search import Candidate

_ACTIONS = 1200
"""Forwards and backwards that are still told apart."""


def drawn_timeline(candidate: Candidate, cluster: Cluster, stack: SoftwareStack) -> Timeline:
    """The step, or one with fewer microbatches: whole rounds of the pipeline, at least three."""
    pipeline, config = candidate.layout.pipeline, candidate.config
    rounds = max(3, _ACTIONS // (2 * pipeline.pp * pipeline.pp * pipeline.vpp))
    count = min(pipeline.microbatches, rounds * pipeline.pp)
    costs = list(candidate.prediction.stages)
    return pipeline_run(config, costs, count, links_of(config, cluster, stack)).timeline
