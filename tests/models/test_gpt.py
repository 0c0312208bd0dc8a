"""The model compared with a plain functional one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.models.attention import Attention
from megalite.models.gpt import GPTStage
from tests.models.plain_gpt import Plain, losses
from tests.models.stages import GPT, LLAMA, B, S, build, named, varied

FAMILIES = {
    "gpt2": varied(GPT, activation="gelu_tanh"),
    "gpt-erf-untied": varied(GPT, tie_embeddings=False),
    "gpt-no-bias-no-positions": varied(GPT, add_bias_linear=False, position_embedding_type="none"),
    "llama": LLAMA,
    "llama-one-group-tied": varied(LLAMA, num_query_groups=1, tie_embeddings=True),
    "llama-biases": varied(LLAMA, add_bias_linear=True),
    "nemotron": varied(LLAMA, rotary_percent=0.7, activation="squared_relu", norm_zero_centered=False),
    "gpt-j": varied(LLAMA, rotary_interleaved=True, activation="gelu_tanh"),
    "gpt-j-part": varied(LLAMA, rotary_interleaved=True, rotary_percent=0.7, num_query_groups=4),
    "layernorm-rope": varied(LLAMA, normalization="LayerNorm", activation="gelu", num_query_groups=4),
}


def shake(stage: GPTStage) -> None:
    """Move norms and biases away from one and zero, which would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 37, (B, S + 1), generator=generator)
    weights = torch.rand(B, S, dtype=torch.float64, generator=generator)
    return tokens[:, :-1], tokens[:, 1:], weights


def gradients(stage: GPTStage) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels, weights = batch()
    found = stage(tokens, stage.context((4, 5)), labels=labels)
    (found * weights).sum().backward()
    grads = {}
    for name, parameter in named(stage).items():
        assert parameter.grad is not None, name
        grads[name] = parameter.grad
    return found.detach(), grads


def test_rope_without_a_copy_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotating a group's queries without a copy gives the same bits as with a copy."""
    stage = build(LLAMA, dtype=torch.float32)
    shake(stage)
    of_projection = []
    for layer in stage.layers.values():
        turn = layer.attention._rope

        def seen(x: Tensor, cos: Tensor, sin: Tensor, turn: Callable[..., Tensor] = turn) -> Tensor:
            of_projection.append(x.untyped_storage().nbytes() > x.nbytes)
            return turn(x, cos, sin)

        layer.attention._rope = seen
    ours, grads = gradients(stage)
    assert len(of_projection) == 6 and all(of_projection)

    def copied(self: Attention, qkv: Tensor, b: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(qkv, b)
        return self._rope(q, cos, sin), self._rope(k, cos, sin), v.contiguous()

    monkeypatch.setattr(Attention, "_split_rotated", copied)
    again = build(LLAMA, dtype=torch.float32)
    shake(again)
    theirs, others = gradients(again)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(grad, others[name]) for name, grad in grads.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_the_plain_model(family: str) -> None:
    model = FAMILIES[family]
    stage = build(model)
    shake(stage)
    ours, grads = gradients(stage)

    plain = Plain(
        layers=3,
        heads=4,
        groups=model.query_groups,
        head_size=model.head_size,
        vocab_size=37,
        norm=model.normalization,
        eps=model.norm_epsilon,
        activation=model.activation,
        rope_base=model.rotary_base if model.position_embedding_type == "rope" else None,
        rotary_size=model.rotary_size,
        rotary_interleaved=model.rotary_interleaved,
        tied=model.tie_embeddings,
    )
    full = {name: parameter.detach().clone().requires_grad_() for name, parameter in named(stage).items()}
    tokens, labels, weights = batch()
    theirs = losses(full, tokens, labels, plain)
    (theirs * weights).sum().backward()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-10)
    for name, parameter in full.items():
        scale = parameter.grad.abs().max()
        assert scale > 0, f"{name} has no gradient"
        assert (grads[name] - parameter.grad).abs().max() <= 1e-10 * scale, name


def test_dropout_is_used_only_in_training() -> None:
    model = varied(GPT, hidden_dropout=0.3)
    stage, same = build(model), build(GPT)
    tokens, labels, _ = batch()

    def run(stage: GPTStage, ids: tuple[int, int]) -> Tensor:
        with torch.no_grad():
            return stage(tokens, stage.context(ids), labels=labels)

    dropped = run(stage, (4, 5))
    assert torch.equal(run(stage, (4, 5)), dropped)
    assert not torch.equal(run(stage, (6, 7)), dropped), "other samples must have other masks"
    stage.eval()
    assert torch.equal(run(stage, (4, 5)), run(same, (4, 5)))
