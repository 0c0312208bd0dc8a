"""Conversion of a model's weights, beside a plain copy of the same bytes."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.files import CHUNK, write_all
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.write import write_huggingface
from megalite.conversion.megatron.write import write_megatron
from megalite.conversion.native import write_native
from megalite.conversion.open import open_weights
from megalite.conversion.weights import parameter_shapes

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=1024,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=64,
    ffn_hidden_size=2816,
    vocab_size=32000,
    max_position_embeddings=2048,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    tie_embeddings=False,
)
LIMIT = 1 << 30


class MadeUp:
    """Random bf16 weights, to begin with."""

    path, format, model, seq_length, tokenizer_files = Path("made-up"), "megalite", MODEL, 2048, ()

    def dtype(self, name: str) -> torch.dtype:
        """bf16."""
        return torch.bfloat16

    def read(self, name: str) -> torch.Tensor:
        """Random values."""
        return torch.randn(parameter_shapes(MODEL)[name].shape, dtype=torch.float32).bfloat16()


def convert_round(root: str) -> dict[str, Any]:
    """Seconds of a plain copy with fsync and of each conversion; the source is read from the system's memory by all."""
    folder = Path(root) / "convert"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_native(MadeUp(), folder / "native", dtype=None, max_file_bytes=LIMIT, advance=_ignore)
    source = folder / "native"
    files = sorted(source.glob("step-*/*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    seconds: dict[str, float] = {}
    (folder / "copy").mkdir()

    def run(name: str, work: Any) -> None:
        os.sync()
        start = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - start

    run("copy", lambda: [_copy(path, folder / "copy" / path.name) for path in files])
    options: dict[str, Any] = {"dtype": None, "advance": _ignore}
    hf, megatron = folder / "hf", folder / "megatron"
    run(
        "native to Hugging Face",
        lambda: write_huggingface(open_weights(source), hf, family=None, max_file_bytes=LIMIT, **options),
    )
    run(
        "Hugging Face to native",
        lambda: write_native(open_weights(hf), folder / "back", max_file_bytes=LIMIT, **options),
    )
    run(
        "native to Megatron tp2 pp2",
        lambda: write_megatron(open_weights(source), megatron, tp=2, pp=2, **options),
    )
    run(
        "Megatron to native",
        lambda: write_native(open_weights(megatron), folder / "again", max_file_bytes=LIMIT, **options),
    )
    shutil.rmtree(folder)
    return {"bytes": size, "seconds": seconds}


def _ignore(count: int) -> None:
    """Progress that nobody watches."""


def _copy(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT)
    with source.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            write_all(descriptor, memoryview(chunk))
    os.fsync(descriptor)
    os.close(descriptor)
