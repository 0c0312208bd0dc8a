"""Every schedule by its name."""

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.generators.interleaved import check_several_chunks, interleaved, looped_bfs
from megalite.pipeline.ir.generators.one_chunk import gpipe, one_f_one_b
from megalite.pipeline.ir.generators.placements import loop_placement, v_placement
from megalite.pipeline.ir.generators.recompute import recompute_ahead as with_recompute_ahead
from megalite.pipeline.ir.generators.vee import dualpipe_v, zb_v
from megalite.pipeline.ir.generators.zero_bubble import zb_h1, zb_h2
from megalite.pipeline.ir.schedule import Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""`pipeline_schedule` can be any of these."""

_ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
_VEE = {"zb-v": zb_v, "dualpipe-v": dualpipe_v}
_WITH_CHUNKS = {
    "gpipe": "looped-bfs (vpp 2 or more)",
    "1f1b": "interleaved (vpp 2 or more)",
    "zb-h1": "zb-v (vpp 2)",
    "zb-h2": "zb-v (vpp 2)",
}
"""What is nearest to a one-chunk schedule, with chunks."""


def default_schedule(num_chunks: int) -> str:
    """The schedule of a user who names none: interleaved with several chunks a rank, else 1f1b."""
    return "interleaved" if num_chunks > 1 else "1f1b"


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int | None = None,
    warm_up: str = "pa",
    recompute_ahead: bool = False,
) -> Schedule:
    """The training schedule of that name.

    Args:
        num_ranks: Pipeline ranks, p.
        num_chunks: Stages a rank, v: 1 for gpipe, 1f1b, zb-h1 and zb-h2; 2 for zb-v and dualpipe-v; 2 or more for the
            rest.
        group: Microbatches that interleaved sends through a chunk before the next chunk's turn.
        warm_up: How far 1f1b runs ahead: "pa", or "pb" for twice as far.
        recompute_ahead: Whether forwards run again before the backward's gradient is waited for.

    Raises:
        ConfigError: no such schedule, sizes that it cannot take, or an option that it does not have.
    """
    if group is not None and name != "interleaved":
        raise ConfigError(
            f"microbatch_group_size_per_virtual_pipeline_stage is {group}, but schedule {name} has no groups: leave "
            f"it out, or use the interleaved schedule with vpp of 2 or more"
        )
    if warm_up != "pa" and name != "1f1b":
        raise ConfigError(
            f"the warm-up is {warm_up!r}, but schedule {name} has no choice of warm-ups: leave it at 'pa', or use "
            f"schedule 1f1b"
        )
    placement_for(name, num_ranks, num_chunks)
    if name == "interleaved":
        schedule = interleaved(num_ranks, num_chunks, num_microbatches, group)
    elif name == "looped-bfs":
        schedule = looped_bfs(num_ranks, num_chunks, num_microbatches)
    elif name == "1f1b":
        schedule = one_f_one_b(num_ranks, num_microbatches, warm_up)
    else:
        schedule = (_ONE_CHUNK | _VEE)[name](num_ranks, num_microbatches)
    return with_recompute_ahead(schedule) if recompute_ahead else schedule


def placement_for(name: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Per virtual stage the rank that holds it, in every schedule of that name and these sizes.

    Raises:
        ConfigError: no such schedule, or another number of chunks than it takes.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_schedule is {name!r}; it must be one of {', '.join(SCHEDULES)}")
    if name in _ONE_CHUNK and num_chunks > 1:
        raise ConfigError(
            f"schedule {name} takes one stage a rank but vpp is {num_chunks}: use vpp 1, or schedule "
            f"{_WITH_CHUNKS[name]}"
        )
    if name in _VEE and num_chunks != 2:
        other = default_schedule(num_chunks)
        raise ConfigError(
            f"schedule {name} takes two stages a rank but vpp is {num_chunks}: use vpp 2, or schedule {other}"
        )
    if name in ("interleaved", "looped-bfs"):
        check_several_chunks(name, num_chunks)
    return v_placement(num_ranks) if name in _VEE else loop_placement(num_ranks, num_chunks)
