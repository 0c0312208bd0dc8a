"""Files that any safetensors reader opens, written one tensor at a time."""

import hashlib
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import megalite.checkpoint.safetensors_file as safetensors_file
from megalite.checkpoint.files import BLOCK, CHUNK, FileEntry, RunningDigest, entry_fault
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, SafetensorsReader, SafetensorsWriter
from megalite.checkpoint.safetensors_header import Record, file_bytes
from megalite.config.errors import CheckpointError

TENSORS = {
    "odd.bf16": torch.randn(3).to(torch.bfloat16),
    "scalar": torch.tensor(-(2**60)),
    "f64": torch.randn(2, 3, 4, dtype=torch.float64),
    "f16": torch.randn(5, 1).half(),
    "a transposed f32": torch.randn(7, 5).t(),
    "strided": torch.randn(8, 8)[::2, 1::3],
    "parameter": torch.nn.Parameter(torch.randn(4)),
}


def records(tensors: dict[str, torch.Tensor]) -> list[Record]:
    return [Record(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in tensors.items()]


def write(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    writer = SafetensorsWriter(path, records(tensors))
    for tensor in tensors.values():
        writer.write(tensor)
    entry = writer.finish()
    return entry.length, entry.sha256


def test_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    length, sha256 = write(path, TENSORS)
    data = path.read_bytes()
    assert (length, sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert length == file_bytes(records(TENSORS))
    assert struct.unpack("<Q", data[:8])[0] % 8 == 0
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert read[key].dtype == tensor.dtype and torch.equal(read[key], tensor), key
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensor_larger_than_a_chunk(tmp_path: Path) -> None:
    tensors = {"small": torch.ones(1), "large": torch.randn(CHUNK // 2 + 12345)}
    length, sha256 = write(tmp_path / "x.safetensors", tensors)
    data = (tmp_path / "x.safetensors").read_bytes()
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    assert len(blocks) == 3 and len(data) == length
    assert sha256 == hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()
    entry = FileEntry(length, sha256, BLOCK)
    assert entry_fault(tmp_path / "x.safetensors", entry) is None
    plain = FileEntry(length, hashlib.sha256(data).hexdigest())  # as earlier versions have it
    assert entry_fault(tmp_path / "x.safetensors", plain) is None
    for place in (0, BLOCK - 1, BLOCK, length - 1):
        with (tmp_path / "x.safetensors").open("r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ 1]))
        for one in (entry, plain):
            assert "sha256 is" in (entry_fault(tmp_path / "x.safetensors", one) or "")
        (tmp_path / "x.safetensors").write_bytes(data)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["large"], tensors["large"])


def test_read_any_index_dtype_and_unaligned_data(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, TENSORS)
    reader = SafetensorsReader(path)
    for record in records(TENSORS):
        full = TENSORS[record.key].detach()
        index = tuple(slice(size // 3, size) for size in record.shape)
        for dtype in (full.dtype, torch.float64, torch.float32):
            output = torch.empty_like(full[index], dtype=dtype)
            reader.read_into(output, record, index)
            assert torch.equal(output, full[index].to(dtype)), record.key


def test_tensor_unlike_its_declaration_is_an_error(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x.safetensors", [Record("w", "F32", (2, 3))])
    with pytest.raises(CheckpointError, match=r"w: the plan says F32 \[2, 3\].*torch.float64 \[3, 2\]"):
        writer.write(torch.ones(3, 2, dtype=torch.float64))
    writer.close()
    save_file({"w": torch.ones(3, 2)}, tmp_path / "y.safetensors")
    reader = SafetensorsReader(tmp_path / "y.safetensors")
    for record in (Record("w", "F32", (2, 3)), Record("w", "F16", (3, 2))):
        with pytest.raises(CheckpointError, match=r"y\.safetensors: w is F32 \[3, 2\], the manifest says"):
            reader.read_into(torch.empty(record.shape), record, (slice(None), slice(None)))
    with pytest.raises(CheckpointError, match=r"y\.safetensors: v"):
        reader.read_into(torch.empty(1), Record("v", "F32", (1,)), (slice(None),))
    (tmp_path / "z.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"z\.safetensors"):
        SafetensorsReader(tmp_path / "z.safetensors")


def test_existing_file_or_link_is_not_overwritten(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "x.safetensors").symlink_to(victim)
    for path in (tmp_path / "x.safetensors", victim):
        with pytest.raises(FileExistsError):
            SafetensorsWriter(path, [])
    assert victim.read_text() == "precious"


def slices_of(shape: tuple[int, ...], rng: random.Random) -> tuple[slice, ...]:
    ends = [sorted(rng.choices(range(size + 1), k=2)) for size in shape]
    return tuple(slice(0, size) if rng.random() < 0.4 else slice(*end) for size, end in zip(shape, ends))


@pytest.mark.parametrize("page, chunk", [(4096, CHUNK), (64, 200), (1, 1)])
def test_read_any_slice_into_any_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int, chunk: int) -> None:
    monkeypatch.setattr(safetensors_file, "_PAGE", page)
    monkeypatch.setattr(safetensors_file, "CHUNK", chunk)
    rng = random.Random(page)
    tensors = {
        f"{'x'.join(map(str, shape))}.{dtype}": (torch.randn(shape) * 50).to(dtype)
        for shape in ((), (17,), (9, 40), (3, 2, 11, 5))
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    }
    write(tmp_path / "x", tensors)
    reader = SafetensorsReader(tmp_path / "x")
    assert list(reader.records) == list(tensors)
    for key, tensor in tensors.items():
        for _ in range(12):
            index = slices_of(tuple(tensor.shape), rng)
            wanted = tensor[index]
            same, double = torch.empty_like(wanted), torch.full((*wanted.shape, 2), -1.0, dtype=torch.float64)
            for output in (same, double[..., 0]):  # strided, and of another type
                reader.read_into(output, reader.records[key], index)
                assert torch.equal(output, wanted.to(output.dtype)), (key, index)
            assert (double[..., 1] == -1).all()


def test_only_requested_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", {"w": torch.arange(6.0 * 3000).view(6, 3000)})
    reader = SafetensorsReader(tmp_path / "x")
    read: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    output, record = torch.empty(2, 3000), reader.records["w"]
    reader.read_into(output, record, (slice(2, 4), slice(0, 3000)))
    assert output[1, 5] == 9005
    assert read == [2 * 3000 * 4]
    read.clear()
    reader.read_into(torch.empty(6, 1500), record, (slice(0, 6), slice(1000, 2500)))  # 6,000 bytes of each row
    assert read == [6000] * 6
    read.clear()
    reader.read_into(torch.empty(6, 10), record, (slice(0, 6), slice(1000, 1010)))  # less than a page of each row
    assert read == [6 * 3000 * 4]


def test_file_truncated_while_open_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x", {"w": torch.zeros(4000)})
    reader = SafetensorsReader(tmp_path / "x")
    os.truncate(tmp_path / "x", 10_000)
    with pytest.raises(CheckpointError, match="the file ends before the tensor does"):
        reader.read_elements("w", 0, 4000)


def test_hash_covers_blocks_in_order(tmp_path: Path) -> None:
    """Only a few blocks wait for hashing at a time and are then freed; parts need not end at a block."""
    parts = [bytes([n]) * (1 + n * 1000) for n in range(40)]
    whole = b"".join(parts)
    for block in (1 << 10, 7_001, len(whole), 1 << 24):
        digest = RunningDigest(block)
        for part in parts:
            digest.update(memoryview(part))
        each = [hashlib.sha256(whole[start : start + block]).digest() for start in range(0, len(whole), block)]
        expected = hashlib.sha256(b"".join(each)).hexdigest() if len(each) > 1 else each[0].hex()
        assert digest.hexdigest() == expected, block
        digest.close()


def test_write_without_a_hash(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "x", records(TENSORS), digest=False)
    for tensor in TENSORS.values():
        writer.write(tensor)
    assert writer.finish().sha256 == ""
    reader = SafetensorsReader(tmp_path / "x")
    assert torch.equal(reader.read_elements("scalar", 0, 1)[0], TENSORS["scalar"])
