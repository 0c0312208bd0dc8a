import os
from pathlib import Path

import pytest

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.tokenizers.base import NullTokenizer, Tokenizer
from megalite.tokenizers.build import build_tokenizer
from megalite.tokenizers.subword import SentencePieceTokenizer
from tests.tokenizers.texts import write_tiktoken


def build(vocab_size: int | None = None, **settings: Path | str) -> Tokenizer | None:
    return build_tokenizer(DataConfig(**{k: str(v) for k, v in settings.items()}), vocab_size)


def name(**settings: Path | str) -> str:
    tokenizer = build(**settings)
    assert tokenizer is not None
    return tokenizer.name


def test_kinds_are_inferred_from_the_files(byte_bpe: Path, tmp_path: Path) -> None:
    assert build() is None
    assert name(tokenizer_model=byte_bpe / "sp.model") == "SentencePieceTokenizer"
    assert name(tokenizer_model=byte_bpe / "tokenizer.json") == "HuggingFaceTokenizer"
    assert name(vocab_file=byte_bpe / "vocab.json", merge_file=byte_bpe / "merges.txt") == "GPT2BPETokenizer"
    assert name(tokenizer_model=byte_bpe) == "HuggingFaceTokenizer"
    (tmp_path / "oddly-named").write_bytes((byte_bpe / "tokenizer.json").read_bytes())
    assert name(tokenizer_model=tmp_path / "oddly-named") == "HuggingFaceTokenizer"
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((byte_bpe / file).read_bytes())
    assert name(tokenizer_model=tmp_path) == "GPT2BPETokenizer"
    tokenizer = build(vocab_size=50, tokenizer_type="NullTokenizer")
    assert tokenizer is not None and tokenizer.vocab_size == 50
    assert name(tokenizer_type="ByteLevelTokenizer") == "ByteLevelTokenizer"
    assert name(tokenizer_model=byte_bpe / "ranks.tiktoken", tiktoken_pattern="gpt2") == "TikTokenizer"
    assert name(tokenizer_model=byte_bpe / "list.json") == "TikTokenizer"


def test_tokenizers_in_folders(byte_bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "own.tiktoken").write_bytes((byte_bpe / "ranks.tiktoken").read_bytes())
    assert name(tokenizer_model=tmp_path, tiktoken_pattern="gpt2") == "TikTokenizer"
    # Meta's tiktoken file has the name of SentencePiece models.
    (tmp_path / "own.tiktoken").rename(tmp_path / "tokenizer.model")
    assert name(tokenizer_model=tmp_path, tiktoken_pattern="gpt2") == "TikTokenizer"
    (tmp_path / "tokenizer.json").write_bytes((byte_bpe / "tokenizer.json").read_bytes())
    assert name(tokenizer_model=tmp_path) == "HuggingFaceTokenizer"
    # With several in a folder, the one of the requested type.
    wanted = {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "gpt2"}
    assert name(tokenizer_model=tmp_path, **wanted) == "TikTokenizer"
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((byte_bpe / file).read_bytes())
    assert name(tokenizer_model=tmp_path, tokenizer_type="GPT2BPETokenizer") == "GPT2BPETokenizer"


def test_folder_with_openai_names(byte_bpe: Path, tmp_path: Path) -> None:
    for theirs, file in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / theirs).write_bytes((byte_bpe / file).read_bytes())
    found, same = build(tokenizer_model=tmp_path), build(tokenizer_model=byte_bpe, tokenizer_type="GPT2BPETokenizer")
    assert found is not None and same is not None and found.fingerprint() == same.fingerprint()
    (tmp_path / "vocab.bpe").unlink()
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        build(tokenizer_model=tmp_path)


