"""What training reads and writes of Hugging Face's: the slices per rank, under the keys of a checkpoint, and a
checkpoint of the run as a folder."""

from pathlib import Path

import torch

from megalite.checkpoint.manifest import TensorEntry, weight_key
from megalite.checkpoint.safetensors_file import DTYPE_NAMES
from megalite.checkpoint.tiling import Slice
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.native import NativeWeights
from megalite.conversion.output import Advance, Log
from megalite.conversion.weights import parameter_shapes


class HuggingFaceSource:
    """The weights for `model`, which says how the vocabulary is padded; else it must be the folder's own."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._weights = HuggingFaceWeights(folder, divisible_by=model.make_vocab_size_divisible_by)
        self.path, self.model, self.dequantised = folder, self._weights.model, self._weights.dequantised
        self._entries = {
            weight_key(name): TensorEntry(name, DTYPE_NAMES[self._weights.dtype(name)], shape.shape, ())
            for name, shape in parameter_shapes(self.model).items()
        }

    def has(self, key: str) -> bool:
        return key in self._entries

    def entry(self, key: str) -> TensorEntry:
        return self._entries[key]

    def read_into(self, output: torch.Tensor, key: str, slice: Slice) -> None:
        output.copy_(self._weights.read(self._entries[key].name, slice))


def export_checkpoint(checkpoints: Path, step: int, target: Path, advance: Advance, log: Log, ema: bool) -> Path:
    """What `megalite convert` makes of a checkpoint, byte for byte."""
    weights = NativeWeights(checkpoints, step=step, ema=ema)
    if weights.missing_tokenizer is not None:
        log(f"warning: no tokenizer goes into {target}: that of the run {weights.missing_tokenizer}")
    return write_huggingface(weights, target, advance=advance)
