"""Compare rank lists of groups with Megatron-LM's documented examples and with their definition; test slices of tensors
and spans of sequences."""

import itertools

import pytest

from megalite.config.errors import ConfigError
from megalite.topology.layout import ParallelLayout, ShardSpec, sequence_spans


def test_documented_groups_of_sixteen_ranks() -> None:
    layout = ParallelLayout(tp=2, pp=4, dp=2)
    assert layout.groups("tp") == tuple((r, r + 1) for r in range(0, 16, 2))
    assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert layout.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert layout.groups("model") == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))
    assert layout.groups("embedding") == ((0, 12), (1, 13), (2, 14), (3, 15))


def test_groups_in_the_other_order() -> None:
    layout = ParallelLayout(tp=2, pp=4, dp=2, order="tp-cp-ep-pp-dp")
    assert layout.groups("dp") == tuple((r, r + 8) for r in range(8))
    assert layout.groups("pp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))


def test_context_parallel_groups() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2)
    assert layout.groups("cp")[:2] == ((0, 2), (1, 3))
    assert layout.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert layout.groups("dp-cp")[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.groups("tp-cp")[0] == (0, 1, 2, 3)
    assert layout.groups("pp") == tuple((r, r + 8) for r in range(8))


def test_groups_of_head_exchange_and_key_ring() -> None:
    layout = ParallelLayout(tp=2, cp=4, cp_heads=2, dp=2)
    assert layout.groups("cp-heads") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert layout.groups("cp-keys")[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    for whole, alone in (("cp-heads", "cp-keys"), ("cp-keys", "cp-heads")):
        plain = ParallelLayout(tp=2, cp=4, cp_heads=4 if whole == "cp-heads" else 1)
        assert plain.groups(whole) == plain.groups("cp")
        assert plain.groups(alone) == tuple((rank,) for rank in range(8))


def test_experts_have_a_separate_grid() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.groups("expert-dp")[:4] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.expert_dp == 2


@pytest.mark.parametrize("order", ParallelLayout.ORDERS)
def test_groups_follow_their_axes(order: str) -> None:
    axes = {
        "tp": {"tp"},
        "cp": {"cp"},
        "dp": {"dp"},
        "pp": {"pp"},
        "dp-cp": {"dp", "cp"},
        "model": {"tp", "pp"},
        "tp-cp": {"tp", "cp"},
        "tp-dp-cp": {"tp", "dp", "cp"},
        "world": {"tp", "cp", "dp", "pp"},
    }
    for tp, cp, dp, pp in itertools.product((1, 2, 3), (1, 2), (1, 3), (1, 2)):
        layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
        for kind, free in axes.items():
            groups = layout.groups(kind)
            assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
            for ranks in groups:
                assert list(ranks) == sorted(ranks)
                places = [layout.coordinate(rank)._asdict() for rank in ranks]
                assert all(place[axis] == places[0][axis] for place in places for axis in place if axis not in free)
        for rank in range(layout.world_size):
            assert layout.rank(**layout.coordinate(rank)._asdict()) == rank


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, cp=2, dp=3, pp=2),
        ParallelLayout(tp=2, cp=6, cp_heads=3, dp=2),
        ParallelLayout(tp=2, cp=2, dp=3, pp=2, order="tp-cp-ep-pp-dp"),
        ParallelLayout(tp=2, cp=2, dp=2, pp=3, ep=4, etp=1, placement=(1, 0, 2, 1)),
        ParallelLayout(tp=2, pp=2, dp=2, placement=(0, 1, 1, 0)),
        ParallelLayout(tp=2, cp=2, dp=3, pp=2, instances=3),
        ParallelLayout(tp=2, cp=2, dp=4, pp=2, ep=4, etp=1, instances=2, order="tp-cp-ep-dp-pp"),
    ],
)
def test_groups_of_a_rank(layout: ParallelLayout) -> None:
    for kind in layout.kinds:
        groups = layout.groups(kind)
        assert layout.group_count(kind) == len(groups)
        assert layout.groups(kind, 2) == groups[:2]
        for rank in range(layout.world_size):
            own = [ranks for ranks in groups if rank in ranks]
            assert layout.group_of(kind, rank) == (own[0] if own else None)


