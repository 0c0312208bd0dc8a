import numpy as np
import pytest

from megalite.data.mock_dataset import MockDataset


def test_samples_are_pure_and_in_the_vocabulary() -> None:
    dataset = MockDataset(vocab_size=101, seq_length=64, seed=3)
    samples = [dataset.sample(k) for k in range(50)]
    assert all(sample.shape == (65,) and sample.dtype == np.int64 for sample in samples)
    assert min(s.min() for s in samples) >= 0 and max(s.max() for s in samples) < 101
    again = MockDataset(vocab_size=101, seq_length=64, seed=3)
    assert all(np.array_equal(again.sample(k), samples[k]) for k in (49, 0, 7))
    assert len({sample.tobytes() for sample in samples}) == 50


@pytest.mark.parametrize("other", [{"seed": 4}, {"split": 1}])
def test_seeds_and_splits_have_samples_of_their_own(other: dict[str, int]) -> None:
    base = {"vocab_size": 101, "seq_length": 64, "seed": 3}
    assert not np.array_equal(MockDataset(**base).sample(0), MockDataset(**(base | other)).sample(0))


def test_most_tokens_follow_from_the_one_before() -> None:
    dataset = MockDataset(vocab_size=1000, seq_length=2000, seed=1)
    sample = dataset.sample(5)
    share = np.mean((sample[1:] - sample[:-1]) % 1000 == 17)
    assert 0.84 < share < 0.91


def test_negative_samples_are_refused() -> None:
    with pytest.raises(IndexError, match="sample -1"):
        MockDataset(vocab_size=10, seq_length=4, seed=1).sample(-1)
