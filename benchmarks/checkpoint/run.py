"""Speed of writing and reading checkpoints, compared with the plain file system, torch DCP and torch.save.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint.run [--rounds 7] [--folder DIR] [--tiny] [--json FILE]

Every round runs each method once, in another order, on the same training state and with fsync; files are dropped from the
page cache before they are read. Ratios are to the plain bandwidth of the same round (medians over the rounds)."""

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.checkpoint.saving import Seconds, saving_round, stall_round
from megalite.checkpoint.files import CHUNK, write_all
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.megatron.write import write_megatron
from megalite.conversion.native import write_native
from megalite.conversion.open import open_weights
from megalite.conversion.weights import Weights, parameter_shapes
from megalite.parity.pool import RankPool

MODEL = ModelConfig(
    **common.settings(
        "num_layers=8 hidden_size=1024 num_attention_heads=16 num_query_groups=8 kv_channels=64 ffn_hidden_size=2816 "
        "vocab_size=32000 max_position_embeddings=2048 position_embedding_type=rope normalization=RMSNorm "
        "activation=swiglu add_bias_linear=false tie_embeddings=false"
    )
)
TINY = replace(MODEL, num_layers=2, hidden_size=64, kv_channels=4, ffn_hidden_size=128, vocab_size=512)
LIMIT = 1 << 30


class RandomWeights(Weights):
    """Random bf16 weights as the source of conversions."""

    path, format, seq_length, tokenizer_files = Path("random"), "megalite", 2048, ()
    tokenizer_hints, generation = DataConfig(), {}

    def __init__(self, model: ModelConfig) -> None:
        self.model, self._shapes = model, parameter_shapes(model)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str) -> torch.Tensor:
        return torch.randn(self._shapes[name].shape, dtype=torch.float32).bfloat16()


def convert_round(root: str, turn: int, *, tiny: bool = False) -> dict[str, Any]:
    """Seconds of a plain copy with fsync and of each conversion, starting with another one each round, as a disk is slow for a
    while after much writing. All reads come from the page cache."""
    folder = Path(root) / "convert"
    (folder / "copy").mkdir(parents=True)
    source, hf, megatron = folder / "native", folder / "hf", folder / "megatron"
    native = partial(write_native, max_file_bytes=LIMIT)
    native(RandomWeights(TINY if tiny else MODEL), source)
    files = sorted(source.glob("step-*/*.safetensors"))
    to_hf = partial(write_huggingface, max_file_bytes=LIMIT)
    to_megatron = partial(write_megatron, tp=2, pp=2)
    to_hf(open_weights(source), hf)
    to_megatron(open_weights(source), megatron)
    works = {
        "copy": lambda: [_copy(path, folder / "copy" / path.name) for path in files],
        "native to Hugging Face": lambda: to_hf(open_weights(source), folder / "hf again"),
        "Hugging Face to native": lambda: native(open_weights(hf), folder / "back"),
        "native to Megatron tp2 pp2": lambda: to_megatron(open_weights(source), folder / "megatron again"),
        "Megatron to native": lambda: native(open_weights(megatron), folder / "again"),
    }
    seconds = {}
    for name in (list(works) * 2)[turn % len(works) :][: len(works)]:
        os.sync()
        seconds[name] = common.seconds_of(works[name])
    size = sum(path.stat().st_size for path in files)
    shutil.rmtree(folder)
    return {"bytes": size, "seconds": seconds}


def _copy(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT)
    with source.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            write_all(descriptor, memoryview(chunk))
    os.fsync(descriptor)
    os.close(descriptor)


def table(rounds: list[tuple[Seconds, Seconds, int]]) -> list[dict[str, Any]]:
    """Method -> median MB/s, and median ratio to the plain method in the same round."""
    size = rounds[0][2]
    rows = []
    for way in sorted(rounds[0][0], key=lambda name: (name != "raw", name)):
        row: dict[str, Any] = {"way": way}
        for index, name in enumerate(("save", "load")):
            if all(way in one[index] for one in rounds):
                seconds = [one[index][way] for one in rounds]
                row[f"{name} MB/s"] = statistics.median(size / taken / 1e6 for taken in seconds)
                row[f"{name} of raw"] = common.ratio([one[index]["raw"] for one in rounds], seconds)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    columns = ["way", "save MB/s", "save of raw", "load MB/s", "load of raw"]
    cells = [[row["way"], *(f"{row[key]:.3g}" if key in row else "" for key in columns[1:])] for row in rows]
    print(common.markdown([columns, *cells]))


def measure(root: str, rounds: int, *, tiny: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with RankPool(2) as pool:
        for ranks in (1, 2):
            found = [pool.run(ranks, saving_round, ranks, root, seed, tiny, timeout=600)[0] for seed in range(rounds)]
            print(f"\n{ranks} rank(s), {found[0][2] / 1e6:.0f} MB")
            show(table(found))
            result[f"{ranks} ranks"] = {"rounds": found, "table": table(found)}
        stalls = [pool.run(2, stall_round, 2, root, tiny, timeout=600)[0] for _ in range(max(1, rounds // 2))]
    stall = {name: statistics.median(one[name] for one in stalls) for name in stalls[0]}
    result["stall"] = {"rounds": stalls, "median": stall}
    step = stall["step"]
    print(
        f"\nA save stalls training for {stall['sync call'] / step:.2f} steps; in the background for "
        f"{stall['async call'] / step:.2f}, and while it is written ({stall['written']:.2f} s) a step takes "
        f"{stall['step beside'] / step:.2f} of its time ({step * 1e3:.0f} ms)."
    )
    result["conversion"] = conversions = [convert_round(root, turn, tiny=tiny) for turn in range(rounds)]
    print(f"\nConversion of {conversions[0]['bytes'] / 1e6:.0f} MB of weights, of a plain copy with fsync:")
    copies = [one["seconds"]["copy"] for one in conversions]
    for name in conversions[0]["seconds"]:
        seconds = [one["seconds"][name] for one in conversions]
        rate = conversions[0]["bytes"] / statistics.median(seconds) / 1e6
        print(f"  {name:<28} {rate:6.0f} MB/s  {common.ratio(copies, seconds):.2f}")
    return result


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--tiny", action="store_true", help="tiny models: does it run?")
    arguments = parser.parse_args(words)
    load = common.machine()["load"]
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as root:
        result = measure(root, arguments.rounds, tiny=arguments.tiny)
    common.write_json(arguments.json, "checkpoint.run", words, {**result, "load_before": load})


if __name__ == "__main__":
    main()
