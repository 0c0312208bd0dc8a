"""The objective is the mean over the unmasked tokens of the global batch, whoever holds them."""

from typing import Any

import pytest
import torch

from megalite.data.loader import Microbatch
from megalite.topology.group import Group
from megalite.training.step import masked_loss, token_denominator
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

CPU = torch.device("cpu")


def microbatch(mask: list[list[float]]) -> Microbatch:
    tokens = torch.zeros(len(mask), len(mask[0]), dtype=torch.int64)
    return Microbatch(tokens, tokens, torch.tensor(mask), tuple(range(len(mask))))


def test_a_batch_without_a_token_has_the_loss_zero() -> None:
    batch = microbatch([[0, 0, 0]])
    total = token_denominator([batch], dp=Group.solo("dp"), device=CPU)
    assert masked_loss(torch.full((1, 3), 5.0), batch.loss_mask, total).item() == 0.0


def counted(context: RankContext) -> float:
    masks = [[[1.0, 1.0, 1.0]], [[1.0, 0.0, 0.0]]]
    group = context.topology(dp=2).dp
    return float(token_denominator([microbatch(masks[group.rank])], dp=group, device=CPU))


def test_the_denominator_is_that_of_all_ranks() -> None:
    assert run_ranks(2, counted) == [4.0, 4.0]


def test_terms_add_up_to_the_mean_over_tokens() -> None:
    """Not to the mean of the microbatches' means, which would be (1 + 4)/2 here."""
    batches = [microbatch([[1, 1, 1]]), microbatch([[0, 0, 1]])]
    losses = [torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[9.0, 9.0, 4.0]])]
    total = token_denominator(batches, dp=Group.solo("dp"), device=CPU)
    terms = [masked_loss(loss, batch.loss_mask, total) for loss, batch in zip(losses, batches, strict=True)]
    assert sum(term.item() for term in terms) == pytest.approx(7.0 / 4.0)


def losses_by_token(context: RankContext, settings: dict[str, Any]) -> float:
    """The mean that a step must report, from the model's losses of each token."""
    runner = Runner(build(context, tiny_config(1, **settings)))
    stage = runner.replica.stages[0]
    total, count = 0.0, 0.0
    with torch.no_grad():
        for batch in runner.loader.load(0, 8):
            losses = stage(batch.tokens, stage.context(batch.sample_ids), labels=batch.labels)
            total += float((losses * batch.loss_mask).sum())
            count += float(batch.loss_mask.sum())
    return total / count


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_the_logged_loss_is_the_mean_over_tokens(micro_batch_size: int) -> None:
    context, settings = RankContext(0, {}), {"micro_batch_size": micro_batch_size}
    expected = losses_by_token(context, settings)
    runner = Runner(build(context, tiny_config(1, **settings)))
    assert runner.evaluate() == pytest.approx(expected, rel=1e-13)
    assert runner.step().loss == pytest.approx(expected, rel=1e-13)
