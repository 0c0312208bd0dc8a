"""QK-clip: after a step the largest logits are at the limit. (tests/parity compares layouts.)"""

from typing import Any
from unittest import mock

import pytest
import torch

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.context_parallel.tiles import Visibility
from megalite.models import attention
from megalite.models.attention import clipped_rows
from megalite.optimizers.schedules import Progress
from megalite.training import step
from tests.support.ranks import RankContext
from tests.support.tiny import LATENT, LLAMA, Runner, build, tiny_config

Settings = dict[str, Any]

LIMIT = 0.05
CLIP: Settings = {"qk_clip": True, "qk_clip_threshold": LIMIT, "qk_clip_alpha": 0.3, "num_layers": 2}
SMALL: Settings = {**CLIP, "global_batch_size": 4, "micro_batch_size": 1}
STILL: Settings = {"lr": 1e-13, "weight_decay": 0.0, "clip_grad": 0.0}
ATTENTIONS: dict[str, Settings] = {
    "heads": {"sliding_window": 5},
    "groups": {**LLAMA, "reset_attention_mask": True, "add_qkv_bias": True},
    "latent": LATENT,
    "latent-queries": {**LATENT, "q_lora_rank": None, "qk_norm": False, "softmax_scale": 0.4},
}


def dense(q: torch.Tensor, k: torch.Tensor, visibility: Visibility) -> torch.Tensor:
    columns = torch.arange(q.shape[2])
    visible = attention.visible_keys(columns, columns, visibility)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / q.shape[3] ** 0.5
    return scores.masked_fill(~visible, -torch.inf).amax(dim=(0, 2, 3))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_logits_are_clipped_to_the_limit(kind: str) -> None:
    """Logits shrink through the clipped weights; the optimizer's step is too small to matter."""
    config = tiny_config(1, **{**ATTENTIONS[kind], **SMALL, **STILL, "qk_clip_threshold": LIMIT})
    runner = Runner(build(RankContext(0), config))
    batch, seen, compared = runner.loader.load(0, 4), [], []
    real_tiles, real_reduce = attention.largest_logits, step.batch_logits

    def tiles(q: torch.Tensor, k: torch.Tensor, *, visibility: Visibility, **how: Any) -> torch.Tensor:
        found = real_tiles(q, k, visibility=visibility, **how)
        torch.testing.assert_close(found, dense(q, k, visibility), rtol=1e-12, atol=1e-12)
        compared.append(found)
        return found

    def reduce(*arguments: Any) -> list[list[float]]:
        seen.append(real_reduce(*arguments))
        return seen[-1]

    with mock.patch.object(attention, "largest_logits", tiles), mock.patch.object(step, "batch_logits", reduce):
        for number in range(2):
            runner.stepper.step(batch, before=Progress(number, 4 * number), batch_size=4)
    assert len(compared) == 2 * 2 * 4, "each microbatch of each layer"
    # Only in the first layer, because the second layer's input changes with it.
    before, after = (torch.tensor(each[0], dtype=torch.float64) for each in seen)
    shared = config.model.num_attention_heads // config.model.query_groups
    largest = before.unflatten(0, (-1, shared)).amax(dim=1).repeat_interleave(shared)
    torch.testing.assert_close(after, before * (LIMIT / largest).clamp(max=1.0), rtol=1e-7, atol=1e-9)
    assert (largest > LIMIT).any() and not torch.equal(before, after)


def test_head_below_the_limit_is_unchanged() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2)
    config = OptimizerConfig(qk_clip=True, qk_clip_threshold=2.0, qk_clip_alpha=0.5)
    assert clipped_rows([[1.0, 2.0, -3.0, 1.5]], model, config) == {}
    found = clipped_rows([[1.0, 2.0, 0.1, 8.0]], model, config)
    assert found == {f"layers.0.attention.qkv.{kind}": [(8, 12, 0.5), (12, 14, 0.5)] for kind in ("weight", "bias")}
