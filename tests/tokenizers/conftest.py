"""Trained tokenizers, shared by all tests."""

import random
from pathlib import Path

import pytest

from megalite.preprocess.train_tokenizer import train_sentencepiece
from tests.tokenizers.texts import SOURCE, TEXTS, ranks_of, write_gpt2, write_megatron_list, write_tiktoken


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sp.model, a SentencePiece BPE trained on Python's documentation."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece([*TEXTS, SOURCE], output_prefix=folder / "sp", vocab_size=1000)
    return folder


@pytest.fixture(scope="session")
def byte_bpe(files: Path) -> Path:
    """Add vocab.json, merges.txt and tokenizer.json of one byte-level BPE, and its ranks as a tiktoken file."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=1500, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(files))
    trained.save(str(files / "tokenizer.json"))
    ranks = ranks_of(files / "vocab.json")
    write_tiktoken(files / "ranks.tiktoken", ranks)
    write_megatron_list(files / "list.json", ranks)
    return files


@pytest.fixture(scope="session")
def small_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE written by hand, for faults."""
    folder = tmp_path_factory.mktemp("small")
    write_gpt2(folder)
    return folder


@pytest.fixture(scope="session")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest file of each kind, for mutations."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("garbled")
    write_gpt2(folder)
    ranks = ranks_of(folder / "vocab.json")
    write_tiktoken(folder / "ranks.tiktoken", ranks)
    write_megatron_list(folder / "list.json", ranks)
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS[:9], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save(str(folder / "tokenizer.json"))
    pieces = [("</s>", 0.0), ("<unk>", 0.0), *((c, -random.Random(ord(c)).random()) for c in map(chr, range(33, 99)))]
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([*pieces, ("re", -0.1), ("▁x", -0.2)], 1, True))
    unigram.normalizer = tokenizers.normalizers.NFKC()
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    unigram.decoder = tokenizers.decoders.Metaspace()
    unigram.save(str(folder / "unigram.json"))
    train_sentencepiece(TEXTS[:9], output_prefix=folder / "sp", vocab_size=360)
    _train_normalising(folder)
    return folder


def _train_normalising(folder: Path) -> None:
    """A unigram model with Unicode normalisation tables, which crashed older versions."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(TEXTS[:9]).splitlines()),
        model_prefix=str(folder / "unigram"),
        vocab_size=200,
        model_type="unigram",
        num_threads=1,
        minloglevel=2,
    )
