"""The load balancer for documents: equal tokens, almost equal visible pairs, depending only on the documents."""

import itertools
import random
import sysconfig
from pathlib import Path
from statistics import mean

import pytest

from megalite.context_parallel.tiles import Visibility, batch_tiles
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.packed_dataset import PackedDataset
from megalite.kernels.attention import TileKind
from megalite.topology import layout
from megalite.topology.layout import Spans, balanced_spans, joined_spans, sequence_spans, visible_pairs
from tests.data.token_files import write_by_layout

Starts = tuple[tuple[int, ...], ...]


def headtail(s: int, cp: int) -> tuple[Spans, ...]:
    return tuple(sequence_spans(s, cp_rank=rank, cp_size=cp) for rank in range(cp))


def areas(held: tuple[Spans, ...], starts: Starts, window: int | None = None) -> list[int]:
    rule = Visibility(window=window, document_starts=starts)
    found = []
    for queries in held:
        area = 0
        for samples, tiles in batch_tiles(rule, queries, joined_spans(held, len(held))[0]):
            for tile in tiles:
                rows, columns = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
                pairs = rows * columns if tile.kind is TileKind.FULL else rows * (rows + 1) // 2
                area += (samples.stop - samples.start) * tile.count * pairs
        found.append(area)
    return found


def imbalance(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_counted_pairs_equal_the_rule(window: int | None) -> None:
    starts = (0, 1, 4, 11)
    for a, b in itertools.combinations(range(17), 2):
        pairs = 0
        for p in range(a, b):
            first = max(start for start in starts if start <= p)
            pairs += sum(1 for c in range(first, p + 1) if window is None or p - c < window)
        assert visible_pairs((a, b), starts, window) == pairs


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 40])
def test_each_position_is_on_one_rank_with_equal_numbers(
    monkeypatch: pytest.MonkeyPatch, cp: int, window: int | None
) -> None:
    monkeypatch.setattr(layout, "SHORTEST_CHUNK", 4)
    s, drawn = 96 * cp, random.Random(cp)
    for _ in range(20):
        starts = tuple((0, *sorted(drawn.sample(range(1, s), drawn.randint(0, 9)))) for _ in range(2))
        held = balanced_spans(s, cp, starts, (window,))
        positions = [[p for span in spans for p in range(*span)] for spans in held]
        assert all(rows == sorted(rows) and len(rows) == s // cp for rows in positions)
        assert sorted(itertools.chain(*positions)) == list(range(s))
        assert imbalance(areas(held, starts, window)) < 1.25
        assert sum(areas(held, starts, window)) == sum(visible_pairs((0, s), each, window) for each in starts)


def test_layers_with_a_window_count_with_their_pairs() -> None:
    """One document of 6,144 tokens before short ones: most pairs belong to layers without a window."""
    starts = ((0, *range(6144, 8192, 64)),)
    held = balanced_spans(8192, 4, starts, (None, 64, 64))
    assert held == balanced_spans(8192, 4, starts, (64, None, 64)) != balanced_spans(8192, 4, starts, (64, 64, 64))
    both = [whole + 2 * local for whole, local in zip(areas(held, starts), areas(held, starts, 64), strict=True)]
    assert imbalance(both) < 1.01


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Python's modules, one token per byte, packed into samples of 131,072."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prefix = tmp_path_factory.mktemp("pages") / "pages"
    write_by_layout(prefix, [list(path.read_bytes()) for path in files])
    indexed = IndexedDataset(prefix)
    documents = range(len(indexed))
    return PackedDataset(
        indexed, documents=documents, seq_length=131072, seed=1, name="train", vocab_size=256, pad_token=0
    )


@pytest.mark.parametrize("cp", [4, 8])
def test_real_documents_are_balanced(pages: PackedDataset, cp: int) -> None:
    before, after = [], []
    for k in range(min(pages.samples_per_epoch, 12)):
        packing = pages.packing(k)
        starts = ((*packing.starts, packing.used) if packing.used < 131072 else packing.starts,)
        before.append(imbalance(areas(headtail(131072, cp), starts)))
        after.append(imbalance(areas(balanced_spans(131072, cp, starts), starts)))
    print(f"cp {cp}: {mean(before):.2f} -> {mean(after):.3f}, worst {max(before):.2f} -> {max(after):.3f}")
    assert max(after) < 1.05
    assert mean(after) - 1 < (mean(before) - 1) / 5