def test_groups_of_instances() -> None:
    """The groups are those of Megatron-LM's initialize_model_parallel for 16 ranks in two instances."""
    layout = ParallelLayout(tp=2, dp=8, ep=2, etp=1, instances=2)
    assert layout.groups("intra-dp-cp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.groups("inter-dp-cp") == tuple((rank, rank + 8) for rank in range(8))
    assert layout.groups("intra-expert-dp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    alone = ParallelLayout(tp=2, dp=4, ep=4, etp=1, instances=2)
    assert alone.groups("intra-expert-dp") == tuple((rank,) for rank in range(8))
    assert alone.groups("inter-expert-dp") == alone.groups("expert-dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    with_cp = ParallelLayout(cp=2, dp=2, pp=2, instances=2, order="tp-cp-ep-pp-dp")
    assert with_cp.groups("intra-dp-cp") == ((0, 1), (2, 3), (4, 5), (6, 7)) == with_cp.groups("cp")
    assert "intra-dp-cp" not in ParallelLayout(dp=2).kinds


def test_huge_layouts_are_not_enumerated() -> None:
    layout = ParallelLayout(tp=8, cp=4, pp=64, dp=500_000, ep=64, etp=1)
    assert layout.world_size == 1_024_000_000
    assert layout.group_count("tp") == 128_000_000
    assert layout.groups("tp", 2) == (tuple(range(8)), tuple(range(8, 16)))
    assert layout.groups("ep", 1) == (tuple(range(64)),)
    first = 999_999_999 // 64 * 64
    assert layout.group_of("ep", 999_999_999) == tuple(range(first, first + 64))
    assert layout.group_of("tp", 999_999_999) == tuple(range(999_999_992, 1_000_000_000))


def test_pipeline_edges_form_a_ring_in_both_directions() -> None:
    assert ParallelLayout(tp=2).pipeline_edges() == ()
    assert set(ParallelLayout(pp=2).pipeline_edges()) == {(0, 1), (1, 0)}
    assert set(ParallelLayout(pp=3).pipeline_edges()) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}


def test_invalid_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp is 0; a parallel size is at least 1"):
        ParallelLayout(tp=0)


def test_neighbours_and_ends_of_a_placement() -> None:
    vee = ParallelLayout(tp=2, pp=4, placement=(0, 1, 2, 3, 3, 2, 1, 0))
    assert set(ParallelLayout(pp=3, placement=(0, 1, 2)).pipeline_edges()) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    down = {(0, 2), (2, 4), (4, 6)}
    for shift in (0, 1):
        ours = {edge for edge in vee.pipeline_edges() if edge[0] % 2 == shift}
        assert ours == {(a + shift, b + shift) for edge in down for a, b in (edge, edge[::-1])}
    # First and last stage are on one rank, so the embedding needs no second copy.
    assert vee.groups("embedding") == ((0,), (1,))
    loop = ParallelLayout(pp=3, placement=(0, 1, 2, 0, 1, 2))
    assert set(loop.pipeline_edges()) == set(ParallelLayout(pp=3).pipeline_edges())
    assert loop.groups("embedding") == ((0, 2),)
    # A user's placement: the first stage need not be on the first rank.
    own = ParallelLayout(pp=3, placement=(2, 0, 0, 1))
    assert set(own.pipeline_edges()) == {(2, 0), (0, 2), (0, 1), (1, 0)}
    assert own.groups("embedding") == ((1, 2),)


def test_slices_of_tensors() -> None:
    whole = ShardSpec.whole("w", (4, 6))
    assert whole.slice == ((0, 4), (0, 6))
    part = ShardSpec.split("w", (4, 6), dim=1, index=2, parts=3)
    assert part.slice == ((0, 4), (4, 6))
    assert part.shape == (4, 2)
    with pytest.raises(ValueError, match=r"w: dimension 0 of \(4, 6\) does not divide by 3"):
        ShardSpec.split("w", (4, 6), dim=0, index=0, parts=3)
    with pytest.raises(AssertionError):
        ShardSpec(name="w", global_shape=(4,), slice=((2, 5),))


def test_spans_of_four_ranks_and_of_one() -> None:
    spans = [sequence_spans(16, cp_rank=rank, cp_size=4) for rank in range(4)]
    assert spans == [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10))]
    assert sequence_spans(7, cp_rank=0, cp_size=1) == ((0, 7),)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_positions_are_divided_with_equal_work(cp: int) -> None:
    s = 48
    held = [
        [p for first, stop in sequence_spans(s, cp_rank=rank, cp_size=cp) for p in range(first, stop)]
        for rank in range(cp)
    ]
    assert sorted(p for rows in held for p in rows) == list(range(s))
    for rows in held:
        assert rows == sorted(rows)
        assert len(rows) == s // cp
    for step in range(cp):
        # All ranks have equally many pairs in every step of a ring, so none waits for another.
        pairs = {sum(c <= p for p in held[rank] for c in held[rank - step]) for rank in range(cp)}
        assert len(pairs) == 1