def test_folder_without_a_tokenizer_or_with_several_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json, tokenizer\.model, \.tiktoken, or vocab"):
        build(tokenizer_model=tmp_path)
    for file in ("a.tiktoken", "b.tiktoken"):
        write_tiktoken(tmp_path / file, {bytes([i]): i for i in range(256)})
    with pytest.raises(ConfigError, match=r"holds a\.tiktoken, b\.tiktoken; give one"):
        build(tokenizer_model=tmp_path)


HF, SP = "HuggingFaceTokenizer", "SentencePieceTokenizer"
CONTRADICTIONS = [
    ("vocab.json", {}, r"vocab\.json is the vocab\.json of a GPT-2 BPE; give --vocab-file .*vocab\.json and"),
    ("merges.txt", {}, r"merges\.txt is the merges\.txt of a GPT-2 BPE; give --merge-file"),
    ("tokenizer.json", {"tokenizer_type": SP}, "is a Hugging Face tokenizer.json; use --tokenizer-type Hugging"),
    ("ranks.tiktoken", {"tokenizer_type": HF}, "is a tiktoken file; use --tokenizer-type Tik"),
    ("sp.model", {"tokenizer_type": HF}, r"sp\.model is not a Hugging Face tokenizer\.json"),
    ("sp.model", {"tiktoken_pattern": "gpt2"}, r"sp\.model: line 2: expected a token in base64 and its rank"),
    ("tokenizer.json", {"tiktoken_pattern": "gpt2"}, f"{HF} .*does not read tiktoken_pattern"),
    ("tokenizer.json", {"tokenizer_type": "ByteLevelTokenizer"}, "ByteLevel.* does not read tokenizer_model"),
]


@pytest.mark.parametrize(("file", "settings", "message"), CONTRADICTIONS)
def test_contradicting_content_and_settings_are_errors(
    byte_bpe: Path, file: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tokenizer_model=byte_bpe / file, **settings)


def test_pipe_or_corpus_in_place_of_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="it is a pipe or device, not a file"):
            build(tokenizer_model=device)
    with (tmp_path / "corpus").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(ConfigError, match="corpus has 1073741825 bytes, more than"):
        build(tokenizer_model=tmp_path / "corpus")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_model": "no.model"}, "no.model cannot be read: No such file"),
        ({"vocab_file": "v.json"}, "needs --vocab-file and --merge-file, got v.json and None"),
        ({"tokenizer_model": "a", "vocab_file": "b"}, "a excludes vocab_file b"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file, got None and None"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "needs tokenizer_model"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model tokenizer.json"),
        ({"tokenizer_type": "NullTokenizer", "tokenizer_model": "a"}, "does not read tokenizer_model"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "merge_file": "a"}, "does not read merge_file"),
        ({"tokenizer_type": "NullTokenizer", "tiktoken_pattern": "v1"}, "does not read tiktoken_pattern"),
        ({"tiktoken_pattern": "v1"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "TikTokenizer"}, "--tokenizer-model cl100k_base.tiktoken"),
        ({"tokenizer_type": "Other"}, "tokenizer_type Other is unknown; use SentencePieceTokenizer"),
    ],
)
def test_invalid_settings_are_errors(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**settings)


def test_fingerprints_depend_on_the_files(byte_bpe: Path, small_bpe: Path, tmp_path: Path) -> None:
    made = [
        build(tokenizer_model=byte_bpe / "sp.model"),
        build(tokenizer_model=byte_bpe / "tokenizer.json"),
        build(vocab_file=byte_bpe / "vocab.json", merge_file=byte_bpe / "merges.txt"),
        build(vocab_file=small_bpe / "vocab.json", merge_file=small_bpe / "merges.txt"),
        NullTokenizer(5),
        NullTokenizer(6),
    ]
    prints = [tokenizer.fingerprint() for tokenizer in made if tokenizer is not None]
    assert len(set(prints)) == 6 and all(len(p) == 64 for p in prints)
    (tmp_path / "copy.model").write_bytes((byte_bpe / "sp.model").read_bytes())
    assert SentencePieceTokenizer(tmp_path / "copy.model").fingerprint() == prints[0]
