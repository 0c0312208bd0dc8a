"""Tensors written by any number of ranks in any split can be read in any other split."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.load import find_checkpoint
from megalite.checkpoint.save import SavedTensor, preamble, save_checkpoint
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec
from tests.checkpoint.samples import (
    CPU,
    SOLO,
    Scheme,
    assert_holds,
    columns,
    cut,
    find,
    on_threads,
    rows,
    sample_tensors,
    save_as,
    saved,
    staggered,
    whole_on_one,
)
from tests.support.ranks import RankContext, run_ranks

SCHEMES: list[Scheme] = [rows, columns, staggered, whole_on_one]
WRITERS = [(SCHEMES[0], 1), *itertools.product(SCHEMES, (2, 5))]


def test_one_rank_round_trip(tmp_path: Path) -> None:
    path = save_as(tmp_path, SOLO, step=3, seed=4)
    assert path == tmp_path / "step-0000003"
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "optimizer-00000.safetensors",
        "weights-00000.safetensors",
    ]
    assert (tmp_path / "latest").read_text() == "step-0000003\n"
    checkpoint = find(tmp_path)
    assert_holds(checkpoint, seed=4)
    assert checkpoint.path == path
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.counters, manifest.tokenizer) == (3, {"consumed_samples": 24}, "0" * 64)
    assert (manifest.config, manifest.layout) == ({"model": {"hidden_size": 8}}, {"tp": 1})


@pytest.mark.parametrize(("scheme", "ranks"), WRITERS)
def test_every_split_can_be_read_as_every_other(tmp_path: Path, scheme: Scheme, ranks: int) -> None:
    paths = on_threads(ranks, lambda group: save_as(tmp_path, group, step=1, scheme=scheme))
    assert set(paths) == {tmp_path / "step-0000001"}
    checkpoint = find(tmp_path)
    assert_holds(checkpoint)
    choose = random.Random(ranks)
    for identity, full in sample_tensors().items():
        shape = tuple(full.shape)
        key = saved(identity, full, tuple((0, size) for size in shape)).key
        wanted = [bounds for other, count in WRITERS for bounds in other(shape, count) if bounds is not None]
        for _ in range(20):
            wanted.append(tuple((a, b) for a, b in (sorted(choose.choices(range(size + 1), k=2)) for size in shape)))
        for bounds in wanted:
            read = checkpoint.read(key, bounds, device=CPU)
            assert torch.equal(read, cut(full, bounds)), (key, bounds)
    wide = checkpoint.read("weight:norm.weight", ((1, 6),), device=CPU, dtype=torch.float64)
    assert torch.equal(wide, sample_tensors()["weight", "", "norm.weight"][1:6].double())


def test_tensors_that_were_read_can_be_changed(tmp_path: Path) -> None:
    """Writing into a tensor that was read changes neither the file nor later reads."""
    save_as(tmp_path, SOLO, step=1)
    checkpoint = find(tmp_path)
    for key in checkpoint.manifest.tensors:
        checkpoint.read(key, device=CPU).fill_(7)
    assert_holds(checkpoint)
    assert_holds(find(tmp_path))


def test_slice_needs_only_the_files_that_hold_it(tmp_path: Path) -> None:
    on_threads(2, lambda group: save_as(tmp_path, group, step=1, scheme=rows))
    checkpoint = find(tmp_path)
    (checkpoint.path / "weights-00001.safetensors").unlink()
    full = sample_tensors()["weight", "", "embedding.weight"]
    assert torch.equal(checkpoint.read("weight:embedding.weight", ((0, 6), (2, 8)), device=CPU), full[:6, 2:])
    with pytest.raises(CheckpointError, match=r"weights-00001\.safetensors"):
        checkpoint.read("weight:embedding.weight", ((0, 7), (2, 8)), device=CPU)


def test_missing_key_or_bounds_is_an_error(tmp_path: Path) -> None:
    save_as(tmp_path, SOLO, step=1)
    checkpoint = find(tmp_path)
    assert checkpoint.has("weight:norm.weight") and not checkpoint.has("weight:norm.weigth")
    with pytest.raises(CheckpointError, match=r"no weight:norm.weigth; the nearest is weight:norm.weight"):
        checkpoint.read("weight:norm.weigth", device=CPU)
    for bounds in (((0, 8),), ((-1, 3),), ((3, 2),), ((0, 7), (0, 1)), (), ((0, 2**50),)):
        with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[7\], requested"):
            checkpoint.read("weight:norm.weight", bounds, device=CPU)


def gloo_rank(context: RankContext, folder: str) -> list[object]:
    """Save data produced by collectives, fail once on rank 1 while planning another dtype, then load."""
    world: Group = context.topology(dp=3).world
    errors = []

    def gathered() -> Iterator[torch.Tensor]:
        for turn in range(6):
            tensor = torch.full((2, 3), float(world.rank + turn))
            world.all_reduce(tensor)
            if turn % 3 == world.rank:
                yield tensor

    def save(step: int, dtype: torch.dtype) -> None:
        specs = [ShardSpec.whole(f"w{turn}", (2, 3)) for turn in range(6) if turn % 3 == world.rank]
        about = preamble(step, counters={}, config={}, layout={}, tokenizer=None, kernels={})
        plan = [SavedTensor(key_group="weight", spec=spec, dtype=dtype) for spec in specs]
        save_checkpoint(Path(folder), about, plan=plan, tensors=gathered(), world=world)

    save(1, torch.float32)
    try:
        save(2, torch.float32 if world.rank != 1 else torch.float16)  # rank 1's dtype differs from its plan
    except CheckpointError as error:
        errors.append(str(error))
    checkpoint = find_checkpoint(Path(folder), step=None, world=world, log=errors.append)
    values = [float(checkpoint.read(f"weight:w{turn}", device=CPU).mean()) for turn in range(6)]
    return [errors, checkpoint.manifest.step, values]


def test_failed_save_of_one_rank_with_collectives(tmp_path: Path) -> None:
    results = run_ranks(3, gloo_rank, str(tmp_path))
    assert results[0] == results[1] == results[2]
    errors, step, values = results[0]
    assert len(errors) == 1 and "(rank 1 of 3)" in errors[0] and "the plan says F16" in errors[0]
    assert step == 1
    assert values == [3.0 + 3 * turn for turn in range(6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0000001"]
