"""`megalite inspect --tensors` and `--diff`: statistics of tensors, and differences of two checkpoints."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite.cli.inspect_tensors as tensors_module
from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import Slice, tiling_fault, volume
from megalite.cli.inspect import DIFFERENT, OK
from megalite.cli.inspect_tensors import BLOCK, blocks, statistics
from tests.checkpoint.inspecting import WEIGHTS, Captured, Tensors, flip_last_bit, inspect, refused, said, save_tensors
from tests.checkpoint.samples import CPU, SOLO, columns, find, sample_tensors, save_as


def test_statistics_of_matching_tensors(real: Path, capsys: Captured) -> None:
    assert inspect(real / "step-0000001", "--tensors", "exp_avg/layers.[01].*norm.weight") == OK
    table = said(capsys).split("\n\n")[-1].splitlines()
    assert [line.split()[0] for line in table[1:]] == [
        f"exp_avg/layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("attention_norm", "mlp_norm")
    ]
    values = find(real, 1).read("optimizer.exp_avg:layers.0.attention_norm.weight", device=CPU).double()
    numbers = (values.min(), values.max(), values.mean(), values.std(correction=0))
    assert table[1].split()[3:] == [*(f"{number.item():.5g}" for number in numbers), "0", "0"]


def test_statistics_of_blocks_equal_those_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged over small blocks, with values far from zero, where sums of squares would lose all digits."""
    values = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e8
    values[0, 0, :2], values[3, 1, 2], values[5, 4, 6] = torch.nan, torch.inf, -torch.inf
    values[1, 2] = torch.nan  # a block without finite numbers
    tensors: Tensors = {
        ("weight", "", "values"): values,
        ("weight", "", "nothing"): torch.full((3,), torch.nan),
        ("weight", "", "scalar"): torch.tensor(5),
    }
    save_tensors(tmp_path, tensors, ranks=2)
    monkeypatch.setattr(tensors_module, "blocks", partial(blocks, limit=7))
    found, finite = statistics(find(tmp_path), "weight:values"), values[values.isfinite()]
    assert (found.elements, found.nan, found.inf) == (210, 9, 2)
    assert (found.min, found.max) == (finite.min().item(), finite.max().item())
    assert found.mean == pytest.approx(finite.mean().item(), rel=1e-14)
    assert found.std == pytest.approx(finite.std(correction=0).item(), rel=1e-6)
    nothing = statistics(find(tmp_path), "weight:nothing")
    assert (nothing.nan, nothing.min, nothing.max, nothing.mean, nothing.std) == (3, None, None, None, None)
    scalar = statistics(find(tmp_path), "weight:scalar")
    assert (scalar.min, scalar.max, scalar.mean, scalar.std) == (5, 5, 5, 0)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (50,), (3, 4), (4, 30), (30, 4), (2, 3, 4), (2, 3, 40), (1, 1, 25)])
