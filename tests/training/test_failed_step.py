"""A step that fails half way leaves nothing behind: the same step made again is the one that a clean run makes."""

from typing import Any

import pytest

from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config


class Broken(Exception):
    """What stops the step."""


def steps(context: RankContext, settings: dict[str, Any], fails: bool) -> list[tuple[float, float]]:
    """(loss, gradient norm) of two steps, the first of which may have failed before."""
    runner = Runner(build(context, tiny_config(2, **settings)))
    strategy = runner.replica.strategy
    if fails:
        launch = strategy.start_grad_sync

        def broken(stage: int) -> None:
            launch(stage)  # reductions are under way
            raise Broken

        strategy.start_grad_sync = broken  # type: ignore[method-assign]
        with pytest.raises(Broken):
            runner.step()
        strategy.start_grad_sync = launch  # type: ignore[method-assign]
    return [(result.loss, result.grad_norm) for result in (runner.step(), runner.step())]


@pytest.mark.parametrize(
    "settings", [{"dp": 2}, {"dp": 2, "dp_strategy": "distributed-optimizer", "ddp_bucket_size": 100}], ids=str
)
def test_reductions(settings: dict[str, Any]) -> None:
    assert run_ranks(2, steps, settings, True) == run_ranks(2, steps, settings, False)
