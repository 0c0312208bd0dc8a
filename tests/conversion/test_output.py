"""The output folder of a conversion and its tensor files: split, written, and skipped if finished."""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megalite.checkpoint.load import Checkpoint
from megalite.checkpoint.manifest import Slice
from megalite.config.errors import ConfigError
from megalite.conversion import weights as blockwise
from megalite.conversion.native import write_native
from megalite.conversion.open import open_weights
from megalite.conversion.output import Output, Target, identity_of, split_files, stored_blocks, workplace_of, write_file
from megalite.conversion.weights import (
    ConversionError,
    LastRead,
    Repadded,
    View,
    WeightPiece,
    Wrapped,
    first_rows,
    parameter_shapes,
    part_at,
    parts_within,
    whole,
)
from tests.conversion.samples import GPT, VOCAB, MadeUp, contents

QKV = "layers.0.attention.qkv.weight"
IDENTITY = {"source": "a", "settings": {"dtype": "None"}}


def write(output: Output, name: str, data: bytes, **facts: Any) -> None:
    path = output.staging / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    output.mark(name, facts)


def test_only_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    output = Output(target, identity=IDENTITY)
    write(output, "a", b"a")
    output.commit()
    with pytest.raises(ConversionError, match=r"model exists and is not empty \(a\)"):
        Output(target, identity=IDENTITY)
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ConversionError, match="is not a folder"):
        Output(file, identity=IDENTITY)
    assert file.read_text() == "text"
    with pytest.raises(ConfigError, match="s3:/bucket must be a path on this machine"):
        Output(Path("s3://bucket"), identity=IDENTITY)
    with pytest.raises(ConfigError, match="s3:/bucket must be a path on this machine"):
        write_native(MadeUp(tmp_path, GPT), Path("s3://bucket"))


def test_target_created_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    output = Output(tmp_path / "model", identity=IDENTITY)
    write(output, "a", b"a")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("mine")
    with pytest.raises(ConversionError, match="not empty"):
        output.commit()
    assert contents(tmp_path / "model") == {"precious": b"mine"}


def test_finished_files_are_reused_and_others_removed(tmp_path: Path) -> None:
    first = Output(tmp_path / "model", identity=IDENTITY)
    assert first.finished("a") is None
    write(first, "a", b"aaa", sha256="00")
    (first.staging / "half").write_bytes(b"...")
    del first
    second = Output(tmp_path / "model", identity=IDENTITY)
    assert contents(second.staging) == {"a": b"aaa"}, "including files that are no longer needed"
    assert second.finished("a") == {"sha256": "00"}
    assert second.finished("half") is None
    write(second, "half", b"whole")
    second.commit()
    assert contents(tmp_path / "model") == {"a": b"aaa", "half": b"whole"}


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def a_link(path: Path) -> None:
    copy = path.with_name("elsewhere")
    path.rename(copy)
    path.symlink_to(copy)


@pytest.mark.parametrize("change", [Path.unlink, longer, a_link])
def test_changed_finished_file_is_rewritten(tmp_path: Path, change: Callable[[Path], None]) -> None:
    first = Output(tmp_path / "model", identity=IDENTITY)
    write(first, "a", b"aaa")
    write(first, "b", b"bbb")
    change(first.staging / "a")
    del first
    second = Output(tmp_path / "model", identity=IDENTITY)
    assert second.finished("a") is None
    assert not (second.staging / "a").is_symlink() and not (second.staging / "a").exists()
    assert second.finished("b") == {}


def test_log_reports_a_continued_conversion(tmp_path: Path) -> None:
    said: list[str] = []
    first = Output(tmp_path / "model", identity=IDENTITY, files=["a", "b", "c"], log=said.append)
    assert said == [], "nothing was interrupted"
    for name in ("a", "b", "small"):
        write(first, name, b"aaa")
    longer(first.staging / "b")
    del first
    second = Output(tmp_path / "model", identity=IDENTITY, files=["a", "b", "c"], log=said.append)
    assert said == ["continues: 1 of 3 files are done"]
    del second
    third = Output(tmp_path / "model", identity={}, files=["a"], log=said.append)
    assert third.finished("a") is None and contents(third.staging) == {}
    assert len(said) == 2 and said[1].startswith("starts again")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": 1}', '{"identity": %s, "marks": {"a": 1}}'])
