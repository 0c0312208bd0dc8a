"""A schedule on a clock where ranks share cores: who waits leaves its share to the others."""

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.dependencies import dependencies
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs


def shared_makespan(schedule: Schedule, costs: Costs, ranks_per_core: float) -> float:
    """Seconds from the first start to the last end.

    `costs` are those while all ranks compute. With k of p ranks computing, each is min(ranks_per_core, p/k) times as fast:
    its share of the cores grows until it has one of its own (processor sharing). Nothing but the cores moves a message:
    what a link says that it takes is work of the rank that sends it and as much of the one that receives it, after and before
    their computation.

    Args:
        schedule: one that `simulate` runs to its end.
    """
    seconds = _with_messages(schedule, costs)
    p = schedule.num_ranks
    position, now = [0] * p, 0.0
    ended: set[Action] = set()
    left: dict[int, float] = {}
    """Rank -> seconds that its action still takes, at the speed of all computing."""

    def proceed(rank: int) -> None:
        row = schedule.actions[rank]
        if rank not in left and position[rank] < len(row):
            action = row[position[rank]]
            if all(needed in ended for needed in dependencies(action, schedule)):
                left[rank] = seconds[action]

    for rank in range(p):
        proceed(rank)
    while left:
        speed = min(ranks_per_core, p / len(left))
        then = now + min(left.values()) / speed
        done = []
        for rank in left:
            left[rank] -= (then - now) * speed
            # What rounding leaves would make the clock stand still.
            if left[rank] <= 1e-12 * then * speed:
                done.append(rank)
        now = then
        for rank in done:
            del left[rank]
            ended.add(schedule.actions[rank][position[rank]])
            position[rank] += 1
        for rank in range(p):
            proceed(rank)
    return now


def _with_messages(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Seconds of each action and of the messages that it waits for or causes, while all ranks compute."""
    computing = costs.of_actions(ahead=bool(schedule.recomputed))
    seconds = {action: computing[action.kind][action.stage] for row in schedule.actions for action in row}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for needed in dependencies(action, schedule):
                source = schedule.placement[needed.stage]
                if source != rank:
                    link = costs.link(source, rank)
                    message = link.latency + link.seconds_per_message
                    seconds[action] += message
                    seconds[needed] += message
    return seconds
