"""The one judge of all plans: the best step of given stages over microbatches and warm-ups, remembered."""

from dataclasses import dataclass

from megalite.planner.chain.cluster import ChainCluster
from megalite.planner.chain.costs import memory_bytes, plan_costs
from megalite.planner.chain.latency import latency
from megalite.planner.chain.plan import ChainPlan, Stages
from megalite.planner.chain.profile import ChainProfile
from megalite.planner.chain.simulate import run

_WARM_UPS = ("pa", "pb")
_MOST_MICROBATCHES = 512
"""More would shorten the bubble no further, and simulating takes time in proportion."""


@dataclass(frozen=True)
class Judged:
    """A plan and what it costs."""

    plan: ChainPlan
    seconds: float
    """Of a step, simulated."""
    memory: tuple[float, ...]
    """Per stage, bytes on one of its devices."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned."""

    profile: ChainProfile
    cluster: ChainCluster
    global_batch: int
    """Samples a step."""
    memory: float
    """Bytes a device may hold."""

    def microbatch_counts(self) -> list[int]:
        """How many microbatches a step can have, ascending: divisors of the batch up to 512, and each microbatch large
        enough to fill one device."""
        least = min(self.profile.smallest_batch, self.global_batch)
        most = min(self.global_batch // least, _MOST_MICROBATCHES)
        return [count for count in range(1, most + 1) if self.global_batch % count == 0]

    def plan(self, stages: Stages, microbatches: int, warm_up: str = "pa") -> ChainPlan:
        """The stages with that many microbatches."""
        return ChainPlan(stages, microbatches, self.global_batch // microbatches, warm_up)


class Judge:
    """Simulates plans; the same stages are simulated once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[ChainPlan, float] = {}
        self._bounds: dict[ChainPlan, float] = {}
        self.work = 0
        """Microbatches times stages that were simulated so far: what simulating costs."""

    @property
    def simulations(self) -> int:
        """Plans that were simulated so far."""
        return len(self._known)

    def seconds(self, plan: ChainPlan) -> float:
        """Of a step, simulated."""
        if plan not in self._known:
            self.work += plan.microbatches * len(plan.stages)
            costs = plan_costs(plan, self.problem.profile, self.problem.cluster)
            self._known[plan] = run(plan, costs, self.problem.cluster).seconds
        return self._known[plan]

    def bound(self, plan: ChainPlan) -> float:
        """The latency formula: never above `seconds`."""
        if plan not in self._bounds:
            costs = plan_costs(plan, self.problem.profile, self.problem.cluster)
            in_flight = [plan.in_flight(stage) for stage in range(len(plan.stages))]
            self._bounds[plan] = latency(costs, plan.microbatches, in_flight)
        return self._bounds[plan]

    def memory(self, plan: ChainPlan) -> tuple[float, ...]:
        """Per stage, bytes on a device."""
        return memory_bytes(plan, self.problem.profile)

    def fits(self, plan: ChainPlan) -> bool:
        """No device holds more than it may."""
        return max(self.memory(plan)) <= self.problem.memory

    def promise(self, stages: Stages) -> float:
        """No step of these stages, whatever its microbatches, is shorter; infinite if none fits."""
        bounds = (self.bound(plan) for plan in self._variants(stages) if self.fits(plan))
        return min(bounds, default=float("inf"))

    def best(
        self, stages: Stages, *, below: float = float("inf"), within_memory: bool = True
    ) -> Judged | None:
        """The fastest step of these stages; None if none fits the memory or is faster than `below`."""
        variants = [plan for plan in self._variants(stages) if not within_memory or self.fits(plan)]
        found: Judged | None = None
        for plan in sorted(variants, key=lambda plan: (self.bound(plan), plan.warm_up)):
            if self.bound(plan) >= below:
                break
            seconds = self.seconds(plan)
            if seconds < below:
                found, below = Judged(plan, seconds, self.memory(plan)), seconds
        return found

    def _variants(self, stages: Stages) -> list[ChainPlan]:
        # A pipeline of one stage has no warm-up to speak of.
        warm_ups = _WARM_UPS if len(stages) > 1 else _WARM_UPS[:1]
        counts = self.problem.microbatch_counts()
        return [self.problem.plan(stages, count, warm_up) for count in counts for warm_up in warm_ups]