def test_damaged_progress_file_restarts_the_conversion(tmp_path: Path, text: str) -> None:
    first = Output(tmp_path / "model", identity=IDENTITY)
    write(first, "a", b"aaa")
    del first
    place = workplace_of(tmp_path / "model") / "progress.json"
    place.write_text(text.replace("%s", str(IDENTITY).replace("'", '"')))
    assert Output(tmp_path / "model", identity=IDENTITY).finished("a") is None


def test_target_has_one_conversion_at_a_time(tmp_path: Path) -> None:
    first = Output(tmp_path / "model", identity={})
    said: list[str] = []
    with pytest.raises(ConversionError, match=r"another process is converting into .*model"):
        Output(tmp_path / "model", identity={}, log=said.append)
    assert said == [], "the lock is taken before the log line"
    del first
    Output(tmp_path / "model", identity={})


def test_identity_depends_on_source_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"1")
    weights = MadeUp(tmp_path, GPT)
    before = identity_of(weights, dtype=None)
    assert before == identity_of(MadeUp(tmp_path, GPT), dtype=None)
    assert before != identity_of(weights, dtype="bf16")
    assert before != identity_of(MadeUp(tmp_path, {**GPT, "num_layers": 1}), dtype=None)
    file.write_bytes(b"22")
    assert before != identity_of(weights, dtype=None)
    after = identity_of(weights, dtype=None)
    outside = tmp_path.with_name(f"{tmp_path.name}-tokenizer")
    outside.write_text("a")
    assert after != identity_of(MadeUp(tmp_path, GPT, tokenizer_files=[outside]), dtype=None)


def test_identity_detects_a_rewritten_file_with_the_old_time(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"1")
    weights, status = MadeUp(tmp_path, GPT), file.stat()
    before = identity_of(weights)
    while file.stat().st_ctime_ns == status.st_ctime_ns:  # file timestamps are coarse
        file.write_bytes(b"2")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert before != identity_of(weights)


F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def target(key: str, size: int, dtype: torch.dtype = F32) -> Target:
    return Target(WeightPiece(key, key, (size,)), dtype)


class TestSplitting:
    def test_splitting_keeps_order_and_fills_files(self) -> None:
        targets = [target(f"t{i}", 1000) for i in range(10)]
        files = split_files(targets, 14_000)
        assert [each for file in files for each in file] == targets
        assert [len(file) for file in files] == [3, 3, 3, 1]


