"""The pipeline programs of a run: lowered, proved, one for each number of microbatches."""

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.pipeline.ir.generators import build_schedule, forward_only
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.validate import validate


class Programs:
    """Every program that a run can need, made and validated at the start: a batch-size ramp-up has several.

    Raises:
        ConfigError: the schedule cannot take a number of microbatches that the run will have.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._made: dict[tuple[int, bool], Program] = {}
        for count in microbatch_counts(config):
            self.program(count)

    def program(self, microbatches: int, *, evaluation: bool = False) -> Program:
        """The program of a step (or of one evaluation batch) with that many microbatches."""
        key = (microbatches, evaluation)
        if key not in self._made:
            parallel = self._config.parallel
            if evaluation:
                schedule = forward_only(parallel.pp, parallel.vpp, microbatches)
            else:
                schedule = build_schedule(
                    parallel.pipeline_schedule,
                    num_ranks=parallel.pp,
                    num_chunks=parallel.vpp,
                    num_microbatches=microbatches,
                    group=parallel.microbatch_group_size_per_virtual_pipeline_stage,
                )
            program = lower(schedule)
            validate(program)
            self._made[key] = program
        return self._made[key]
