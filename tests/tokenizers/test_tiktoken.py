import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.tokenizers.tiktoken_tokenizer import ENCODINGS, PATTERNS, Encoding, TikTokenizer
from tests.tokenizers.texts import AWKWARD, SOURCE, TEXTS, ranks_of, write_megatron_list, write_tiktoken

tiktoken = pytest.importorskip("tiktoken")
BYTES = {bytes([i]): i for i in range(256)}


def test_gpt2_pattern_gives_gpt2_ids(byte_bpe: Path) -> None:
    """With ranks in the order of merges, the BPE of the tokenizers library, in which <|endoftext|> is 0."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(byte_bpe / "tokenizer.json"))
    ours = TikTokenizer(byte_bpe / "ranks.tiktoken", "gpt2")
    for text in [SOURCE, *TEXTS]:
        assert [i + 1 for i in ours.encode(text)] == theirs.encode(text).ids


def test_end_of_document(byte_bpe: Path) -> None:
    tokenizer = TikTokenizer(byte_bpe / "ranks.tiktoken", "gpt2")
    assert (tokenizer.eod, tokenizer.vocab_size) == (1499, 1500)
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_custom_pattern(byte_bpe: Path) -> None:
    path = byte_bpe / "ranks.tiktoken"
    letters = TikTokenizer(path, r"[\s\S]")
    assert letters.encode("the cat") == [ranks_of(byte_bpe / "vocab.json")[c.encode()] for c in "the cat"]
    prints = {TikTokenizer(path, pattern).fingerprint() for pattern in (r"[\s\S]", "gpt2", "cl100k_base")}
    assert len(prints) == 3  # the pattern is part of the fingerprint
    assert TikTokenizer(path, "gpt2").fingerprint() == TikTokenizer(path, PATTERNS["gpt2"]).fingerprint()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (None, r"this file of 1499 ranks does not say .*; give --tiktoken-pattern NAME \(r50k_base, .*v2\)"),
        ("(", r"tiktoken refuses it or '\('"),
        (r"\w+", r"the pattern '\\\\w\+' leaves characters out or matches nothing; every character"),
        ("", r"leaves characters out or matches nothing.*\|\\s\+\|\\S"),
        ("\ud800", "refuses"),
    ],
)
def test_invalid_patterns_are_errors(byte_bpe: Path, pattern: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TikTokenizer(byte_bpe / "ranks.tiktoken", pattern)


def test_pattern_that_exceeds_the_step_limit_is_an_error(tmp_path: Path) -> None:
    """The library panics, which is not an Exception in Python; the error names file and pattern."""
    tokenizer = TikTokenizer(write_tiktoken(tmp_path / "x.tiktoken", BYTES), r"(?:a(?=a)|a)+(?!\S)|\s|\S")
    assert tokenizer.encode("aa b") == list(b"aa b")
    with pytest.raises(ConfigError, match=r"x\.tiktoken: .* fails on a text"):
        tokenizer.encode("a" * 300_000 + "b")


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_fallback_splitting_gives_the_same_ids(byte_bpe: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for long white space returns the same ids for any text."""
    tokenizer = TikTokenizer(byte_bpe / "ranks.tiktoken", name)
    texts = [
        SOURCE,
        *TEXTS[:20],
        *AWKWARD,
        "x \n",
        " \n ",
        "a\n\n",
        "a \n b\r\n\r\n c  ",
        " " * 9000 + "x",
        "'S 're12345",
    ]
    expected = tokenizer.encode_batch(texts)
    monkeypatch.setattr("megalite.tokenizers.tiktoken_tokenizer._has_long_space", lambda text: True)
    assert tokenizer.encode_batch(texts) == expected