def test_sizes_of_blocks(shape: tuple[int, ...]) -> None:
    found = list(blocks(shape, 12))
    assert tiling_fault(shape, found) is None
    assert all(volume(bounds) <= 12 for bounds in found) and found == sorted(found)
    assert len(found) <= max(1, 2 * math.prod(shape) // 12 + 6)
    assert list(blocks(shape)) == [tuple((0, size) for size in shape)] and math.prod(shape) < BLOCK


@pytest.mark.parametrize("verify", [True, False])
def test_checkpoints_of_different_layouts_are_equal(tmp_path: Path, capsys: Captured, verify: bool) -> None:
    tensors = sample_tensors(3) | {("weight", "", "odd"): torch.tensor([torch.nan, -0.0, torch.inf])}
    first = save_tensors(tmp_path / "a", tensors, ranks=3)
    second = save_tensors(tmp_path / "b", tensors, ranks=4, scheme=columns)
    flags = [] if verify else ["--no-verify"]
    for one, other in ((first, second), (first, first)):
        assert inspect("--diff", one, other, *flags) == OK
        assert said(capsys).splitlines()[-1] == f"equal: {len(tensors)} tensors, bit for bit"


def test_diff_lists_every_kind_of_difference(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values by their largest difference, zeros and NaNs by their bits; tensors, shapes, dtypes and fields."""
    base = {name: torch.arange(24.0).view(4, 6) for name in ("small", "large", "zero", "nan", "same", "cast", "shape")}
    other = {name: values.clone() for name, values in base.items()}
    other["small"][1, 2:4] += torch.tensor([0.25, 0.5])
    other["large"][3, 5] = -1e6
    other["zero"][0, 0] = -0.0
    base["nan"][2, 1] = other["nan"][2, 1] = torch.nan
    other["nan"][3] = torch.tensor([torch.nan, torch.inf, 20, 21, 22, 24])
    other["cast"] = other["cast"].bfloat16()
    other["shape"] = other["shape"].view(6, 4)
    sides = []
    for name, values, lone in (("a", base, "mine"), ("b", other, "theirs")):
        tensors: Tensors = {("weight", "", key): value for key, value in values.items()}
        tensors["optimizer", "exp_avg", lone] = torch.ones(2)
        config = {"optimizer": {"lr": 0.1 if name == "a" else 0.2}, "model": {"num_layers": 2}}
        layout = {"tp": 2} if name == "a" else {}
        sides.append(save_tensors(tmp_path / name, tensors, config=config, layout=layout))
    monkeypatch.setattr(tensors_module, "blocks", partial(blocks, limit=5))
    assert inspect("--diff", *sides, "--json") == DIFFERENT
    data = json.loads(said(capsys))
    assert data["fields"] == {"layout.tp": [2, None], "layout": [None, {}], "config.optimizer.lr": [0.1, 0.2]}
    assert (data["only_first"], data["only_second"]) == (["optimizer.exp_avg:mine"], ["optimizer.exp_avg:theirs"])
    assert data["declared"].keys() == {"weight:cast", "weight:shape"}
    assert list(data["differing"]) == ["weight:nan", "weight:large", "weight:small", "weight:zero"]
    assert data["compared"] == 6
    small = data["differing"]["weight:small"]
    assert (small["differing"], small["elements"], small["max_abs"]) == (2, 24, 0.5)
    assert small["rms"] == pytest.approx(math.sqrt((0.25**2 + 0.5**2) / 24))
    assert data["differing"]["weight:zero"] == {**small, "differing": 1, "max_abs": 0.0, "rms": 0.0}
    nan = data["differing"]["weight:nan"]
    assert (nan["differing"], nan["non_finite"], nan["max_abs"]) == (3, 2, 1.0)

    assert inspect("--diff", *sides) == DIFFERENT
    text = said(capsys)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "config.optimizer.lr 0.1 | 0.2" in lines and "weight:cast F32 [4, 6] | BF16 [4, 6]" in lines
    assert lines[-1] == (
        "different: 3 fields, 1 tensor only in A, 1 tensor only in B, 2 tensors of another dtype or shape, values of 4 "
        "of the 6 tensors in both"
    )
    assert inspect("--diff", *sides, "--tensors", "same") == OK
    assert said(capsys).splitlines()[-1] == "equal: 1 tensor, bit for bit"
    assert inspect("--diff", *sides, "--tensors", "zero") == DIFFERENT


def test_at_most_one_block_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2):
        save_as(tmp_path, SOLO, step=seed, seed=seed)
    read, largest = Checkpoint.read, []

    def spy(self: Checkpoint, key: str, slice: Slice | None = None, **kwargs: Any) -> torch.Tensor:
        assert slice is not None
        largest.append(volume(slice))
        return read(self, key, slice, **kwargs)

    monkeypatch.setattr(Checkpoint, "read", spy)
    monkeypatch.setattr(tensors_module, "blocks", partial(blocks, limit=10))
    steps = [tmp_path / f"step-000000{step}" for step in (1, 2)]
    assert inspect("--diff", *steps) == DIFFERENT and inspect(steps[0], "--tensors", "*") == OK
    assert max(largest) <= 10


def test_diff_of_runs_skips_damaged_checkpoints(folder: Path, real: Path, capsys: Captured) -> None:
    flip_last_bit(folder / "step-0000002" / WEIGHTS)
    assert inspect("--diff", folder, real / "step-0000001") == OK
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{folder / 'step-0000002'} is passed over: damaged: {WEIGHTS}: sha256 is")
    assert inspect("--diff", folder, real, "--step", "1") == OK
    capsys.readouterr()
    assert "step-0000002 is damaged: weights" in refused(capsys, "--diff", folder, real, "--step", "2")
    # Given the damaged checkpoint itself, it compares the bytes and finds the flipped bit.
    assert inspect("--diff", folder, real, "--no-verify") == DIFFERENT
    assert "values of 1 of the 108 tensors" in said(capsys)
