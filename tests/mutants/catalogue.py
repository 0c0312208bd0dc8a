"""The mutants: what each part of training could get wrong without a crash, and the test that sees it.

If a mutant's text has changed, write the same fault into the new text; do not remove it.
"""

from tests.mutants import model_mutants as model
from tests.mutants import optimizer_mutants as optimizer
from tests.mutants import training_mutants as training

MUTANTS = (
    *training.OBJECTIVE,
    *training.GRADIENTS,
    *training.NORM_AND_UPDATE,
    *training.SHARDS_AND_PRECISION,
    *model.RANDOMNESS,
    *model.ATTENTION,
    *model.SINKS,
    *model.SHARED_KEYS,
    *model.EXPERTS,
    *model.SCHEDULES_AND_PLANS,
    *model.FILES,
    *optimizer.RATES_AND_AVERAGES,
    *optimizer.CLIPPED_HEADS,
    *optimizer.HOST_MEMORY,
    *optimizer.BALANCED,
    *optimizer.EXCHANGES,
)
