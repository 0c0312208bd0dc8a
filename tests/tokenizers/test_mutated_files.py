"""Mutated tokenizer files are refused by name, or work: this file is both a program that runs in a separate process, and its test.

A fault in a C++ or Rust library would crash the process, and an alarm stops endless loops: the test detects both, with the
number of the case."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.tokenizers.build import build_tokenizer

LONGEST_CASE, CASES = 5, 1500
PROBE = "def probe(x):\n\treturn 'naïve 日本語 🙂' # 123  </s><|endoftext|>\x00"
Change = Callable[[bytes, random.Random], bytes]


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 30])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def splice(content: bytes, rng: random.Random) -> bytes:
    start, stop = sorted(rng.choices(range(len(content)), k=2))
    piece = content[start : min(stop, start + rng.choice([1, 8, 200]))] * rng.choice([0, 1, 2, 5])
    at = rng.randrange(len(content))
    return content[:at] + piece + content[at + rng.choice([0, 1, len(piece)]) :]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    odd = rng.choice([b"\xff" * 8, bytes(8), b"\x80" * 9 + b"\x01", b"-1", b"1e99", b"\n", b'"'])
    return content[:at] + odd + content[at + len(odd) :]


def edit_json(content: bytes, rng: random.Random) -> bytes:
    """Change, remove or repeat values somewhere in a JSON document."""
    try:
        document = json.loads(content)
    except ValueError:
        return flip_bits(content, rng)
    for _ in range(rng.choice([1, 1, 4])):
        _edit(document, rng)
    return json.dumps(document).encode()


def _edit(document: Any, rng: random.Random) -> None:
    node = document
    while True:
        if isinstance(node, dict) and node:
            key: Any = rng.choice(sorted(node))
        elif isinstance(node, list) and node:
            key = rng.randrange(len(node))
        else:
            return
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        odd = [None, True, -1, 0, 1 << 31, 1 << 40, 1 << 70, 1.5, "", "a", "\ud800", "(a+)+$", "[", [], {}, [[]]]
        odd += [{"Regex": r"(\w+\s?)+$"}, {"String": ""}, "BPE", "Unigram", "ByteLevel"]
        if rng.random() < 0.2:
            del node[key]
        elif rng.random() < 0.2 and isinstance(node, dict):
            node[rng.choice([*sorted(node), "x"])] = node[key]
        else:
            node[key] = rng.choice(odd)
        return


CHANGES: list[Change] = [flip_bits, truncate, splice, overwrite, edit_json, edit_json]


def judge(data: DataConfig, name: str) -> bool:
    """Return whether the file works (True) or is rejected with its name (False)."""
    try:
        tokenizer = build_tokenizer(data, None)
        assert tokenizer is not None
        batch = tokenizer.encode_batch([PROBE, ""])
        ids = list(batch[0])
        assert ids == tokenizer.encode(PROBE) and list(batch[1]) == tokenizer.encode("")
        assert all(0 <= i < tokenizer.vocab_size for i in [*ids, tokenizer.eod]), "ids beyond the vocabulary"
        tokenizer.decode([*ids, 0, tokenizer.eod, tokenizer.vocab_size - 1, tokenizer.vocab_size, 1 << 40])
    except ConfigError as error:
        assert name in str(error), f"the file is not named: {error}"
        return False
    return True


def main(folder: Path, cases: int, first: int) -> int:
    """Run cases of each kind in turn; the files are in `folder`, as the fixture `small_files` writes them."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("sp.model", {"tokenizer_model": "sp.model"}),
        ("unigram.model", {"tokenizer_model": "unigram.model"}),
        ("tokenizer.json", {"tokenizer_model": "tokenizer.json"}),
        ("unigram.json", {"tokenizer_model": "unigram.json"}),
        ("vocab.json", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
        ("merges.txt", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
        ("ranks.tiktoken", {"tokenizer_model": "ranks.tiktoken", "tiktoken_pattern": "gpt2"}),
        ("list.json", {"tokenizer_model": "list.json"}),
    ]
    originals = {name: (folder / name).read_bytes() for name, _ in kinds}
    worked = dict.fromkeys(originals, 0)
    for case in range(first, first + cases):
        name, settings = kinds[case % len(kinds)]
        rng = random.Random(case)
        change = CHANGES[rng.randrange(len(CHANGES))]
        content = change(originals[name], rng)
        (folder / name).write_bytes(content)
        paths = {key: value if key == "tiktoken_pattern" else str(folder / value) for key, value in settings.items()}
        signal.alarm(LONGEST_CASE)
        print(f"case {case} {name} {change.__name__}", file=sys.stderr, flush=True)
        worked[name] += judge(DataConfig(**paths), name)
        signal.alarm(0)
        (folder / name).write_bytes(originals[name])
    print(json.dumps(worked))
    return 0


def test_mutated_files_are_refused_or_work(small_files: Path) -> None:
    """Bit flips, truncations, splices and edits of every kind of file, in a process that may crash or be stopped."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("tiktoken")
    program = [sys.executable, "-m", "tests.tokenizers.test_mutated_files", str(small_files), str(CASES), "0"]
    quiet = os.environ | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=quiet, timeout=200)
    last = run.stderr[-1500:]
    assert run.returncode == 0, f"status {run.returncode} (a negative one is a signal; 14 the alarm) after: {last}"
    worked = json.loads(run.stdout)
    # Some of each kind still work: mutations that break all files would prove nothing.
    assert len(worked) == 8 and all(worked.values()), worked
    assert sum(worked.values()) < CASES * 2 / 3, worked


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
