"""Attention with dropout uses the causal softmax kernel only for the plain causal mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.attention import causal_softmax_backward, causal_softmax_forward
from megalite.models.attention import Attention
from tests.models.stages import GPT, B, S, build, varied


@pytest.mark.parametrize(
    "changes, documents, calls",
    [
        ({"attention_dropout": 0.2}, None, 1),
        ({"attention_dropout": 0.2, "sliding_window": 4}, None, 0),
        ({"attention_dropout": 0.2}, ((0, 3), (0, 5)), 0),
    ],
    ids=["causal", "window", "documents"],
)
def test_kernel_is_used_only_with_the_causal_mask(
    changes: dict[str, Any], documents: tuple[tuple[int, ...], ...] | None, calls: int
) -> None:
    stage = build(varied(GPT, **changes))
    tokens = torch.randint(0, 37, (B, S), generator=torch.Generator().manual_seed(2))
    seen, results = [], []

    def forward(scores: Tensor, scale: float) -> Tensor:
        seen.append("forward")
        assert scores.shape[-2:] == (S, S)
        return causal_softmax_forward(scores, scale)

    def backward(*given: Any) -> Tensor:
        seen.append("backward")
        return causal_softmax_backward(*given)

    for softmax in ((forward, backward), None):
        for block in stage.layers.values():
            assert isinstance(block.attention, Attention)
            block.attention._softmax = softmax
        stage.zero_grad()
        losses = stage(tokens, stage.context((4, 5), attention_documents=documents), labels=tokens)
        losses.sum().backward()
        results.append([losses.detach(), *(parameter.grad.clone() for parameter in stage.parameters())])
    assert seen == calls * (3 * ["forward"] + 3 * ["backward"])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_kernel_is_not_used_without_dropout() -> None:
    assert all(block.attention._softmax is None for block in build(GPT).layers.values())
