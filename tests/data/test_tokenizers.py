import json
import pydoc_data.topics
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer
from megalite.data.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalite.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megalite.data.tokenizers.null import NullTokenizer
from megalite.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megalite.data.tokenizers.train import train_sentencepiece

TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())]
SOURCE = Path(json.__file__).read_text(encoding="utf-8")
AWKWARD = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\tif x:\r\n\t\treturn\n",
    "don't we'll I'VE 'tis",
    "naïve café ½ 日本語 🙂👩‍👩‍👧 العربية",
    "e\u0301 \u2028 \ufeff \u00a0x",
    "a\x00b\x7f",
    "</s> <unk> <0x41> <|endoftext|>",
    "1234567890 3.14e-10 0xdeadbeef",
    "=" * 300 + " " * 300 + "\n" * 50,
]
UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of each kind, trained on Python's documentation."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece([*TEXTS, SOURCE], output_prefix=folder / "sp", vocab_size=1000)
    return folder


@pytest.fixture(scope="module")
def byte_bpe(files: Path) -> Path:
    """vocab.json, merges.txt and tokenizer.json of one byte-level BPE, trained by the `tokenizers` library."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=1500, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(files))
    trained.save(str(files / "tokenizer.json"))
    return files


@pytest.fixture(scope="module")
def small_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE written by hand, for faults."""
    folder = tmp_path_factory.mktemp("small")
    spare = iter(range(256, 400))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    tokens = [*symbols, "ab", "abc", "Ġab", "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8"
    )
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\nĠ ab\n", encoding="utf-8")
    return folder


class TestSentencePiece:
    def test_source_code_survives(self, files: Path) -> None:
        tokenizer = SentencePieceTokenizer(files / "sp.model")
        for text in [SOURCE, *TEXTS, *AWKWARD]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(SOURCE)) < len(SOURCE) / 2
        assert tokenizer.vocab_size == 1000 and max(tokenizer.encode(SOURCE)) < 1000

    @settings(max_examples=200, deadline=None)
    @given(text=UNICODE)
    def test_any_text_survives(self, files: Path, text: str) -> None:
        tokenizer = SentencePieceTokenizer(files / "sp.model")
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_eod_is_no_part_of_any_text(self, files: Path) -> None:
        tokenizer = SentencePieceTokenizer(files / "sp.model")
        assert tokenizer.eod == 2
        assert tokenizer.eod not in tokenizer.encode("</s> " + SOURCE)
        assert tokenizer.decode([*tokenizer.encode("x = 1\n"), tokenizer.eod]) == "x = 1\n"

    def test_digits_are_single_pieces(self, files: Path) -> None:
        tokenizer = SentencePieceTokenizer(files / "sp.model")
        assert len(tokenizer.encode("12345")) == 5

    def test_training_is_deterministic(self, files: Path, tmp_path: Path) -> None:
        again = train_sentencepiece([*TEXTS, SOURCE], output_prefix=tmp_path / "again", vocab_size=1000)
        assert again.read_bytes() == (files / "sp.model").read_bytes()
        assert [path.name for path in tmp_path.iterdir()] == ["again.model"]

    def test_training_says_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
            train_sentencepiece([], output_prefix=tmp_path / "x", vocab_size=1000)
        with pytest.raises(ConfigError, match="vocab_size 1000 cannot be trained on 11 characters"):
            train_sentencepiece(["hello world"], output_prefix=tmp_path / "x", vocab_size=1000)
        with pytest.raises(ConfigError, match="vocab_size 100 cannot be trained"):
            train_sentencepiece(TEXTS[:5], output_prefix=tmp_path / "x", vocab_size=100)
        assert not list(tmp_path.iterdir())

    def test_a_model_without_an_end_is_refused(self, tmp_path: Path) -> None:
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS[:5]),
            model_prefix=str(tmp_path / "no_eos"),
            vocab_size=300,
            model_type="bpe",
            eos_id=-1,
            minloglevel=2,
        )
        with pytest.raises(ConfigError, match=r"no_eos\.model has no end-of-sequence piece"):
            SentencePieceTokenizer(tmp_path / "no_eos.model")

    @pytest.mark.parametrize("content", [b"", b"garbage", b"\x0a\xff\xff\xff\xff\x0f", bytes(100)])
    def test_garbled_models(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.model is not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / "bad.model")


