"""Initial weights and dropout masks are the same in every layout, with the right distribution."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megalite.kernels.layer_ops import masked_dropout
from megalite.tensor_parallel import random
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tensor_parallel.random import DropoutStream, fill_normal, keep_mask
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec

CPU = torch.device("cpu")


def whole(shape: tuple[int, ...], dim: int, *, name: str = "w", seed: int = 7, std: float = 1.0) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.float64)
    fill_normal(tensor, ShardSpec.whole(name, shape), dim=dim, std=std, seed=seed)
    return tensor


@pytest.mark.parametrize("shape, dim", [((192, 6), 0), ((6, 192), 1), ((2, 192, 6), 1), ((48,), 0), ((96, 5), 0)])
@pytest.mark.parametrize("parts", [2, 3, 4, 6])
def test_parts_of_every_split_equal_the_whole(shape: tuple[int, ...], dim: int, parts: int) -> None:
    pieces = []
    for index in range(parts):
        spec = ShardSpec.split("w", shape, dim=dim, index=index, parts=parts)
        piece = torch.empty(spec.shape, dtype=torch.float64)
        fill_normal(piece, spec, dim=dim, std=1.0, seed=7)
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces, dim), whole(shape, dim))


def test_threads_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole((650, 7), 0)
    monkeypatch.setattr(random, "WORTH_THREADS", 0)
    monkeypatch.setattr(random, "THREADS", 2)
    used: list[int] = []
    monkeypatch.setattr(random, "ThreadPoolExecutor", lambda count: used.append(count) or ThreadPoolExecutor(count))
    assert torch.equal(whole((650, 7), 0), expected)
    assert used == [2]


def test_distribution_of_values() -> None:
    values = whole((640, 500), 0, std=0.02)
    n = values.numel()
    assert abs(values.mean()) < 4 * 0.02 / n**0.5
    assert values.std().item() == pytest.approx(0.02, rel=4 / (2 * n) ** 0.5)
    within = (values.abs() < 0.02).double().mean().item()
    assert within == pytest.approx(0.6827, abs=4 * (0.22 / n) ** 0.5)


def test_blocks_names_and_seeds_are_independent() -> None:
    values = whole((256, 300), 0)
    others = [values[64:128], values[128:192], whole((256, 300), 0, name="v")[:64], whole((256, 300), 0, seed=8)[:64]]
    for other in others:
        correlation = (values[:64] * other).mean().item()
        assert abs(correlation) < 4 / (64 * 300) ** 0.5


def test_definition_is_unchanged() -> None:
    """Runs are repeated from their seed, so a seed's weights must never change."""
    values = whole((130, 2), 0, name="layers.0.mlp.up.weight", seed=1234).float()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "4bd425adf7fad3e5"


X = torch.ones(12, 4, 50, dtype=torch.float64)
STREAM = DropoutStream(seed=3, sample_ids=(10, 11, 12, 13))


def dropped(
    rows: list[int] | None = None,
    ids: tuple[int, ...] = (10, 11, 12, 13),
    *,
    site: str = "a",
    seed: int = 3,
    p: float = 0.3,
) -> Tensor:
    rows = list(range(12)) if rows is None else rows
    x = X[rows, : len(ids)]
    stream = DropoutStream(seed, ids)
    keep = keep_mask(x, p, site=site, stream=stream, rows=torch.tensor(rows))
    return masked_dropout(x, keep, p)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_masks_on_several_ranks_equal_one_rank(parts: int) -> None:
    step = 12 // parts
    pieces = [dropped(list(range(first, first + step))) for first in range(0, 12, step)]
    assert torch.equal(torch.cat(pieces), dropped())


def test_masks_depend_on_positions_not_order() -> None:
    zigzag = [0, 1, 2, 9, 10, 11]
    assert torch.equal(dropped(zigzag), dropped()[zigzag])


