"""`RunConfig`: everything that decides a run, in one frozen value, and what follows from several of its sections."""

import math
from dataclasses import dataclass, field
from pathlib import PurePath

from megalite.config.compute import ComputeConfig
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import DataParallelConfig, ParallelConfig, parse_pipeline_layout
from megalite.config.training import CheckpointConfig, LoggingConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One section a topic. The same settings are flat on the command line: field names are unique over sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def least_ranks(config: RunConfig) -> int:
    """tp·pp·cp·dp; where dp is open, with the least that experts leave."""
    p = config.parallel
    stage, grid = max(p.tp * p.cp, 1), max(p.expert_tp * p.ep, 1) if config.model.num_experts else 1
    return max(stage * p.pp * (p.dp or grid // math.gcd(stage, grid)), 1)


def profile_folder(config: RunConfig) -> str | None:
    """Where `profile` writes its folder: to run_dir, else to tensorboard_dir."""
    return config.logging.run_dir or config.logging.tensorboard_dir


def writers(config: RunConfig) -> list[str]:
    """Further writers of metrics: those that `metrics` names, and wandb where there is a project to write to."""
    named, project = config.logging.metrics, config.logging.wandb_project
    return named if project is None or "wandb" in named else [*named, "wandb"]


def saves(config: RunConfig) -> bool:
    """Something in the settings means that checkpoints are written: to `save`, or else below `run_dir`."""
    t = config.training
    ends = (t.exit_interval, t.exit_duration_in_mins, t.exit_file)
    return config.checkpoint.save_interval is not None or any(end is not None for end in ends)


def save_folder(config: RunConfig) -> str | None:
    """Where checkpoints go: to `save`; not given, below `run_dir`; None if nothing is saved."""
    save, run_dir = config.checkpoint.save, config.logging.run_dir
    if save is not None or run_dir is None or not saves(config):
        return save
    return str(PurePath(run_dir) / "checkpoints")


def stage_layers(config: RunConfig) -> list[int] | None:
    """The cut that the user gave, if any: layers of each stage."""
    p = config.parallel
    return p.pipeline_layers if p.pipeline_layout is None else parse_pipeline_layout(p.pipeline_layout)


def attention_in_tiles(config: RunConfig) -> str | None:
    """The setting for which attention is computed in pieces that are merged, or None."""
    window, parallel = config.model.sliding_window, config.parallel
    if window is not None and window < config.training.seq_length:
        return f"sliding_window {window}"
    if config.data.packs_documents:
        return "sft" if config.data.sft else "packing best-fit"
    if config.data.reset_attention_mask:
        return "reset_attention_mask"
    if parallel.cp > 1 and parallel.cp_comm_type == "p2p":
        return f"cp {parallel.cp} with cp_comm_type p2p"
    return None
