"""Files of tensors: how they are split, made out of ours, and passed over when they are done."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megalite.checkpoint.manifest import FileEntry
from megalite.conversion.output import Output
from megalite.conversion.pieces import Piece, View, transposed, whole
from megalite.conversion.stream import Target, split_files, write_file
from megalite.conversion.weights import ConversionError, parameter_shapes
from megalite.conversion.wrapped import LastRead, Repadded
from tests.conversion.samples import EXPERTS, GPT, VOCAB, MadeUp, ignore

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def target(key: str, size: int, dtype: torch.dtype = F32) -> Target:
    """A one-dimensional tensor."""
    return Target(key, Piece(key, key, (size,)), dtype)


class TestSplitting:
    def test_order_is_kept_and_files_are_filled(self) -> None:
        targets = [target(f"t{i}", 1000) for i in range(10)]
        files = split_files(targets, 14_000)
        assert [each for file in files for each in file] == targets
        assert [len(file) for file in files] == [3, 3, 3, 1]

    @pytest.mark.parametrize("limit", [1, 700, 5_000, 10**9])
    def test_no_file_is_larger_but_of_one_tensor(self, tmp_path: Path, limit: int) -> None:
        weights = MadeUp(tmp_path, GPT)
        shapes = parameter_shapes(weights.model).items()
        targets = [Target(name, Piece(name, name, shape.shape), BF16) for name, shape in shapes]
        output = Output(tmp_path / "model", identity={})
        for number, part in enumerate(split_files(targets, limit)):
            entry = write_file(output, str(number), part, weights, ignore, digest=False, metadata={})
            assert entry.length <= limit or len(part) == 1

    def test_nothing(self) -> None:
        assert split_files([], 1000) == []


def rows_of(first: int, last: int) -> View:
    return lambda tensor: tensor[first:last]


class TestWriting:
    def write(self, tmp_path: Path, weights: MadeUp, targets: list[Target]) -> dict[str, torch.Tensor]:
        """The tensors of one file, read by the format's own library."""
        output = Output(tmp_path / "model", identity={})
        done: list[int] = []
        entry = write_file(output, "a/b", targets, weights, done.append, digest=True, metadata={"who": "me"})
        path = output.staging / "a/b"
        assert entry.length == path.stat().st_size and len(entry.sha256) == 64
        assert done == [target.record.nbytes for target in targets]
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"who": "me"}
            assert list(file.keys()) == sorted(target.key for target in targets)
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)

    @pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
    def test_pieces_are_the_views_in_the_type_asked_for(self, tmp_path: Path, dtype: torch.dtype) -> None:
        weights, name = MadeUp(tmp_path, GPT), "layers.0.attention.qkv.weight"
        grouped: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.unflatten(0, (4, 3, 8))[:, 1]  # noqa: E731
        pieces = [
            Piece("all", name, (96, 32), whole),
            Piece("turned", name, (32, 96), transposed),
            Piece("keys", name, (32, 32), grouped),
            Piece("rows", name, (3, 32), rows_of(5, 8)),
        ]
        ours = weights.read(name)
        weights.reads.clear()
        found = self.write(tmp_path, weights, [Target(piece.theirs, piece, dtype) for piece in pieces])
        assert weights.reads == {name: 1}
        rounded = ours.to(dtype)
        assert torch.equal(found["all"], rounded)
        assert torch.equal(found["turned"], rounded.t())
        assert torch.equal(found["keys"], rounded.view(4, 3, 8, 32)[:, 1].reshape(32, 32))
        assert torch.equal(found["rows"], rounded[5:8])

    def test_values_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        class Large(MadeUp):
            def read(self, name: str) -> torch.Tensor:
                return super().read(name).index_fill_(0, torch.tensor([3]), 70000.0)

        weights = Large(tmp_path, GPT)
        size = weights.read("final_norm.weight").numel()
        wide = Target("final_norm.weight", Piece("final_norm.weight", "final_norm.weight", (size,)), F16)
        with pytest.raises(
            ConversionError, match=r"final_norm.weight holds 70000, too large for float16.*65504"
        ):
            self.write(tmp_path, weights, [wide])
        fits = Target(wide.key, wide.piece, BF16)
        assert self.write(tmp_path, weights, [fits])["final_norm.weight"][3] == 70144

    def test_infinities_and_nans_stay_what_they_are(self, tmp_path: Path) -> None:
        class Broken(MadeUp):
            def read(self, name: str) -> torch.Tensor:
                tensor = super().read(name)
                tensor[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
                return tensor

        piece = Piece("final_norm.weight", "final_norm.weight", (32,))
        found = self.write(tmp_path, Broken(tmp_path, GPT), [Target(piece.theirs, piece, F16)])
        assert str(found["final_norm.weight"][:3]) == "tensor([inf, -inf, nan], dtype=torch.float16)"


def test_a_finished_file_is_passed_over(tmp_path: Path) -> None:
    targets = [
        Target(name, Piece(name, name, (32,)), F32) for name in ("final_norm.weight", "final_norm.bias")
    ]
    first = write_file(
        Output(tmp_path / "m", identity={}),
        "a",
        targets,
        MadeUp(tmp_path, GPT),
        ignore,
        digest=True,
        metadata={},
    )
    done: list[int] = []
    weights = MadeUp(tmp_path, GPT)
    again = Output(tmp_path / "m", identity={})
    before = (again.staging / "a").stat()
    assert write_file(again, "a", targets, weights, done.append, digest=True, metadata={}) == first
    after = (again.staging / "a").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert sum(done) == 256 and not weights.reads
    assert isinstance(first, FileEntry)


def test_experts_in_several_files_are_read_once(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, EXPERTS)
    name = "layers.0.moe.experts.up.weight"
    _, _, width, h = parameter_shapes(weights.model)[name].shape
    cut = [lambda t, e=e: t[e, 0] for e in range(4)]
    targets = [Target(f"e{e}", Piece(f"e{e}", name, (width, h), cut[e]), F32) for e in range(4)]
    files = split_files(targets, 2 * width * h * 4 + 1000)
    assert [len(file) for file in files] == [2, 2]
    output, kept = Output(tmp_path / "m", identity={}), LastRead(weights)
    for number, part in enumerate(files):
        write_file(output, str(number), part, kept, ignore, digest=False, metadata={})
    assert weights.reads == {name: 1}


@pytest.mark.parametrize(("multiple", "rows"), [(1, 301), (8, 304), (128, 384)])
def test_padding_is_added_as_zeros_and_cut(tmp_path: Path, multiple: int, rows: int) -> None:
    weights = MadeUp(tmp_path, GPT)
    ours = weights.read("embedding.word.weight")
    padded = Repadded(weights, multiple)
    theirs = padded.read("embedding.word.weight")
    assert theirs.shape == (rows, 32) == parameter_shapes(padded.model)["embedding.word.weight"].shape
    assert torch.equal(theirs[:VOCAB], ours[:VOCAB]) and not theirs[VOCAB:].any()
    assert torch.equal(padded.read("final_norm.bias"), weights.read("final_norm.bias"))
