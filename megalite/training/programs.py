"""The pipeline programs of a run: lowered, proved, one for each number of microbatches."""

from megalite.config.batch import microbatch_counts
from megalite.config.run import RunConfig
from megalite.pipeline.ir.generators.forward_only import forward_only
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.validate import validate
from megalite.planner.pipeline import lowered, plan_stages, proved, schedule_of


class Programs:
    """Every program that a run can need; a batch-size ramp-up has several.

    At the start the smallest and the largest are made and proved, and it is asked whether the schedule takes the numbers
    in between; their programs follow when they are first used. (The largest needs most memory.)

    Raises:
        ConfigError: the schedule cannot take a number of microbatches that the run will have, is not valid, or needs
            more memory than pipeline_memory_limit.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.stages = plan_stages(config)
        """Every virtual stage of the model, in order."""
        self._made: dict[tuple[int, bool], Program] = {}
        first, *between = microbatch_counts(config)
        self.program(first)
        for count in between[:-1]:
            if config.parallel.schedule_name != "auto":  # takes every number, and is slow to build
                schedule_of(config, count)
        if between:
            self.program(between[-1])

    def program(self, microbatches: int, *, evaluation: bool = False) -> Program:
        """The program of a step (or of one evaluation batch) with that many microbatches."""
        key = (microbatches, evaluation)
        if key not in self._made:
            if evaluation:
                placement = tuple(plan.rank for plan in self.stages)
                program = lowered(self._config, forward_only(placement, microbatches))
                validate(program)
            else:
                program = lowered(self._config, schedule_of(self._config, microbatches))
                proved(self._config, program, self.stages)
            self._made[key] = program
        return self._made[key]