class TestKnownEncodings:
    """Their files are not in the repository; files with as many ranks replace them."""

    @pytest.fixture
    def constructors(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], dict]]:
        """The library's own settings of each encoding, without downloading its file."""
        public = pytest.importorskip("tiktoken_ext.openai_public")

        def note(url: str, expected_hash: str) -> dict:
            return {"sha256": expected_hash}

        monkeypatch.setattr(public, "load_tiktoken_bpe", note)
        return {name: make for name, make in public.ENCODING_CONSTRUCTORS.items() if name in ENCODINGS}

    def test_settings_equal_the_library(self, constructors: dict[str, Callable[[], dict]]) -> None:
        assert len(constructors) == 4
        words = [SOURCE, *AWKWARD, "It's 'RE x\n \n", "HTTPServer's ABCdef été Ünï 12345 \n  \n"]
        for name, make in constructors.items():
            theirs, ours = make(), ENCODINGS[name]
            assert dict(ours.special) == theirs["special_tokens"]
            assert theirs["mergeable_ranks"] == {"sha256": ours.sha256}
            cut = [
                tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=merged_spaces(), special_tokens={})
                for pattern in (ours.pattern, theirs["pat_str"])
            ]
            assert cut[0].encode_ordinary_batch(words) == cut[1].encode_ordinary_batch(words)

    @pytest.mark.parametrize(
        ("name", "eod", "vocab_size"),
        [
            ("r50k_base", 50256, 50257),
            ("p50k_base", 50256, 50281),
            ("cl100k_base", 100257, 100277),
            ("o200k_base", 199999, 200019),
            ("llama3", 128001, 128256),
        ],
    )
    def test_ends_of_documents_of_known_encodings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, eod: int, vocab_size: int
    ) -> None:
        # The same encoding with fewer ranks: special tokens follow the 256 bytes.
        known = ENCODINGS[name]
        cut = known.ranks - 256
        special = tuple((token, i - cut) for token, i in known.special)
        ranks = {bytes([i]): i + (name == "p50k_base" and i >= 232) for i in range(256)}
        path = write_tiktoken(tmp_path / "known.tiktoken", ranks)
        with pytest.raises(ConfigError, match="this file of 256 ranks does not say"):
            TikTokenizer(path)
        monkeypatch.setitem(ENCODINGS, name, Encoding(known.pattern, 256, special, digest_of(path)))
        tokenizer = TikTokenizer(path)
        assert (tokenizer.eod + cut, tokenizer.vocab_size + cut) == (eod, vocab_size)
        assert tokenizer.fingerprint() == digest_of(path) == TikTokenizer(path, name).fingerprint()
        assert tokenizer.encode("a<|endoftext|>")[0] == ord("a")

    def test_copy_is_recognized_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other line ends change the sha256: the pattern's name and the number of ranks identify it."""
        path = write_tiktoken(tmp_path / "copy.tiktoken", BYTES)
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        special = (("<|endoftext|>", 257), ("<|other|>", 260))
        monkeypatch.setitem(ENCODINGS, "cl100k_base", Encoding(PATTERNS["cl100k_base"], 256, special, "0" * 64))
        with pytest.raises(ConfigError, match="it has as many ranks as cl100k_base"):
            TikTokenizer(path)
        tokenizer = TikTokenizer(path, "cl100k_base")
        assert (tokenizer.eod, tokenizer.vocab_size) == (257, 261)
        assert TikTokenizer(path, "llama3").eod == 256


