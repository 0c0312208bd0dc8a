"""A schedule on a clock where ranks share cores: who waits leaves its share to the others."""

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.dependencies import dependencies
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs


def shared_makespan(schedule: Schedule, costs: Costs, ranks_per_core: float) -> float:
    """Seconds from the first start to the last end.

    `costs` are those while all ranks compute. With k of p ranks computing, each is min(ranks_per_core, p/k) times as fast:
    its share of the cores grows until it has one of its own (processor sharing).

    Args:
        schedule: one that `simulate` runs to its end; messages leave when their computation ends.
    """
    seconds = costs.of_actions(ahead=bool(schedule.recomputed))
    p, place = schedule.num_ranks, schedule.placement
    position, now = [0] * p, 0.0
    ended: dict[Action, float] = {}
    left: dict[int, float] = {}
    """Rank -> seconds that its action still takes, at the speed of all computing."""
    arrives: dict[int, float] = {}
    """Rank that waits for a message under way -> when it is there."""

    def proceed(rank: int) -> None:
        row = schedule.actions[rank]
        if rank in left or rank in arrives or position[rank] == len(row):
            return
        action, start = row[position[rank]], now
        for needed in dependencies(action, schedule):
            if needed not in ended:
                return
            source = place[needed.stage]
            if source != rank:
                link = costs.link(source, rank)
                start = max(start, ended[needed] + link.seconds_per_message + link.latency)
        if start > now:
            arrives[rank] = start
        else:
            left[rank] = seconds[action.kind][action.stage]

    for rank in range(p):
        proceed(rank)
    while left or arrives:
        speed = min(ranks_per_core, p / len(left)) if left else 1.0
        moments = [now + least / speed for least in ([min(left.values())] if left else [])]
        then = min([*moments, *arrives.values()])
        done = []
        for rank in left:
            left[rank] -= (then - now) * speed
            # What rounding leaves would make the clock stand still.
            if left[rank] <= 1e-12 * then * speed:
                done.append(rank)
        now = then
        for rank in done:
            del left[rank]
            ended[schedule.actions[rank][position[rank]]] = now
            position[rank] += 1
        for rank in [rank for rank, at in arrives.items() if at <= now]:
            del arrives[rank]
        for rank in range(p):
            proceed(rank)
    return now
