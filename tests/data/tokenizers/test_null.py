import pytest

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.null import NullTokenizer


def test_numbers() -> None:
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.encode(" 5 0\n98 ") == [5, 0, 98]
    assert tokenizer.decode([5, 0, 98]) == "5 0 98"


@pytest.mark.parametrize("word", ["x", "-1", "100", "1.5", "²", "9" * 5000])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="is not a number from 0 to 99"):
        NullTokenizer(100).encode(f"1 {word}")


@pytest.mark.parametrize("size", [None, 0])
def test_a_size_is_needed(size: int | None) -> None:
    with pytest.raises(ConfigError, match="needs a vocab_size"):
        NullTokenizer(size)


def test_batches() -> None:
    assert NullTokenizer(100).encode_batch(["1 2", "", "99"]) == [[1, 2], [], [99]]
    with pytest.raises(ConfigError, match="'x' is not a number"):
        NullTokenizer(100).encode_batch(["1 2", "x"])
