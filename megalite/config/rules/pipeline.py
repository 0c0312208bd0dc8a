"""Rules about the pipeline: its schedule and the cut into stages."""

from megalite.config.byte_size import parse_byte_size
from megalite.config.errors import Findings
from megalite.config.parallel import parse_pipeline_layout
from megalite.config.rules.effect import refuse_idle, shown
from megalite.config.run import RunConfig

_KNOBS = ("pipeline_recv_prefetch", "pipeline_send_window", "pipeline_check_memory")


def check_pipeline(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Settings of one schedule with another, and of a pipeline where there is none."""
    p = config.parallel
    name = p.schedule_name
    if p.vpp > 1 and p.pp == 1:
        yield f"vpp {p.vpp} has no effect with pp 1; use pp 2 or more, or vpp 1"
    if p.pipeline_schedule_file is not None and p.pipeline_schedule is not None:
        yield (
            f"pipeline_schedule {p.pipeline_schedule} and pipeline_schedule_file {p.pipeline_schedule_file} both name "
            f"the schedule; remove one of them"
        )
    if p.pp == 1:
        yield refuse_idle(config, explicit, _KNOBS, cause="with pp 1", remedy="use pp 2 or more,")
    yield _check_belongs(config, explicit, name)
    if p.pipeline_layers is not None and p.pipeline_layout is not None:
        yield (
            f"pipeline_layers {_commas(p.pipeline_layers)} and pipeline_layout {p.pipeline_layout!r} both cut the model; "
            f"remove one of them"
        )
    if config.training.recompute_ahead:
        yield _check_recompute_ahead(config)
    limit = p.pipeline_memory_limit
    if limit is not None and parse_byte_size(limit) is None:
        yield f"pipeline_memory_limit is {limit!r}; it is a size with its unit, e.g. 12GiB or 800MB"
    logging, steps = config.logging, config.training.train_iters
    late = [step for step in logging.trace_steps if steps is not None and step > steps]
    if logging.trace and late:
        yield (
            f"trace_steps {' '.join(map(str, logging.trace_steps))} has {late[0]} in it, but train_iters is {steps}; use "
            f"steps up to {steps}"
        )
    if not logging.trace:
        yield refuse_idle(config, explicit, ["trace_steps"], cause="without trace", remedy="add --trace")
    elif logging.run_dir is None:
        yield "trace has no folder to write to; add --run-dir runs/mine"


def _check_belongs(config: RunConfig, explicit: frozenset[str], name: str) -> Findings:
    """Settings that belong to one schedule."""
    p = config.parallel
    group = p.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and name != "interleaved":
        cause, remedy = ("vpp 1", "use vpp 2 or more") if p.vpp == 1 else (name, "use --pipeline-schedule interleaved")
        yield (
            f"microbatch_group_size_per_virtual_pipeline_stage {group} has no effect with {cause}: only the "
            f"interleaved schedule has groups; {remedy}, or remove it"
        )
    for setting, owner in (("pipeline_warmup", "1f1b"), ("pipeline_costs", "auto")):
        if name != owner:
            cause, remedy = f"with schedule {name}", f"use --pipeline-schedule {owner}"
            yield refuse_idle(config, explicit, [setting], cause=cause, remedy=remedy)


def _check_recompute_ahead(config: RunConfig) -> Findings:
    p, t = config.parallel, config.training
    if t.recompute_granularity != "full":
        yield (
            f"recompute_ahead has no effect with recompute_granularity {t.recompute_granularity}; use "
            f"--recompute-granularity full or remove it"
        )
    if p.pp == 1:
        yield (
            "recompute_ahead has no effect with pp 1, where no gradient is waited for; use pp 2 or more, or remove it"
        )
    if p.pipeline_schedule_file is not None:
        yield (
            f"recompute_ahead does not change pipeline_schedule_file {p.pipeline_schedule_file}: write the R actions into "
            f"the file (megalite schedule --recompute-ahead --write-csv) and remove it"
        )
    default = (("recompute_method", "uniform"), ("recompute_num_layers", 1))
    for setting, value in default:
        if getattr(t, setting) != value:
            yield (
                f"{shown(config, setting)} does not go with recompute_ahead, which recomputes whole stages; remove one of "
                f"them"
            )


def stage_layers(config: RunConfig) -> list[int] | None:
    """The cut that the user gave, if any: layers of each stage."""
    p = config.parallel
    return p.pipeline_layers if p.pipeline_layout is None else parse_pipeline_layout(p.pipeline_layout)


def check_stages(config: RunConfig) -> Findings:
    """Each stage has something to do, and a cut that was given has the layers and stages that there are."""
    p, layers = config.parallel, config.model.num_layers
    stages = p.pp * p.vpp
    cut = stage_layers(config)
    # Only a cut by hand can leave the first and last stage to embedding and head alone.
    least = stages if cut is None else max(stages - 2, 1)
    if layers < least:
        yield (
            f"num_layers {layers} is less than pp·vpp = {p.pp}·{p.vpp} = {stages} stages, which need a layer each; use "
            f"num_layers {stages} or more, or pp·vpp up to {layers}"
        )
        return
    if cut is None:
        return
    name = "pipeline_layers" if p.pipeline_layers is not None else "pipeline_layout, in layers"
    if len(cut) != stages:
        remedy = f"--vpp {len(cut) // p.pp} or " if len(cut) % p.pp == 0 and p.pp > 1 else ""
        yield (
            f"{name} {_commas(cut)} has {len(cut)} entries, but there are pp·vpp = {p.pp}·{p.vpp} = {stages} "
            f"stages; use {remedy}{_commas(_even(layers, stages))}"
        )
    elif 0 in cut[1:-1] or cut == [0]:
        stage = cut.index(0, min(1, stages - 1))
        yield (
            f"{name} {_commas(cut)} leaves stage {stage} without a layer; only the first, which has the "
            f"embedding, and the last, which has the head, can do without: use {_commas(_even(layers, stages))}"
        )
    elif sum(cut) != layers:
        yield (
            f"{name} {_commas(cut)} adds up to {sum(cut)}, but num_layers is {layers}; use "
            f"{_commas(_even(layers, stages))}"
        )


def _even(layers: int, stages: int) -> list[int]:
    """A cut that works; later stages get the rest, not more than one layer more. With too few the ends go without."""
    if layers >= stages:
        return [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    return [int(layers == stages - 1), *[1] * (stages - 2), 0]


def _commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
