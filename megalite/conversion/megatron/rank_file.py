"""One rank's file of Megatron-LM's `torch` format."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.conversion.megatron.given_args import Arguments
from megalite.conversion.megatron.names import Named, tensors_of
from megalite.conversion.megatron.torch_file import TorchFile
from megalite.conversion.weights import ConversionError


class RankFile:
    """What is known of one file without its elements: arguments, version and the chunks' tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = TorchFile(path)
        content, self.file.content = self.file.content, None  # the optimizer's part of it may go
        if not isinstance(content, dict) or not isinstance(content.get("args"), Namespace):
            raise ConversionError(f"{path} has no args, which say what the model is")
        self.args = Arguments(vars(content["args"]), path)
        self.version = content.get("checkpoint_version", 0)
        if not isinstance(self.version, int | float) or not 0 <= self.version < 4:
            raise ConversionError(f"{path}: checkpoint_version is {self.version!r}; 0 to 3.0 are known")
        self.chunks = [_tensors(path, chunk) for chunk in _chunks(path, content)]


def _chunks(path: Path, content: Mapping[Any, Any]) -> list[Any]:
    """The `model`, or `model0`, `model1`, ... of a virtual pipeline."""
    if "model" in content:
        return [content["model"]]
    count = sum(f"model{index}" in content for index in range(len(content)))
    if not count or any(f"model{index}" not in content for index in range(count)):
        raise ConversionError(f"{path} has neither model nor model0, model1, ...")
    return [content[f"model{index}"] for index in range(count)]


def _tensors(path: Path, chunk: Any) -> Named:
    if not isinstance(chunk, Mapping):
        raise ConversionError(f"{path}: its model is a {type(chunk).__name__}, not a dict of tensors")
    try:
        return tensors_of(chunk)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from None
