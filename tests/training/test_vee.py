"""Both ends of the model on one rank, as in a V: one embedding serves both."""

from typing import Any

import pytest

from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config


def look(context: RankContext, settings: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of the word embedding, after a step."""
    config = tiny_config(2, **settings)
    replica = build(context, config)
    Runner(replica).step()
    held = [
        placed.parameter
        for bucket in replica.strategy.all_buckets()
        for placed in bucket.placed
        if placed.parameter.info.spec.name == "embedding.word.weight"
    ]
    first, last = replica.stages.get(0), replica.stages.get(3)
    shared = (
        first is not None
        and last is not None
        and first.embedding is not None
        and last.head is not None
        and first.embedding.word.weight is last.head.weight
    )
    group = replica.topology.embedding
    return {"held": len(held), "shared": shared, "group": None if group is None else group.size}


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_tied_embedding_is_there_once(schedule: str) -> None:
    settings = {"pp": 2, "vpp": 2, "pipeline_schedule": schedule}
    vee = run_ranks(2, look, settings)
    assert vee == [{"held": 1, "shared": True, "group": 1}, {"held": 0, "shared": False, "group": None}]
    untied = run_ranks(2, look, {**settings, "tie_embeddings": False})
    assert [rank["shared"] for rank in untied] == [False, False]
    loop = run_ranks(2, look, {"pp": 2, "vpp": 2})
    assert loop == [{"held": 1, "shared": False, "group": 2}] * 2
