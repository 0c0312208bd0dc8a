"""Linear attention, by the delta rule and as a state space: chunks compute the recurrence, documents and padding leave no
trace, and a cached state gives the logits of the whole text."""

import pytest
import torch
from torch import Tensor

from megalite.config.model import LINEAR_CHUNK as CHUNK
from megalite.config.model import ModelConfig
from megalite.kernels.linear_attention import linear_attention
from megalite.models.context import KeyValueCache
from megalite.models.linear_attention import _Convolution
from megalite.models.shapes import is_hidden_matrix, layer_forward_flops
from megalite.topology.group import Group
from tests.models.stages import LLAMA, build, continued, named, varied
from tests.support.tiny import words

NEXT: ModelConfig = varied(
    LLAMA,
    **words(
        "attention_output_gate experimental_attention_variant=gated_delta_net linear_attention_freq=[1,0,1] "
        "linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=6 linear_value_head_dim=8 "
        "linear_conv_kernel_dim=3"
    ),
)
MAMBA: ModelConfig = varied(NEXT, experimental_attention_variant="mamba2", no_mlp_freq=[0, 0, 1])
KINDS = pytest.mark.parametrize("model", [NEXT, MAMBA], ids=["delta", "mamba2"])
CORRECTS = pytest.mark.parametrize("corrects", [True, False], ids=["delta", "space"])
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(length: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """q, k, v, decays and write strengths of two sequences, two key heads and three value heads for each."""
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, 2, length, 4, generator=generator, dtype=dtype) for _ in range(2))
    v = torch.randn(2, 2, 3, length, 5, generator=generator, dtype=dtype)
    strengths, decays = (torch.randn(2, 2, 3, length, generator=generator, dtype=dtype) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    return q, k, v, -decays.exp(), strengths.sigmoid()


def attend(*given: Tensor, corrects: bool, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return linear_attention(*given[:4], strengths=given[4] if corrects else None, state=state)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, strengths: Tensor, state: Tensor, *, corrects: bool
) -> tuple[Tensor, Tensor]:
    """The definition, token by token and head by head."""
    out, state = torch.zeros_like(v), state.clone()
    for at in torch.cartesian_prod(*(torch.arange(size) for size in v.shape[:3])).tolist():
        b, key, value = at
        for t in range(v.shape[3]):
            old = state[b, key, value] * decays[b, key, value, t].exp()
            added = v[b, key, value, t]
            if corrects:
                added = strengths[b, key, value, t] * (added - old.T @ k[b, key, t])
            state[b, key, value] = old + torch.outer(k[b, key, t], added)
            out[b, key, value, t] = state[b, key, value].T @ q[b, key, t]
    return out, state


@CORRECTS
@pytest.mark.parametrize("length", [1, 3, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_chunks_equal_the_recurrence(length: int, corrects: bool) -> None:
    given = inputs(length)
    start = torch.randn(2, 2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for state in (None, start):
        out, last = attend(*given, state=state, corrects=corrects)
        wanted = recurrence(*given, torch.zeros_like(start) if state is None else state, corrects=corrects)
        torch.testing.assert_close((out, last), wanted, rtol=1e-10, atol=1e-12)


@CORRECTS
def test_gradients_are_those_of_the_function(corrects: bool) -> None:
    """By finite differences in one chunk; over several, those of a sequence in two parts that the state connects."""
    used = 5 if corrects else 4
    leaves = [each[:1].detach().requires_grad_() for each in inputs(5)[:used]]
    assert torch.autograd.gradcheck(lambda *given: attend(*given, corrects=corrects)[0], leaves)
    length, cut = 2 * CHUNK, 50
    grads: list[list[Tensor]] = []
    for ends in ([(0, length)], [(0, cut), (cut, length)]):
        q, k, v, decays, strengths = leaves = [each.requires_grad_() for each in inputs(length)]
        state, total = None, torch.zeros((), dtype=torch.float64)
        for first, stop in ends:
            part = slice(first, stop)
            given = q[:, :, part], k[:, :, part], v[:, :, :, part], decays[..., part], strengths[..., part]
            out, state = attend(*given, state=state, corrects=corrects)
            total = total + out.square().sum()
        grads.append(list(torch.autograd.grad(total, leaves[:used])))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_gradients_of_the_convolution() -> None:
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((3 + 5, 2, 2, 3), (2, 3, 4), (2, 3)))
    offsets = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]).t()
    for seen in (None, [(offsets >= distance)[..., None, None] for distance in (3, 2, 1)]):
        leaves = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), seen
        assert torch.autograd.gradcheck(_Convolution.apply, leaves)