class TestGPT2BPE:
    def test_equal_to_the_tokenizers_library(self, byte_bpe: Path) -> None:
        ours = GPT2BPETokenizer(byte_bpe / "vocab.json", byte_bpe / "merges.txt")
        theirs = HuggingFaceTokenizer(byte_bpe / "tokenizer.json")
        assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (1500, 0)
        rng = random.Random(0)
        mixed = ["".join(rng.choices("ab \n\t.,1é日'st", k=200)) for _ in range(100)]
        for text in [SOURCE, *TEXTS, *AWKWARD, *mixed]:
            text = text.replace("<|endoftext|>", "")
            assert ours.encode(text) == theirs.encode(text)

    def test_merges_in_order(self, small_bpe: Path) -> None:
        tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
        names = {
            i: token
            for token, i in json.loads((small_bpe / "vocab.json").read_text(encoding="utf-8")).items()
        }
        assert [names[i] for i in tokenizer.encode("abcab ab")] == ["abc", "ab", "Ġab"]
        assert [names[i] for i in tokenizer.encode(" abc")] == ["Ġ", "abc"]

    def test_every_text_survives(self, small_bpe: Path) -> None:
        tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
        for text in [SOURCE, *AWKWARD]:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def test_any_text_survives(self, small_bpe: Path, text: str) -> None:
        tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_the_end_of_document_cannot_be_spelled(self, small_bpe: Path) -> None:
        tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
        assert tokenizer.eod == 259 and tokenizer.eod not in tokenizer.encode("<|endoftext|>")
        assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"

    def test_broken_bytes_decode_to_a_replacement(self, small_bpe: Path) -> None:
        tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
        assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"

    @pytest.mark.timeout(20)
    def test_a_long_word_is_no_trap(self, small_bpe: Path) -> None:
        tokenizer = GPT2BPETokenizer(small_bpe / "vocab.json", small_bpe / "merges.txt")
        assert len(tokenizer.encode("abc" * 100_000)) == 100_000

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("vocab.json", b"{", r"vocab\.json is not JSON"),
            ("vocab.json", b"\xff", r"vocab\.json is not JSON"),
            ("vocab.json", b"[" * 100_000, r"vocab\.json is not JSON"),
            ("vocab.json", b"[1]", r"vocab\.json: expected an object of tokens"),
            (
                "vocab.json",
                b'{"a": 1, "b": 1}',
                r"vocab\.json: expected an object of tokens with different ids",
            ),
            ("vocab.json", b'{"a": true}', r"vocab\.json: expected an object of tokens"),
            ("vocab.json", b'{"a": -1}', r"vocab\.json: expected an object of tokens"),
            ("vocab.json", b'{"a": 1}', r"vocab\.json: <\|endoftext\|> is not in the vocabulary"),
            ("vocab.json", b'{"<|endoftext|>": 1}', r"vocab\.json: 256 of the 256 byte symbols are missing"),
            ("merges.txt", b"\xff", r"merges\.txt is not UTF-8"),
            ("merges.txt", b"a b\na b c\n", r"merges\.txt:2: expected two symbols.*'a b c'"),
            ("merges.txt", b"a b\nx y\n", r"merges\.txt:2: 'xy' is not in .*vocab\.json"),
        ],
    )
    def test_garbled_files(
        self, small_bpe: Path, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        for file in ("vocab.json", "merges.txt"):
            (tmp_path / file).write_bytes((small_bpe / file).read_bytes())
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


class TestHuggingFace:
    def test_round_trip(self, byte_bpe: Path) -> None:
        tokenizer = HuggingFaceTokenizer(byte_bpe / "tokenizer.json")
        for text in (SOURCE, "  two  spaces\n", "日本語"):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": 3}'])
    def test_garbled_files(self, tmp_path: Path, content: bytes) -> None:
        pytest.importorskip("tokenizers")
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is not a Hugging Face tokenizer\.json"):
            HuggingFaceTokenizer(tmp_path / "tokenizer.json")

    @pytest.mark.parametrize(
        ("tokens", "eod"), [(["</s>", "<eos>"], "</s>"), (["<eos>", "<|end_of_text|>"], "<|end_of_text|>")]
    )
    def test_the_end_of_document(self, tmp_path: Path, tokens: list[str], eod: str) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        vocabulary = {token: i for i, token in enumerate(["<unk>", "x", *tokens])}
        model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").eod == vocabulary[eod]

    def test_a_file_without_an_end_is_refused(self, tmp_path: Path) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        model = tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(
            ConfigError, match=r"tokenizer\.json has no end-of-document token: none of <\|endoftext\|>"
        ):
            HuggingFaceTokenizer(tmp_path / "tokenizer.json")

    def test_stored_truncation_is_ignored(self, byte_bpe: Path, tmp_path: Path) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        stored = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json"))
        stored.enable_truncation(5)
        stored.save(str(tmp_path / "tokenizer.json"))
        tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
        assert tokenizer.decode(tokenizer.encode(SOURCE)) == SOURCE

    def test_the_missing_package_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ConfigError, match=r"pip install 'megalite\[tokenizers\]'"):
            HuggingFaceTokenizer(tmp_path / "tokenizer.json")


