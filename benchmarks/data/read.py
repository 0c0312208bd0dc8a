"""Index, samples, opening and verification of a large token file, compared with plain copies and reads of its tokens."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from megalite.data.dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset, write_documents
from megalite.data.megatron_dataset import MegatronDataset
from megalite.preprocess.verify import verify

SEQ_LENGTH = 2048
VOCABULARY = 50_257
ORDER: dict[str, Any] = {"seq_length": SEQ_LENGTH, "seed": 1234, "name": "train"}
_BLOCK = 1 << 16


def write_tokens(prefix: Path, *, tokens: int, documents: int) -> None:
    """Write a file of random ids in documents of exponentially distributed lengths."""
    random = np.random.default_rng(0)
    mean = tokens / documents
    lengths = 1 + random.exponential(mean - 1, documents).astype(np.int64)
    blocks = (lengths[first : first + _BLOCK] for first in range(0, documents, _BLOCK))
    drawn = ((random.integers(0, VOCABULARY, int(block.sum()), dtype=np.uint16), block) for block in blocks)
    write_documents(prefix, drawn, np.uint16)


def index_row(prefix: Path, order: str) -> dict[str, Any]:
    """Seconds from an open file to the first sample, in a separate process, and the increase of its peak memory."""
    return dict(json.loads(common.run_python("-m", "benchmarks.data.read", str(prefix), order)))


def _index(prefix: Path, order: str) -> dict[str, Any]:
    indexed = IndexedDataset(prefix)
    settings: dict[str, Any] = {"documents": range(len(indexed)), **ORDER}
    before = _forget_peak()
    start = time.perf_counter()
    if order == "megatron":
        samples = indexed.num_tokens // SEQ_LENGTH
        MegatronDataset(indexed, num_samples=samples, **settings).sample(0)
    else:
        GPTDataset(indexed, **settings).sample(0)
    return {"seconds": time.perf_counter() - start, "memory MB": (_peak() - before) / 1e6}


def _forget_peak() -> int:
    """Resident bytes of this process, and reset of `_peak`. (ru_maxrss would include the parent's until exceeded.)"""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Peak resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def samples_row(prefix: Path, samples: int) -> dict[str, float]:
    """Samples per second in shuffled order, including the check of ids, and of copying as many tokens from as many random
    places."""
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, documents=range(len(indexed)), vocab_size=VOCABULARY, **ORDER)
    dataset.sample(0)  # builds the index
    starts = np.random.default_rng(1).integers(0, indexed.num_tokens - SEQ_LENGTH - 1, samples).tolist()
    tokens = indexed.tokens

    def copy() -> None:
        for first in starts:
            tokens[first : first + SEQ_LENGTH + 1].astype(np.int64)

    common.seconds_of(copy)  # brings the file into memory
    ours = common.seconds_of(lambda: [dataset.sample(k) for k in range(samples)])
    bare = common.seconds_of(copy)
    return {
        "samples/s": samples / ours,
        "tokens/s": samples * SEQ_LENGTH / ours,
        "bare copies/s": samples / bare,
        "of bare": bare / ours,
    }


def open_row(prefix: Path) -> dict[str, float]:
    """Seconds of opening (reads the index, not the tokens), verifying every token, and reading both files."""
    size = sum(Path(f"{prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx"))
    index = Path(f"{prefix}.idx").stat().st_size

    def read() -> None:
        buffer = bytearray(1 << 20)
        for suffix in (".bin", ".idx"):
            with Path(f"{prefix}{suffix}").open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def check() -> None:
        found = verify(str(prefix), vocab_size=VOCABULARY)
        assert found.fault is None, found

    reading, opening = common.seconds_of(read), common.seconds_of(lambda: IndexedDataset(prefix))
    verifying = common.seconds_of(check)
    return {
        "open seconds": opening,
        "open GB/s of index": index / opening / 1e9,
        "verify GB/s": size / verifying / 1e9,
        "read GB/s": size / reading / 1e9,
        "verify of read": reading / verifying,
    }


if __name__ == "__main__":
    print(json.dumps(_index(Path(sys.argv[1]), sys.argv[2])))