@CORRECTS
def test_long_decays_do_not_overflow(corrects: bool) -> None:
    q, k, v, decays, strengths = (each.float() for each in inputs(CHUNK))
    out, state = attend(q, k, v, 200 * decays, strengths, corrects=corrects)
    assert out.isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize("starts", [((0, 3, 70), (0,)), ((0, CHUNK), (0, CHUNK - 1, CHUNK + 1)), ((0, 1, 2), (0, 149))])
@KINDS
def test_documents_do_not_see_each_other(starts: tuple[tuple[int, ...], ...], model: ModelConfig) -> None:
    """A sample of documents is computed as each document alone, in both operations that see earlier tokens."""
    length = 150
    model = varied(
        *(model,),
        num_layers=1,
        linear_attention_freq=[1],
        no_mlp_freq=None,
        max_position_embeddings=length,
        position_embedding_type="none",
    )
    stage = build(varied(model, linear_attention_freq=[2]), seq_length=length).eval()
    tokens = torch.randint(0, 37, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = stage(tokens, stage.context(attention_documents=starts))
        for row, first in enumerate(starts):
            for start, stop in zip(first, (*first[1:], length), strict=True):
                alone = stage(tokens[row : row + 1, start:stop], stage.context(seq_length=stop - start))
                torch.testing.assert_close(together[start:stop, row], alone[:, 0], rtol=1e-9, atol=1e-11)


@KINDS
def test_cached_state_gives_the_logits_of_the_whole_text(model: ModelConfig) -> None:
    """One prompt is shorter than the convolution."""
    stage, prompts, wanted = continued(model, [70, 1, 20], 6)
    cache = KeyValueCache(limit=80)
    with_gradients = stage(prompts, stage.generation_context(70, [70, 1, 20]), cache=cache)
    torch.testing.assert_close(with_gradients[69, 0], wanted[0][69], rtol=1e-9, atol=1e-11)
    assert cache.state("layers.0.attention")[1].shape[0] == 3


def test_initial_values_are_the_same_in_every_layout() -> None:
    """Decay rates are uniform in [1, 16], filters have the variance of torch's convolution."""
    model = varied(NEXT, linear_num_key_heads=64, linear_num_value_heads=512, linear_value_head_dim=2)
    whole = named(build(model, cut=(0, 1)))
    rates = whole["layers.0.attention.a_log"].detach().exp()
    assert rates.min() >= 1 and rates.max() <= 16
    assert rates.mean().item() == pytest.approx(8.5, rel=0.05) and rates.std().item() == pytest.approx(
        15 / 12**0.5, rel=0.05
    )
    assert whole["layers.0.attention.conv.weight"].std().item() == pytest.approx(1 / 3, rel=0.05)
    for rank in range(2):
        part = named(build(model, cut=(0, 1), tp=Group("tp", (0, 1), rank)))
        for name in ("a_log", "dt_bias", "conv.weight", "in_proj.weight"):
            one, all_ = part[f"layers.0.attention.{name}"], whole[f"layers.0.attention.{name}"]
            assert torch.equal(one, all_.chunk(2)[rank])


def test_initial_steps_of_mamba2_are_log_uniform() -> None:
    """Between 0.001 and 0.1; a residual branch less per layer without an MLP gives larger projections into the stream."""
    model = varied(MAMBA, linear_num_key_heads=64, linear_num_value_heads=512, linear_value_head_dim=2)
    whole = named(build(model, cut=(0, 1)))
    steps = torch.nn.functional.softplus(whole["layers.0.attention.dt_bias"].detach()).log10()
    assert steps.min() >= -3 and steps.max() <= -1
    assert steps.mean().item() == pytest.approx(-2, rel=0.05) and steps.std().item() == pytest.approx(
        1 / 3**0.5, rel=0.05
    )
    assert whole["layers.0.attention.out.weight"].std().item() == pytest.approx(model.hidden_std / 5**0.5, rel=0.05)


def test_muon_and_fp8_leave_the_convolution_alone() -> None:
    assert is_hidden_matrix("layers.0.attention.in_proj.weight", (8, 4), decay=True)
    assert not is_hidden_matrix("layers.0.attention.conv.weight", (8, 4), decay=True)


def test_flops_of_a_layer_do_not_depend_on_the_length() -> None:
    # Projections of 2·(6 + 6 + 2·8·2 + 2·2) rows to and 32 columns from h 16, filters, four products with a state of 6·8.
    attention = 2 * (2 * 48 * 16 + 2 * 28 * 3 + 16 * 32) + 4 * 2 * 4 * 6 * 8
    mlp = 2 * 3 * 16 * 20
    assert [layer_forward_flops(NEXT, 0, s) for s in (10, 1000)] == [attention + mlp] * 2
    assert layer_forward_flops(NEXT, 1, 1000) > layer_forward_flops(NEXT, 1, 10)
