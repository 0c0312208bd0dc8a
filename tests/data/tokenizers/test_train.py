import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer
from megalite.data.tokenizers.train import train_byte_level, train_sentencepiece
from tests.data.tokenizers.texts import AWKWARD, SOURCE, TEXTS


def opened(path: Path) -> Tokenizer:
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(path)), None)
    assert tokenizer is not None
    return tokenizer


class TestSentencePiece:
    def test_bpe_is_deterministic(self, files: Path, tmp_path: Path) -> None:
        again = train_sentencepiece([*TEXTS, SOURCE], output_prefix=tmp_path / "again", vocab_size=1000)
        assert again.read_bytes() == (files / "sp.model").read_bytes()
        assert [path.name for path in tmp_path.iterdir()] == ["again.model"]

    def test_unigram(self, tmp_path: Path) -> None:
        made = [
            train_sentencepiece(
                TEXTS[:20], output_prefix=tmp_path / name, vocab_size=450, model_type="unigram"
            ).read_bytes()
            for name in ("a", "b")
        ]
        assert made[0] == made[1]
        tokenizer = opened(tmp_path / "a.model")
        assert tokenizer.vocab_size == 450
        for text in [*TEXTS, SOURCE, *AWKWARD]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(SOURCE)) < len(SOURCE) / 1.3

    def test_what_is_missing_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
            train_sentencepiece([], output_prefix=tmp_path / "x", vocab_size=1000)
        with pytest.raises(ConfigError, match="vocab_size 1000 cannot be trained on 11 characters"):
            train_sentencepiece(["hello world"], output_prefix=tmp_path / "x", vocab_size=1000)
        with pytest.raises(ConfigError, match="vocab_size 280 cannot be trained"):
            train_sentencepiece(TEXTS[:5], output_prefix=tmp_path / "x", vocab_size=280)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("model_type", ["bpe", "unigram"])
    @pytest.mark.parametrize("size", [260, 2048, 100_000])
    def test_the_size_that_is_offered_works(self, tmp_path: Path, model_type: str, size: int) -> None:
        texts = ["one two three four five six " * 30]
        prefix = tmp_path / "x"
        with pytest.raises(ConfigError, match="--vocab-size ") as raised:
            train_sentencepiece(texts, output_prefix=prefix, vocab_size=size, model_type=model_type)
        assert f"vocab_size {size} cannot be trained on 840 characters: " in str(raised.value)
        assert ".cc" not in str(raised.value) and "INTERNAL" not in str(raised.value)
        [offered] = re.findall(r"--vocab-size (\d+)", str(raised.value))
        train_sentencepiece(texts, output_prefix=prefix, vocab_size=int(offered), model_type=model_type)
        assert opened(tmp_path / "x.model").vocab_size == int(offered)

    def test_another_failure_names_no_source_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(**settings: object) -> None:
            next(settings["sentence_iterator"])  # type: ignore[call-overload]
            raise RuntimeError("INTERNAL: src/a.cc(12) [(x) <= (y[0])] Out of luck.")

        monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", fail)
        with pytest.raises(ConfigError, match=r"5 characters: Out of luck\.; try another --vocab-size$"):
            train_sentencepiece(["hello"], output_prefix=tmp_path / "x", vocab_size=300)


