"""Rules about runs whose number of ranks may change: nothing but the layout may depend on it."""

from pathlib import PurePath

from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.rules.effect import refuse_idle, shown
from megalite.config.run import RunConfig

STRATEGIES = ("all-reduce", "distributed-optimizer", "fully-sharded")
"""The strategies that the planner chooses among."""
_OF_ONE_LAYOUT = (
    *("pipeline_schedule_file", "pipeline_costs", "pipeline_memory_limit", "recompute_ahead"),
    *("recompute_method", "recompute_num_layers"),
)


def check_elastic(config: RunConfig, explicit: frozenset[str]) -> None:
    """An elastic run goes on from what it saves, and its numbers do not depend on how many ranks there are.

    Raises:
        ConfigError: naming what does, before anything is lost to it.
    """
    p, c, t = config.parallel, config.checkpoint, config.training
    if not p.elastic:
        remedy = "add --elastic"
        refuse_idle(config, explicit, ["elastic_cluster"], cause="without elastic", remedy=remedy)
        return
    if t.global_batch_size is None:
        raise ConfigError(
            "elastic needs global_batch_size: by default it is micro_batch_size·dp, which depends on the ranks; add e.g. "
            "--global-batch-size 512"
        )
    if c.save_interval is None or c.load is None:
        missing = "save_interval" if c.save_interval is None else "load"
        raise ConfigError(
            f"elastic needs {missing}: a run whose ranks change goes on from its last checkpoint; add --save-interval 100 "
            "--load FOLDER --fresh-if-missing"
        )
    run_dir = config.logging.run_dir
    save = c.save or (None if run_dir is None else f"{run_dir}/checkpoints")
    if save is not None and PurePath(save) != PurePath(c.load):
        raise ConfigError(
            f"elastic goes on from what it saves, but load is {c.load} and save {save}; use --load {save}"
        )
    for name in ("finetune", "ckpt_step"):
        value = getattr(c, name)
        if value not in (None, False):
            raise ConfigError(
                f"elastic and {shown(config, name)} contradict: each restart would begin there again; remove one of them"
            )
    _check_numbers(config)
    for name in _OF_ONE_LAYOUT:
        if name in explicit:
            raise ConfigError(
                f"elastic and {shown(config, name)} contradict: that is for one layout; remove one of them"
            )
    if p.pipeline_schedule == "auto":
        raise ConfigError(
            "elastic and pipeline_schedule auto contradict: that is built for one layout; use --pipeline-schedule 1f1b, or "
            "leave it out"
        )


def _check_numbers(config: RunConfig) -> None:
    p, d, o = config.parallel, config.data_parallel, config.optimizer
    depends = None
    if p.dp_strategy not in STRATEGIES:
        depends, remedy = f"dp_strategy {p.dp_strategy}", f"use one of {', '.join(STRATEGIES)}"
    elif d.grad_compression != "none":
        depends, remedy = f"grad_compression {d.grad_compression}", "use none"
    elif o.optimizer in ONEBIT_OPTIMIZERS:
        depends, remedy = f"optimizer {o.optimizer}", "use adam"
    if depends is not None:
        raise ConfigError(
            f"elastic and {depends} contradict: its numbers, or what a rank has of its own, depend on the number of ranks; "
            f"{remedy}, or leave out --elastic"
        )
