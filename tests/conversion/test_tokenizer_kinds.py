"""Checkpoints with tokenizers that need more than their files, or have none: tiktoken's with a pattern, and bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.model_commands import GENERATE
from megalite.config.data import DataConfig
from megalite.conversion.model_folder import (
    named_tokenizer_files,
    saved_tokenizer_files,
    tokenizer_folder_files,
    tokenizer_of,
)
from megalite.conversion.native import NativeWeights, write_native
from megalite.conversion.weights import ConversionError
from megalite.preprocess.train_tokenizer import train_sentencepiece
from megalite.tokenizers.build import build_tokenizer
from tests.conversion.samples import GPT, MadeUp, byte_tokenizer, run
from tests.tokenizers.texts import write_megatron_list, write_tiktoken

pytest.importorskip("tiktoken")

RANKS = {bytes([byte]): byte for byte in range(256)}
Captured = pytest.CaptureFixture[str]


def continued(*words: str | Path) -> int:
    fixed = ["--prompt", "def", "--max-new-tokens", "3", "--temperature", "0", "--device", "cpu"]
    return GENERATE([*fixed, *map(str, words)])


def checkpoint(folder: Path, files: list[Path], **hints: Any) -> Path:
    weights = MadeUp(folder.parent, {**GPT, "vocab_size": 1300}, tokenizer_files=files)
    weights.tokenizer_hints = DataConfig(**hints)
    return write_native(weights, folder)


def of_lines(folder: Path) -> Path:
    return write_tiktoken(folder / "ours.tiktoken", RANKS)


def of_list(folder: Path) -> Path:
    """With a vocabulary file name of GPT-2."""
    return write_megatron_list(folder / "vocab.json", RANKS)


@pytest.mark.parametrize(
    ("write", "pattern", "end"), [(of_lines, "gpt2", 256), (of_list, "cl100k_base", 2), (of_list, "v2", 2)]
)
def test_tiktoken_with_a_pattern(
    write: Callable[[Path], Path], pattern: str, end: int, tmp_path: Path, capsys: Captured
) -> None:
    source = checkpoint(tmp_path / "a", [write(tmp_path)], tiktoken_pattern=pattern)
    recorded = NativeWeights(source).recorded_tokenizer
    given = build_tokenizer(
        DataConfig(tokenizer_model=str(tmp_path / write(tmp_path).name), tiktoken_pattern=pattern), 1300
    )
    assert given is not None and recorded == given.fingerprint()

    assert run(source, tmp_path / "hf", "--to", "huggingface") == 2
    error = capsys.readouterr().err
    assert "is a tiktoken file; give a tokenizer.json, or --without-" in error
    assert run(source, tmp_path / "hf", "--to", "huggingface", "--without-tokenizer") == 0
    said = capsys.readouterr().out
    assert "verify   passed" in said
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == end
    assert not (tmp_path / "hf" / "tokenizer.json").exists()

    assert run(source, tmp_path / "b", "--to", "native") == 0
    assert "verify   passed" in capsys.readouterr().out
    again = NativeWeights(tmp_path / "b")
    assert (again.recorded_tokenizer, again.tokenizer_hints.tiktoken_pattern) == (recorded, pattern)
    assert f"tiktoken_pattern: {pattern}" in (tmp_path / "b" / "config.yaml").read_text()
    assert continued("--load", tmp_path / "b") == 0
    assert run(source, tmp_path / "m", "--to", "megatron") == 0


def test_pattern_is_only_for_tiktoken_files(tmp_path: Path, capsys: Captured) -> None:
    source = checkpoint(tmp_path / "a", [of_lines(tmp_path)], tiktoken_pattern="gpt2")
    byte_tokenizer(tmp_path / "other")
    for given, status in ((tmp_path / "ours.tiktoken", 0), (tmp_path / "other", 2)):
        assert continued("--load", source, "--tokenizer-model", given) == status
    assert "is not the tokenizer that " in capsys.readouterr().err
    flags = ["--to", "native", "--no-verify", "--tokenizer-model"]
    assert run(source, tmp_path / "b", *flags, tmp_path / "ours.tiktoken") == 0
    assert capsys.readouterr().err == ""
    assert run(source, tmp_path / "c", *flags, tmp_path / "other") == 0
    assert "warning: " in capsys.readouterr().err
    assert NativeWeights(tmp_path / "c").tokenizer_hints == DataConfig()


def test_bytes_tokenizer(tmp_path: Path, capsys: Captured) -> None:
    source = checkpoint(tmp_path / "a", [], tokenizer_type="ByteLevelTokenizer")
    assert "tokenizer_type: ByteLevelTokenizer" in (source / "config.yaml").read_text()
    for target, flags in (("hf", []), ("bare", ["--without-tokenizer"])):
        assert run(source, tmp_path / target, "--to", "huggingface", *flags, "--no-verify") == 0
        said = capsys.readouterr().out
        none = "ByteLevelTokenizer has none; ids are the bytes of the text in UTF-8, and 256 ends a document"
        assert (f"without tokenizer file: {none}\n" in said) is (target == "hf")
        for name in ("config.json", "generation_config.json"):
            assert json.loads((tmp_path / target / name).read_text())["eos_token_id"] == 256
    assert run(source, tmp_path / "b", "--to", "native", "--no-verify") == 0
    tokenizer = tokenizer_of(NativeWeights(tmp_path / "b"))
    assert tokenizer is not None and tokenizer.name == "ByteLevelTokenizer"
    assert continued("--load", tmp_path / "b") == 0
    assert run(source, tmp_path / "c", "--to", "native", "--without-tokenizer", "--no-verify") == 0
    assert tokenizer_of(NativeWeights(tmp_path / "c")) is None


def test_files_of_a_folder_with_several_tokenizers(tmp_path: Path) -> None:
    model = train_sentencepiece(["a text " * 50], output_prefix=tmp_path / "tokenizer", vocab_size=270)
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')

    def names(folder: Path, kind: str | None) -> list[str]:
        return [path.name for path in tokenizer_folder_files(folder, kind)]

    everything = ["tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"]
    assert names(tmp_path, None) == names(tmp_path, "HuggingFaceTokenizer") == everything
    assert names(tmp_path, "SentencePieceTokenizer") == [model.name]
    assert names(tmp_path, "GPT2BPETokenizer") == ["vocab.json", "merges.txt"]
    saved = DataConfig(tokenizer_model=str(tmp_path), tokenizer_type="SentencePieceTokenizer")
    assert saved_tokenizer_files(saved, tmp_path / "run") == [model]
    (tmp_path / "openai").mkdir()
    with pytest.raises(ConversionError, match=r"holds no tokenizer\.json, tokenizer\.model, \.tiktoken"):
        tokenizer_folder_files(tmp_path / "openai")
    lines = of_lines(tmp_path / "openai")
    assert names(tmp_path / "openai", None) == ["ours.tiktoken"]
    assert named_tokenizer_files([lines]) == {"tokenizer.model": lines}
    write_tiktoken(tmp_path / "openai" / "b.tiktoken", RANKS)
    with pytest.raises(ConversionError, match=r"holds b\.tiktoken, ours\.tiktoken"):
        tokenizer_folder_files(tmp_path / "openai")
