"""Token files and settings with known arrays of Megatron-LM, and the digests of these arrays."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.data import DataConfig
from megalite.data.dataset import raw_draws
from megalite.data.megatron_dataset import MegatronBlend, MegatronDataset
from megalite.data.sources import build_datasets

Case = dict[str, Any]
"""files: (documents, shortest, longest, salt) of each; weights or none; split or none (each split has all); seq_length;
seed; num_samples of the three splits."""


def sizes_of(file: Sequence[int]) -> list[int]:
    """Lengths of a file's documents."""
    documents, shortest, longest, salt = file
    draws = raw_draws(documents, seed=salt, index=0)
    return (shortest + draws % np.uint64(longest + 1 - shortest)).astype(int).tolist()


def write_files(case: Case, folder: Path) -> list[str]:
    """Write token files of zeros. Returns their prefixes."""
    prefixes = []
    for number, file in enumerate(case["files"]):
        sizes = sizes_of(file)
        n = len(sizes)
        starts = np.cumsum([0, *sizes[:-1]]) * 2
        idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, n + 1)
        idx += np.array(sizes, "<i4").tobytes() + starts.astype("<i8").tobytes()
        (folder / f"{number}.idx").write_bytes(idx + np.arange(n + 1, dtype="<i8").tobytes())
        (folder / f"{number}.bin").write_bytes(bytes(2 * sum(sizes)))
        prefixes.append(str(folder / str(number)))
    return prefixes


def blend_of(case: Case, prefixes: Sequence[str]) -> list[str]:
    """Words of --data-path."""
    if case["weights"] is None:
        return list(prefixes)
    return [word for pair in zip(map(str, case["weights"]), prefixes, strict=True) for word in pair]


def digest(arrays: Sequence[np.ndarray]) -> str:
    """Digest of values, dtypes and shapes."""
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(f"{array.dtype.str} {array.shape} ".encode())
        sha256.update(np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()


def our_digests(case: Case, folder: Path) -> dict[str, list[str]]:
    """Digests per split: the arrays of the blend, if there is one, and of each dataset."""
    words = blend_of(case, write_files(case, folder))
    if case["split"] is None:
        data = DataConfig(data_order="megatron", train_data_path=words, valid_data_path=words, test_data_path=words)
    else:
        data = DataConfig(data_order="megatron", data_path=words, split=case["split"])
    splits = ("train", "valid", "test")
    built = build_datasets(
        data,
        seq_length=case["seq_length"],
        seed=case["seed"],
        vocab_size=10,
        splits=splits,
        num_samples=dict(zip(splits, case["num_samples"], strict=True)),
    )
    found: dict[str, list[str]] = {}
    for split in splits:
        source = getattr(built, split)
        if source is None:
            continue
        parts = [source]
        found[split] = []
        if isinstance(source, MegatronBlend):
            found[split].append(digest([source.arrays[name] for name in ("dataset_index", "dataset_sample_index")]))
            parts = source.datasets
        for part in parts:
            assert isinstance(part, MegatronDataset)
            names = ("document_index", "sample_index", "shuffle_index")
            found[split].append(digest([part.arrays[name] for name in names]))
    return found