class TestByteLevel:
    @pytest.mark.parametrize("words", ["gpt2", "gpt4"])
    def test_round_trips(self, tmp_path: Path, words: str) -> None:
        pytest.importorskip("tokenizers")
        path = train_byte_level(TEXTS, output_prefix=tmp_path / "own", vocab_size=1000, words=words)
        assert [file.name for file in tmp_path.iterdir()] == ["own.json"]
        tokenizer = opened(path)
        assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 0)
        for text in [*TEXTS, SOURCE, *(text for text in AWKWARD if "<|endoftext|>" not in text)]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(SOURCE)) < len(SOURCE) / 2
        # gpt4's words have at most three digits, gpt2's as many as there are.
        assert ('"Regex": ' in path.read_text(encoding="utf-8")) == (words == "gpt4")
        again = train_byte_level(TEXTS, output_prefix=tmp_path / "b", vocab_size=1000, words=words)
        assert again.read_bytes() == path.read_bytes()

    def test_digits_of_gpt4(self, tmp_path: Path) -> None:
        pytest.importorskip("tokenizers")
        texts = ["1234567 " * 100]
        kept = train_byte_level(texts, output_prefix=tmp_path / "a", vocab_size=263, words="gpt2")
        cut = train_byte_level(texts, output_prefix=tmp_path / "b", vocab_size=261, words="gpt4")
        assert len(opened(kept).encode("1234567")) == 1
        assert len(opened(cut).encode("1234567")) == 3

    def test_what_is_missing_is_said(self, tmp_path: Path) -> None:
        pytest.importorskip("tokenizers")
        with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
            train_byte_level([], output_prefix=tmp_path / "x", vocab_size=1000)
        with pytest.raises(
            ConfigError, match=r"11 characters give no more than \d+ tokens, 1000 are asked for"
        ):
            train_byte_level(["hello world"], output_prefix=tmp_path / "x", vocab_size=1000)
        assert not list(tmp_path.iterdir())

    def test_the_missing_package_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ConfigError, match=r"pip install 'megalite\[tokenizers\]'"):
            train_byte_level(TEXTS, output_prefix=tmp_path / "x", vocab_size=1000)


@pytest.mark.parametrize("train", [train_sentencepiece, train_byte_level])
class TestBoth:
    @pytest.mark.parametrize("size", [-1, 0, 256, 1 << 21, 10**12])
    def test_sizes_that_cannot_be(self, tmp_path: Path, train: type, size: int) -> None:
        with pytest.raises(
            ConfigError, match=f"vocab_size {size} is not from 2.. .*; try --vocab-size 32000"
        ):
            train(TEXTS, output_prefix=tmp_path / "x", vocab_size=size)

    @pytest.mark.parametrize("prefix", ["", "folder/", ".", "/"])
    def test_prefixes_without_a_name(self, train: type, prefix: str) -> None:
        with pytest.raises(ConfigError, match=r"output_prefix .* has no name; give one such as"):
            train(TEXTS, output_prefix=prefix, vocab_size=1000)

    def test_a_fault_of_the_texts_is_raised(self, tmp_path: Path, train: type) -> None:
        """Neither library may take it for the end of the text and train on what came before."""

        def texts() -> Iterator[str]:
            yield from TEXTS
            raise ConfigError("input x.gz cannot be read")

        with pytest.raises(ConfigError, match=r"^input x\.gz cannot be read$"):
            train(texts(), output_prefix=tmp_path / "x", vocab_size=1000)
        assert not list(tmp_path.iterdir())

    def test_a_file_that_is_there_is_kept(self, tmp_path: Path, train: type) -> None:
        """Refused before any text is read, and once more where it has come meanwhile."""
        paths = [tmp_path / "x.model", tmp_path / "x.json"]

        def texts(*, write: bool) -> Iterator[str]:
            assert write, "text was read"
            yield from TEXTS[:9]
            for path in paths:
                path.write_text("old")

        for write in (True, False):
            with pytest.raises(
                ConfigError,
                match=r"x\.(model|json) is there already; give another --output-prefix or move it away",
            ):
                train(texts(write=write), output_prefix=tmp_path / "x", vocab_size=400)
            assert [path.read_text() for path in paths] == ["old", "old"]

    def test_a_folder_that_cannot_be_written_to(self, tmp_path: Path, train: type) -> None:
        (tmp_path / "file").write_text("")

        def texts() -> Iterator[str]:
            raise AssertionError("text was read")
            yield

        for folder in ("/proc", "/proc/none", tmp_path / "file"):
            with pytest.raises(
                ConfigError,
                match=rf"output_prefix {folder}/o: no file can be written in {folder} \(.*\); give a prefix in a folder",
            ):
                train(texts(), output_prefix=f"{folder}/o", vocab_size=400)

    def test_a_disk_that_is_full_leaves_nothing(
        self, tmp_path: Path, train: type, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int, data: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            train(TEXTS[:9], output_prefix=tmp_path / "x", vocab_size=400)
        monkeypatch.undo()
        assert not list(tmp_path.iterdir())


def test_special_tokens_are_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = train_byte_level(TEXTS[:9], output_prefix=tmp_path / "own", vocab_size=300)
    added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in added] == [
        (0, "<|endoftext|>", True)
    ]
