"""Thousands of damaged .idx and .bin files: the package accepts, and `verify` reports, the same as a simple reader."""

import hashlib
import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import DatasetFault, IndexedDataset, UnsupportedDataset
from megalite.preprocess.verify import verify
from tests.preprocess.layout import LETTERS, MIXED, NAMES, pack
from tests.support.patience import within

VOCAB_SIZE = 120
SINGLE = [[[5, 6, 7]], [[8]], [], [[9, 10, 11, 12, 13]], [[14, 15]]]
LONG = [[[(7 * i + j) % VOCAB_SIZE for j in range(i % 5)]] for i in range(40)]
SOURCES = [(SINGLE, code) for code in LETTERS] + [(MIXED, 8), (MIXED, 4), (LONG, 8), ([], 8), ([[]], 4)]
INTERESTING = [0, 1, 2, 3, 4, 8, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]
INTERESTING += [2**63, 2**64 - 1, 2**64 - 2]


@dataclass
class Pair:
    """The two files, and the header's contents."""

    bin: bytearray
    idx: bytearray

    def fields(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every field of .idx if its counts are right."""
        places = [(0, 9), (9, 8), (17, 1), (18, 8), (26, 8)]
        if len(self.idx) < 34:
            return places
        sequences, indices = struct.unpack_from("<QQ", self.idx, 18)
        if 34 + 12 * sequences + 8 * indices != len(self.idx):
            return places
        places += [(34 + 4 * i, 4) for i in range(sequences)]
        places += [(34 + 4 * sequences + 8 * i, 8) for i in range(sequences)]
        return places + [(34 + 12 * sequences + 8 * i, 8) for i in range(indices)]


def mutate(pair: Pair, rng: random.Random) -> None:
    """Apply one change as caused by disks, copies, other programs and users."""
    data = pair.idx if rng.random() < 0.5 else pair.bin
    kind = rng.choice(["bit", "byte", "field", "field", "field", "two fields", "cut", "grow", "drop", "twice", "swap"])
    if kind == "bit" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "byte" and data:
        data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    elif kind == "field":
        change_field(pair.idx, *rng.choice(pair.fields()), rng)
    elif kind == "two fields" and len(pair.fields()) > 5:
        exchange(pair.idx, pair.fields()[5:], rng)
    elif kind == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif kind == "grow":
        data += rng.randbytes(rng.choice([1, 2, 4, 8, 20, rng.randrange(1, 64)]))
    elif kind == "drop" and data:
        start = rng.randrange(len(data))
        del data[start : start + rng.choice([1, 2, 4, 8, 12])]
    elif kind == "twice" and data:
        start = rng.randrange(len(data))
        data[start:start] = data[start : start + rng.choice([1, 4, 8])]
    elif kind == "swap":
        pair.bin, pair.idx = pair.idx, pair.bin


def change_field(idx: bytearray, offset: int, size: int, rng: random.Random) -> None:
    if offset + size > len(idx):
        return
    old = int.from_bytes(idx[offset : offset + size], "little")
    step = rng.choice([1, -1, 2, -2, 4, 8, -8, 16])
    new = rng.choice([old + step, old * 2, rng.choice(INTERESTING), -step, rng.randrange(16)])
    idx[offset : offset + size] = (new % 256**size).to_bytes(size, "little")


def exchange(idx: bytearray, places: list[tuple[int, int]], rng: random.Random) -> None:
    """Swap two lengths, offsets or document indices, or change two and keep their sum."""
    (a, size), (b, other) = rng.choice(places), rng.choice(places)
    if size != other:
        return
    first, second = (int.from_bytes(idx[at : at + size], "little") for at in (a, b))
    if rng.random() < 0.5:
        first, second = second, first
    else:
        first, second = first + 1, second - 1
    idx[a : a + size] = (first % 256**size).to_bytes(size, "little")
    idx[b : b + size] = (second % 256**size).to_bytes(size, "little")


def read_slowly(tokens: bytes, idx: bytes) -> list[list[int]] | None:
    """Read all sequences field by field as documented; None if the file violates the layout."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\x00\x00" or struct.unpack_from("<Q", idx, 9)[0] != 1:
        return None
    code, sequences, indices = struct.unpack_from("<BQQ", idx, 17)
    if code not in LETTERS or len(idx) != 34 + 12 * sequences + 8 * indices:
        return None
    item = struct.calcsize(LETTERS[code])
    found = []
    position = 0
    for i in range(sequences):
        (length,) = struct.unpack_from("<i", idx, 34 + 4 * i)
        (start,) = struct.unpack_from("<q", idx, 34 + 4 * sequences + 8 * i)
        if length < 0 or start != position or position + length * item > len(tokens):
            return None
        found.append([struct.unpack_from("<" + LETTERS[code], tokens, position + item * j)[0] for j in range(length)])
        position += length * item
    borders = [struct.unpack_from("<q", idx, 34 + 12 * sequences + 8 * i)[0] for i in range(indices)]
    if not borders or borders[0] != 0 or borders[-1] != sequences or borders != sorted(borders):
        return None
    return found if position == len(tokens) else None


def damaged(seed: int, count: int) -> Iterator[tuple[Pair, Pair, int]]:
    """Yield (original, damaged, dtype code) repeatedly."""
    rng = random.Random(seed)
    for _ in range(count):
        documents, code = rng.choice(SOURCES)
        tokens, idx = pack(documents, code=code)
        pair = Pair(bytearray(tokens), bytearray(idx))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            mutate(pair, rng)
        yield Pair(bytearray(tokens), bytearray(idx)), pair, code


def fuzz(folder: Path, seed: int, count: int) -> dict[str, int]:
    """Check `count` pairs. Returns how many were refused, had bad ids and were valid."""
    seen = {"refused": 0, "bad ids": 0, "sound": 0, "changed": 0}
    prefix = str(folder / "d")
    side = folder / "d.json"
    for case, (original, pair, code) in enumerate(damaged(seed, count)):
        side.unlink(missing_ok=True)
        Path(f"{prefix}.bin").write_bytes(pair.bin)
        Path(f"{prefix}.idx").write_bytes(pair.idx)
        expected = read_slowly(bytes(pair.bin), bytes(pair.idx))
        with within(f"case {case} of seed {seed}"):
            try:
                fault = verify(prefix, vocab_size=VOCAB_SIZE).fault
                unsupported = ""
            except UnsupportedDataset as error:
                fault, unsupported = None, str(error)
        if expected is None:
            seen["refused"] += 1
            with pytest.raises(DatasetFault) as raised:
                IndexedDataset(prefix)
            assert str(raised.value).startswith((f"{prefix}.idx: ", f"{prefix}.bin: "))
            assert (unsupported or (fault and fault.text)) == str(raised.value)
        else:
            assert not unsupported
            dataset = IndexedDataset(prefix)
            assert [dataset[i].tolist() for i in range(len(dataset))] == expected
            flat = [token for sequence in expected for token in sequence]
            bad = [i for i, token in enumerate(flat) if not 0 <= token < VOCAB_SIZE]
            seen["bad ids" if bad else "sound"] += 1
            assert (None if fault is None else fault.offset) == (bad[0] * dataset.dtype.itemsize if bad else None)
        write_side_file(side, original, code)
        unchanged = pair == original
        seen["changed"] += not unchanged
        try:
            assert (verify(prefix, vocab_size=1 << 62).fault is None) == unchanged
        except ConfigError as error:
            pytest.fail(f"no damage should look like bad input: {error}")
    return seen


def write_side_file(path: Path, original: Pair, code: int) -> None:
    sequences = read_slowly(bytes(original.bin), bytes(original.idx))
    assert sequences is not None
    files = {
        suffix: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for suffix, data in ((".bin", original.bin), (".idx", original.idx))
    }
    documents = struct.unpack_from("<Q", original.idx, 26)[0] - 1
    facts = {"format": 1, "documents": documents, "tokens": sum(map(len, sequences)), "dtype": NAMES[code]}
    path.write_text(json.dumps(facts | {"files": files}))


def test_damaged_files_are_refused_or_read_correctly(tmp_path: Path) -> None:
    seen = fuzz(tmp_path, seed=1, count=1500)
    assert min(seen.values()) > 35, seen


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    """With a side file every flipped bit is detected."""
    tokens, idx = pack(MIXED)
    prefix = str(tmp_path / "d")
    write_side_file(tmp_path / "d.json", Pair(bytearray(tokens), bytearray(idx)), 8)
    Path(f"{prefix}.idx").write_bytes(idx)
    for suffix, data in ((".bin", tokens), (".idx", idx)):
        for bit in range(8 * len(data)):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            Path(prefix + suffix).write_bytes(changed)
            assert verify(prefix).fault is not None
        Path(prefix + suffix).write_bytes(data)
    assert verify(prefix).fault is None