class TestMegatronList:
    def test_ids_follow_the_special_tokens(self, byte_bpe: Path) -> None:
        plain = TikTokenizer(byte_bpe / "ranks.tiktoken", "v2")
        tokenizer = TikTokenizer(byte_bpe / "list.json")
        assert (tokenizer.eod, tokenizer.vocab_size) == (2, 2499)
        assert tokenizer.encode(SOURCE) == [i + 1000 for i in plain.encode(SOURCE)]
        assert tokenizer.decode([0, 2, 7, *tokenizer.encode("x")]) == "<unk></s><SPECIAL_7>x"
        assert tokenizer.fingerprint() == TikTokenizer(byte_bpe / "list.json", "v2").fingerprint()
        assert tokenizer.fingerprint() != TikTokenizer(byte_bpe / "list.json", "v1").fingerprint()

    def test_entries_beyond_the_vocabulary_are_omitted(self, byte_bpe: Path) -> None:
        tokenizer = TikTokenizer(byte_bpe / "list.json", vocab_size=1600)
        assert tokenizer.vocab_size == 1600 and tokenizer.decode([1599]) and not tokenizer.decode([1600])
        assert tokenizer.decode(tokenizer.encode(SOURCE)) == SOURCE
        assert tokenizer.fingerprint() != TikTokenizer(byte_bpe / "list.json").fingerprint()
        assert TikTokenizer(byte_bpe / "list.json", vocab_size=9999).vocab_size == 2499
        with pytest.raises(ConfigError, match="vocab_size 1200 is too small; give at least 1256"):
            TikTokenizer(byte_bpe / "list.json", vocab_size=1200)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"rank": 5}, r"bad\.json: entry 3: rank is 5; such a list is in the order of ranks"),
            ({"rank": -1}, r"entry 3: rank '-1' is not a number from 0"),
            ({"rank": True}, r"entry 3: rank 'True' is not a number"),
            ({"rank": 1 << 70}, r"entry 3: rank '1180591620717411303424' is not a number"),
            ({"token_bytes": "?"}, r"entry 3: '\?' is not base64"),
            ({"token_bytes": None}, r"entry 3: 'None' is not base64"),
            ({"token_bytes": "é"}, r"entry 3: 'é' is not base64"),
            ({"token_bytes": "AA=="}, r"entry 3: token b'\\x00' has rank 0 already"),
            ({"other": 1}, r"entry 3: expected rank, token_bytes and token_str"),
        ],
    )
    def test_damaged_entries_are_errors(self, tmp_path: Path, change: dict[str, object], message: str) -> None:
        path = write_megatron_list(tmp_path / "bad.json", BYTES)
        entries = json.loads(path.read_text())
        entries[3] |= change
        path.write_text(json.dumps(entries))
        with pytest.raises(ConfigError, match=message):
            TikTokenizer(path)

    @pytest.mark.parametrize("content", ["[", "[1]", "[{}]", "[]", "[" * 100_000])
    def test_damaged_lists_are_errors(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            TikTokenizer(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"AAA= 256 1", r"line 257: expected a token in base64 and its rank, got b'AAA= 256 1'"),
        (b"AAA=", "line 257: expected a token in base64 and its rank"),
        (b"A 256", "line 257: 'A'|\"b'A'\" is not base64"),
        (b"AAA= x", "line 257: rank 'x' is not a number from 0 to"),
        (b"AAA= -1", "line 257: rank '-1' is not a number from 0 to"),
        (b"AAA= 99999999", "line 257: rank '99999999' is not a number"),
        (b"AAA= 7", "line 257: rank 7 is taken by line 8 already"),
        (b"BA== 256", r"line 257: token b'\\x04' has rank 4 already"),
        (b"AAA= 300", "rank 256 is missing of ranks up to 300"),
    ],
)
def test_damaged_lines_are_errors(tmp_path: Path, line: bytes, message: str) -> None:
    path = write_tiktoken(tmp_path / "bad.tiktoken", BYTES)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ConfigError, match=r"bad\.tiktoken: ") as caught:
        TikTokenizer(path, "gpt2")
    caught.match(message)


def test_file_without_all_bytes_is_an_error(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "few.tiktoken", {bytes([i]): i for i in range(255)})
    with pytest.raises(ConfigError, match=r"few\.tiktoken: 1 of the 256 single bytes are missing"):
        TikTokenizer(path, "gpt2")


def merged_spaces() -> dict[bytes, int]:
    """Ranks of which the ids show how white space and letters were split."""
    pairs = [a + b for a in (b"\n", b" ", b"a", b"'", b"1", b"s") for b in (b" ", b"\n", b"a", b"1", b"s", b"S")]
    return {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *pairs])}


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