def test_mask_of_a_sample_does_not_depend_on_the_microbatch() -> None:
    whole_batch = dropped()
    for index, sample in enumerate((10, 11, 12, 13)):
        assert torch.equal(dropped(ids=(sample,))[:, 0], whole_batch[:, index])
    assert torch.equal(dropped(ids=(12, 10)), whole_batch[:, [2, 0]])


def test_share_and_scale_of_kept_elements() -> None:
    values = dropped(p=0.3)
    kept = values != 0
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / 0.7), rtol=1e-12, atol=0)
    n = values.numel()
    assert kept.double().mean().item() == pytest.approx(0.7, abs=4 * (0.21 / n) ** 0.5)


def test_sites_samples_and_seeds_are_independent() -> None:
    """Two independent masks differ in 2·p·(1-p) of their elements."""
    base = dropped() != 0
    others = {
        "site": dropped(site="b") != 0,
        "seed": dropped(seed=4) != 0,
        "sample": dropped(ids=(20, 21, 22, 23)) != 0,
        "next sample": dropped(ids=(11, 12, 13, 14)) != 0,
    }
    n = base.numel()
    for what, other in others.items():
        assert (base != other).double().mean().item() == pytest.approx(0.42, abs=4 * (0.25 / n) ** 0.5), what


def test_keep_mask_of_attention_probabilities() -> None:
    """Three heads on one rank, and the last of them on another."""
    mask, other = (torch.zeros(4, heads, 30, 40, dtype=torch.bool) for heads in (3, 1))
    STREAM.fill(mask, torch.arange(30), 0.1, site="layers.0.attention")
    STREAM.fill(other, torch.arange(30), 0.1, site="layers.0.attention", first_head=2)
    assert torch.equal(mask[:, 2:], other)
    assert mask.double().mean().item() == pytest.approx(0.9, abs=4 * (0.09 / mask.numel()) ** 0.5)
    assert not torch.equal(mask[:, 0], mask[:, 1])


def test_masks_are_unchanged() -> None:
    """A run resumed with another version drops the same elements."""
    mask = torch.zeros(4, 2, 30, 40, dtype=torch.bool)
    STREAM.fill(mask, torch.arange(30), 0.1, site="layers.0.attention")
    assert hashlib.sha256(mask.numpy().tobytes()).hexdigest()[:16] == "8eab4778c327f889"


GATED, DOWN = (4, 2, 192, 6), (4, 6, 192)


def made(
    shape: tuple[int, ...], dim: int, ep: tuple[int, int] = (0, 1), etp: tuple[int, int] = (0, 1)
) -> ShardedParameter:
    """Draw as rank `ep[0]` of `ep[1]` and `etp[0]` of `etp[1]`."""
    factory = ParameterFactory(
        tp=Group("tp", (0, 1), 1),
        ep=Group("ep", tuple(range(ep[1])), ep[0]),
        expert_tp=Group("expert-tp", tuple(range(etp[1])), etp[0]),
        seed=7,
        dtype=torch.float64,
        device=CPU,
    )
    return factory.parameter("experts", shape, shard_dim=dim, std=0.5, expert=True)


@pytest.mark.parametrize(("shape", "dim"), [(GATED, 2), (DOWN, 2), ((4, 192, 6), 1)])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 6)])
def test_rectangles_of_every_split_equal_the_whole(shape: tuple[int, ...], dim: int, ep: int, etp: int) -> None:
    rows = []
    for i in range(ep):
        parts = [made(shape, dim, (i, ep), (j, etp)) for j in range(etp)]
        for j, part in enumerate(parts):
            info, width, experts = part.info, shape[dim] // etp, 4 // ep
            assert info.expert and info.shard_dim == dim and not info.partial_over_tp
            assert info.spec.global_shape == shape
            assert info.spec.slice[0] == (i * experts, (i + 1) * experts)
            assert info.spec.slice[dim] == (j * width, (j + 1) * width)
        rows.append(torch.cat([part.detach() for part in parts], dim))
    assert torch.equal(torch.cat(rows), made(shape, dim).detach())


def test_definition_for_experts_is_unchanged() -> None:
    values = made((2, 70, 3), 1).detach().float()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "9d341039e00943b5"