class TestWriting:
    def write(self, tmp_path: Path, weights: MadeUp, targets: list[Target]) -> dict[str, torch.Tensor]:
        """Read one file with the format's own library."""
        output = Output(tmp_path / "model", identity={})
        done: list[int] = []
        entry = write_file(output, "a/b", targets, LastRead(weights), done.append, digest=True)
        path = output.staging / "a/b"
        assert entry.length == path.stat().st_size and len(entry.sha256) == 64
        assert done == [target.record.nbytes for target in targets]
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert list(file.keys()) == sorted(target.key for target in targets)
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)

    @pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
    def test_pieces_equal_the_views_in_the_requested_dtype(self, tmp_path: Path, dtype: torch.dtype) -> None:
        weights, name = MadeUp(tmp_path, GPT), QKV
        grouped: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.unflatten(0, (4, 3, 8))[:, 1]  # noqa: E731
        pieces = [
            WeightPiece("all", name, (96, 32), whole),
            WeightPiece("turned", name, (32, 96), torch.t),
            WeightPiece("keys", name, (32, 32), grouped),
            WeightPiece("rows", name, (3, 32), first_rows(3, 5)),
        ]
        ours = weights.read(name)
        weights.reads.clear()
        found = self.write(tmp_path, weights, [Target(piece, dtype) for piece in pieces])
        assert weights.reads == {name: 1}
        rounded = ours.to(dtype)
        assert torch.equal(found["all"], rounded)
        assert torch.equal(found["turned"], rounded.t())
        assert torch.equal(found["keys"], rounded.view(4, 3, 8, 32)[:, 1].reshape(32, 32))
        assert torch.equal(found["rows"], rounded[5:8])

    def test_values_out_of_range_are_refused(self, tmp_path: Path) -> None:
        class Large(MadeUp):
            def read(self, name: str) -> torch.Tensor:
                return super().read(name).index_fill_(0, torch.tensor([3]), 70000.0)

        weights = Large(tmp_path, GPT)
        size = weights.read("final_norm.weight").numel()
        wide = Target(WeightPiece("final_norm.weight", "final_norm.weight", (size,)), F16)
        with pytest.raises(ConversionError, match=r"final_norm.weight has 70000, above the 65504"):
            self.write(tmp_path, weights, [wide])
        fits = Target(wide.piece, BF16)
        assert self.write(tmp_path, weights, [fits])["final_norm.weight"][3] == 70144


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_contiguous_data_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """For megalite checkpoints. Other views are cut from the whole tensor, and wrappers that change values read it whole."""

    class Doubled(Wrapped):
        def read(self, name: str) -> torch.Tensor:
            return 2 * self.inner.read(name)

    weights = open_weights(write_native(MadeUp(tmp_path, GPT), tmp_path / "m"))
    ours, reads = weights.read(QKV), list[int]()
    monkeypatch.setattr(blockwise, "BLOCK", 10 * 32 * 4)
    real = Checkpoint.read

    def counted(checkpoint: Checkpoint, key: str, part: Slice | None = None, **more: Any) -> torch.Tensor:
        reads.append(real(checkpoint, key, part, **more).numel())
        return real(checkpoint, key, part, **more)

    monkeypatch.setattr(Checkpoint, "read", counted)
    views: list[tuple[View, list[int]]] = [
        (whole, [320] * 9 + [192]),
        (first_rows(13, 5), [320, 96]),
        (part_at(3), [32]),
        (lambda tensor: tensor[2, 3:29], [26]),
        (torch.t, [96 * 32]),
        (lambda tensor: tensor[:, 4:20], [96 * 32]),
    ]
    for view, expected in views:
        values = view(ours)
        piece = WeightPiece("theirs", QKV, (values.numel() + 500,), view)
        for source, factor in ((weights, 1), (Doubled(weights), 2)):
            reads.clear()
            found = list(stored_blocks(LastRead(Repadded(source, 8)), piece, dtype))
            assert reads == (expected if factor == 1 else [96 * 32])
            assert all(block.dtype == dtype and block.nbytes <= blockwise.BLOCK for block in found)
            flat = torch.cat([block.reshape(-1) for block in found])
            assert torch.equal(flat[:-500], (factor * values).to(dtype).reshape(-1)) and not flat[-500:].any()


def test_parts_within_a_range_equal_the_view() -> None:
    generator = random.Random(0)
    for _ in range(500):
        sizes = [generator.randint(1, 5) for _ in range(generator.randint(1, 4))]
        ours = torch.arange(math.prod(sizes)).view(sizes)
        axis, other = generator.randrange(len(sizes)), generator.randrange(len(sizes))
        first = generator.randrange(sizes[axis])
        place = ours.narrow(axis, first, generator.randint(1, sizes[axis] - first)).transpose(axis, other)
        elements, start = place.flatten().tolist(), generator.randint(0, ours.numel())
        stop, found, after = generator.randint(start, ours.numel()), [], 0
        for before, part in parts_within(place, start, stop):
            values = part.flatten().tolist()
            assert before >= after and elements[before : before + len(values)] == values
            found, after = found + values, before + len(values)
        assert found == [value for value in elements if start <= value < stop]


@pytest.mark.parametrize(("multiple", "rows"), [(1, 301), (8, 304), (128, 384)])
def test_padding_is_added_as_zeros_and_removed(tmp_path: Path, multiple: int, rows: int) -> None:
    weights = MadeUp(tmp_path, GPT)
    folder = write_native(Repadded(weights, multiple), tmp_path / "m")
    ours, found = weights.read("embedding.word.weight"), open_weights(folder)
    theirs = found.read("embedding.word.weight")
    assert theirs.shape == (rows, 32) == parameter_shapes(found.model)["embedding.word.weight"].shape
    assert torch.equal(theirs[:VOCAB], ours[:VOCAB]) and not theirs[VOCAB:].any()
    assert torch.equal(found.read("final_norm.bias"), weights.read("final_norm.bias"))