class TestNull:
    def test_numbers(self) -> None:
        tokenizer = NullTokenizer(100)
        assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
        assert tokenizer.encode(" 5 0\n98 ") == [5, 0, 98]
        assert tokenizer.decode([5, 0, 98]) == "5 0 98"

    @pytest.mark.parametrize("word", ["x", "-1", "100", "1.5", "²", "9" * 5000])
    def test_other_words_are_refused(self, word: str) -> None:
        with pytest.raises(ConfigError, match="is not a number from 0 to 99"):
            NullTokenizer(100).encode(f"1 {word}")

    @pytest.mark.parametrize("size", [None, 0])
    def test_a_size_is_needed(self, size: int | None) -> None:
        with pytest.raises(ConfigError, match="needs a vocab_size"):
            NullTokenizer(size)


class TestBuild:
    def build(self, vocab_size: int | None = None, **settings: Path | str) -> Tokenizer | None:
        return build_tokenizer(DataConfig(**{k: str(v) for k, v in settings.items()}), vocab_size)

    def test_kinds_are_told_from_the_files(self, byte_bpe: Path, tmp_path: Path) -> None:
        def name(**settings: Path | str) -> str:
            tokenizer = self.build(**settings)
            assert tokenizer is not None
            return tokenizer.name

        assert self.build() is None
        assert name(tokenizer_model=byte_bpe / "sp.model") == "SentencePieceTokenizer"
        assert name(tokenizer_model=byte_bpe / "tokenizer.json") == "HuggingFaceTokenizer"
        assert (
            name(vocab_file=byte_bpe / "vocab.json", merge_file=byte_bpe / "merges.txt") == "GPT2BPETokenizer"
        )
        assert name(tokenizer_model=byte_bpe) == "HuggingFaceTokenizer"
        (tmp_path / "oddly-named").write_bytes((byte_bpe / "tokenizer.json").read_bytes())
        assert name(tokenizer_model=tmp_path / "oddly-named") == "HuggingFaceTokenizer"
        for file in ("vocab.json", "merges.txt"):
            (tmp_path / file).write_bytes((byte_bpe / file).read_bytes())
        assert name(tokenizer_model=tmp_path) == "GPT2BPETokenizer"
        tokenizer = self.build(vocab_size=50, tokenizer_type="NullTokenizer")
        assert tokenizer is not None and tokenizer.vocab_size == 50

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"tokenizer_model": "no.model"}, "no.model cannot be read: No such file"),
            ({"vocab_file": "v.json"}, "needs vocab_file and merge_file, got v.json and None"),
            ({"tokenizer_model": "a", "vocab_file": "b"}, "are given at once"),
            ({"tokenizer_type": "GPT2BPETokenizer"}, "needs vocab_file and merge_file, got None and None"),
            ({"tokenizer_type": "SentencePieceTokenizer"}, "needs tokenizer_model"),
            ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-model tokenizer.json"),
            ({"tokenizer_type": "NullTokenizer", "tokenizer_model": "a"}, "does not read tokenizer_model"),
            ({"tokenizer_type": "HuggingFaceTokenizer", "merge_file": "a"}, "does not read merge_file"),
            ({"tokenizer_type": "Other"}, "tokenizer_type Other is unknown; use SentencePieceTokenizer"),
        ],
    )
    def test_settings_that_do_not_work(self, settings: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.build(**settings)

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"is a folder without tokenizer\.json or tokenizer\.model"):
            self.build(tokenizer_model=tmp_path)

    def test_fingerprints_follow_the_files(self, byte_bpe: Path, small_bpe: Path, tmp_path: Path) -> None:
        made = [
            self.build(tokenizer_model=byte_bpe / "sp.model"),
            self.build(tokenizer_model=byte_bpe / "tokenizer.json"),
            self.build(vocab_file=byte_bpe / "vocab.json", merge_file=byte_bpe / "merges.txt"),
            self.build(vocab_file=small_bpe / "vocab.json", merge_file=small_bpe / "merges.txt"),
            NullTokenizer(5),
            NullTokenizer(6),
        ]
        prints = [tokenizer.fingerprint() for tokenizer in made if tokenizer is not None]
        assert len(set(prints)) == 6 and all(len(p) == 64 for p in prints)
        (tmp_path / "copy.model").write_bytes((byte_bpe / "sp.model").read_bytes())
        assert SentencePieceTokenizer(tmp_path / "copy.model").fingerprint() == prints[0]
