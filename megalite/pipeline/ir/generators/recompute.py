"""Recompute-ahead: forwards run again before their backward's gradient is waited for."""

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import GRADIENTS, Action, Kind
from megalite.pipeline.ir.schedule import Schedule


def recompute_ahead(schedule: Schedule) -> Schedule:
    """The schedule with an R right before each B and I, except where the pair's F is the action right before.

    R needs nothing from another rank, so it runs while the backward's gradient is on its way: on the path along which
    gradients travel up the ranks a backward costs B instead of R + B. For 1F1B that makes the bubble (p-1)(F+B) instead
    of (p-1)(F+R+B). Between R and its backward one microbatch's activations of one stage are alive, for longer than if
    the backward recomputed; else only stage inputs are. A pair whose backward follows its forward at once, as on the
    last rank of 1F1B, keeps its graph and recomputes nothing, with the same peak: that takes another 2F from 1F1B's
    bubble where R = F <= B.

    Raises:
        ConfigError: the schedule is forward-only, or recomputes already.
    """
    if schedule.forward_only or schedule.recomputed:
        reason = "has no backward" if schedule.forward_only else "recomputes already"
        raise ConfigError(
            f"schedule {schedule.name} {reason}, so it cannot recompute ahead: give a training schedule without any R"
        )
    rows = []
    for row in schedule.actions:
        out: list[Action] = []
        for action in row:
            forward = Action(Kind.F, action.stage, action.microbatch)
            if action.kind in GRADIENTS and (not out or out[-1] != forward):
                out.append(Action(Kind.R, action.stage, action.microbatch))
            out.append(action)
        rows.append(tuple(out))
    return Schedule(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        actions=tuple(rows),
    )
