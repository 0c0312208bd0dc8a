"""`RunConfig`: everything that decides a run, in one frozen value."""

from dataclasses import dataclass, field

from megalite.config.compute import ComputeConfig
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import DataParallelConfig, ParallelConfig
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
