import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.data.dataset import Packing, memoize
from megalite.data.loader import BatchLoader, Microbatch
from megalite.topology.layout import Spans
from tests.support.patience import wait_until


class Counting:
    """Sample k is k·100, k·100 + 1, ...; records the thread that requests each sample, and can block reads."""

    def __init__(self, seq_length: int = 6, *, may: bool = True) -> None:
        self.seq_length = seq_length
        self.asked: list[tuple[int, str]] = []
        self.may = threading.Event()
        if may:
            self.may.set()

    def sample(self, k: int) -> np.ndarray:
        assert self.may.wait(60)
        self.asked.append((k, threading.current_thread().name))
        if k == 666:
            raise ConfigError("bad sample 666")
        return np.arange(self.seq_length + 1) + 100 * k


def loader(
    dataset: Counting, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 2, **more: object
) -> BatchLoader:
    settings = {"seq_length": 6, "eod_token": None, "eod_mask_loss": False} | more
    layout = {"dp_rank": dp_rank, "dp_size": dp_size, "micro_batch_size": micro_batch_size}
    return BatchLoader(dataset, **layout, **settings)  # type: ignore[arg-type]


def test_contents_of_a_microbatch() -> None:
    (batch,) = loader(Counting()).load(3, 2)
    assert batch.sample_ids == (3, 4)
    assert batch.tokens.tolist() == [[*range(300, 306)], [*range(400, 406)]]
    assert batch.labels.tolist() == [[*range(301, 307)], [*range(401, 407)]]
    assert batch.loss_mask.tolist() == [[1.0] * 6] * 2
    types = (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype)
    assert types == (torch.int64, torch.int64, torch.float32)
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()


def test_order_equals_megatron() -> None:
    """Microbatch m of rank d: first + (m·dp_size + d)·micro_batch_size + [0, micro_batch_size)."""
    ids = [[batch.sample_ids for batch in loader(Counting(), d, 2, 2).load(100, 8)] for d in range(2)]
    assert ids == [[(100, 101), (104, 105)], [(102, 103), (106, 107)]]


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1), (6, 2)])
def test_every_layout_reads_each_sample_once(dp_size: int, micro: int) -> None:
    seen: dict[int, list[int]] = {}
    for rank in range(dp_size):
        dataset = Counting()
        batches = loader(dataset, rank, dp_size, micro).load(24, 12)
        for number, tokens in ((n, t) for b in batches for n, t in zip(b.sample_ids, b.tokens.tolist())):
            assert number not in seen
            seen[number] = tokens
        assert [k for k, _ in dataset.asked] == [k for batch in batches for k in batch.sample_ids]
    assert seen == {k: [*range(100 * k, 100 * k + 6)] for k in range(24, 36)}


def test_eod_mask_loss_masks_tokens_after_an_end_of_document() -> None:
    for masked, mask in ((True, [1, 1, 0, 1, 1, 1]), (False, [1] * 6)):
        (batch,) = loader(Counting(), micro_batch_size=1, eod_token=302, eod_mask_loss=masked).load(3, 1)
        assert batch.tokens[0, 2] == 302 and batch.loss_mask.tolist() == [mask]
    with pytest.raises(ConfigError, match="eod_mask_loss is set but the end-of-document token is unknown"):
        loader(Counting(), eod_mask_loss=True)


def test_spans_select_the_positions_of_a_rank() -> None:
    """Tokens, labels and masks of positions 1 and 4; a label is the next token of the whole sequence."""
    (batch,) = loader(Counting(), cp_rank=1, cp_size=3, eod_token=304, eod_mask_loss=True).load(3, 2)
    assert batch.tokens.tolist() == [[301, 304], [401, 404]]
    assert batch.labels.tolist() == [[302, 305], [402, 405]]
    assert batch.loss_mask.tolist() == [[1, 0], [1, 1]]


def test_load_balancer_gets_the_documents_of_the_microbatch() -> None:
    asked = []

    def balance(length: int, starts: tuple[tuple[int, ...], ...]) -> tuple[Spans, ...]:
        asked.append((length, starts))
        return ((0, 2), (5, 6)), ((2, 5),)

    (batch,) = loader(Counting(), eod_token=304, find_documents=True, cp_rank=1, cp_size=2, balance=balance).load(3, 2)
    assert asked == [(6, ((0, 5), (0,)))]
    assert batch.tokens.tolist() == [[302, 303, 304], [402, 403, 404]]
    assert batch.spans == (((0, 2), (5, 6)), ((2, 5),))


def test_documents_start_after_each_end_of_document() -> None:
    class Documents(Counting):
        def sample(self, k: int) -> np.ndarray:
            return np.array([[9, 1, 9, 9, 2, 3, 9], [1, 2, 3, 4, 5, 9, 1]][k])

    (batch,) = loader(Documents(), eod_token=9, find_documents=True, cp_size=3).load(0, 2)
    assert batch.document_starts == ((0, 1, 3, 4), (0,))
    (batch,) = loader(Documents(), eod_token=9).load(0, 2)
    assert batch.document_starts is None
    with pytest.raises(ConfigError, match="reset_attention_mask or reset_position_ids is set but the end"):
        loader(Counting(), find_documents=True)


def test_packed_samples_have_documents_and_a_loss_mask() -> None:
    class Packed(Counting):
        """Sample 0 has three documents without padding, sample 1 one of three tokens."""

        def packing(self, k: int) -> Packing:
            return [Packing((0, 2, 5), 6), Packing((0,), 2)][k]

    # The end-of-document token, 3 here, has no effect.
    settings = {"packed": True, "find_documents": True, "eod_mask_loss": True, "eod_token": 3}
    (batch,) = loader(Packed(), **settings).load(0, 2)
    # The last tokens of documents predict nothing, except the one that is not an input; padding is a document.
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0]]
    assert batch.document_starts == ((0, 2, 5), (0, 2)) and batch.tokens[0, 3] == 3
    (part,) = loader(Packed(), **settings, cp_rank=1, cp_size=3).load(0, 2)
    assert part.loss_mask.tolist() == [[0, 0], [1, 0]]
    assert part.document_starts == batch.document_starts
    # The first five: the last of them would predict a token of another document, which is no longer an input.
    (short,) = loader(Packed(), **settings).load(0, 2, 5)
    assert short.loss_mask.tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert short.document_starts == ((0, 2), (0, 2))


def test_shorter_sequence_is_the_start_of_the_sample() -> None:
    short = loader(Counting(), mtp_num_layers=1)
    short.prefetch(3, 2, 4)
    (batch,) = short.load(3, 2, 4)
    assert batch.tokens.tolist() == [[300, 301, 302, 303], [400, 401, 402, 403]]
    assert batch.labels.tolist() == [[301, 302, 303, 304], [401, 402, 403, 404]]
    assert batch.mtp_labels is not None and batch.mtp_mask is not None
    assert batch.mtp_labels[0].tolist() == [[302, 303, 304, 0], [402, 403, 404, 0]]
    assert batch.mtp_mask[0].tolist() == [[1, 1, 1, 0]] * 2
    (whole,) = short.load(3, 2)
    assert whole.tokens.shape == (2, 6)
    short.close()


def equal(left: list[Microbatch], right: list[Microbatch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(a.sample_ids == b.sample_ids and torch.equal(a.tokens, b.tokens) for a, b in pairs)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "megalite-loader"]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_samples_do_not_depend_on_the_number_of_readers(workers: int) -> None:
    """Threads read in the background, the same ones in every step; without readers the caller's thread reads."""
    dataset, alone = Counting(), loader(Counting(), num_workers=0)
    ahead, threads = loader(dataset, num_workers=workers), set[threading.Thread]()
    for first in range(0, 72, 24):
        ahead.prefetch(first, 24)
        threads |= set(readers())
        assert equal(ahead.load(first, 24), alone.load(first, 24))
    assert len(threads) == workers and len(dataset.asked) == 72
    assert {name for _, name in dataset.asked} == {"megalite-loader" if workers else threading.current_thread().name}
    ahead.load(72, 4)  # which was not prefetched
    assert dataset.asked[-1] == (75, threading.current_thread().name)
    ahead.close()
    assert readers() == []


def test_readers_work_in_parallel() -> None:
    """Each waits until all are reading a sample."""
    meeting = threading.Barrier(3, timeout=60)

    class Meeting(Counting):
        def sample(self, k: int) -> np.ndarray:
            meeting.wait()
            return super().sample(k)

    ahead = loader(Meeting(), micro_batch_size=1, num_workers=3)
    ahead.prefetch(0, 3)
    assert [batch.sample_ids for batch in ahead.load(0, 3)] == [(0,), (1,), (2,)]
    ahead.close()


def test_epoch_is_built_once_for_all_readers() -> None:
    made: list[int] = []

    def make(epoch: int) -> int:
        time.sleep(0.01)
        made.append(epoch)
        return epoch

    epochs = memoize(make)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(epochs, [0] * 8 + [1] * 8)) == [0] * 8 + [1] * 8
    assert made == [0, 1]


@pytest.mark.parametrize("wanted", [(12, 4), (8, 8)])
def test_other_prefetch_is_discarded(wanted: tuple[int, int]) -> None:
    ahead = loader(Counting())
    ahead.prefetch(8, 4)
    assert equal(ahead.load(*wanted), loader(Counting()).load(*wanted))
    ahead.prefetch(0, 4)
    ahead.prefetch(4, 4)
    assert equal(ahead.load(4, 4), loader(Counting()).load(4, 4))
    ahead.close()


def test_error_of_a_reader_is_raised_by_load() -> None:
    ahead = loader(Counting())
    ahead.prefetch(666, 2)
    with pytest.raises(ConfigError, match="bad sample 666"):
        ahead.load(666, 2)
    ahead.prefetch(666, 2)
    assert ahead.load(0, 2)[0].sample_ids == (0, 1)  # the bad one is not requested
    ahead.close()


def test_waiting_time_of_load_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("megalite.data.loader.time.perf_counter", lambda: now[0])

    class Timed(Counting):
        def sample(self, k: int) -> np.ndarray:
            now[0] += 0.25
            return super().sample(k)

    ahead = loader(Timed())
    ahead.load(0, 4)
    assert ahead.waited == 1.0
    ahead.prefetch(4, 4)
    wait_until(lambda: len(ahead.dataset.asked) >= 8)  # type: ignore[attr-defined]
    ahead.load(4, 4)
    assert ahead.waited == 0.0
    ahead.close()


def test_discarded_read_ends_after_its_microbatch() -> None:
    dataset = Counting(may=False)
    ahead = loader(dataset)
    ahead.prefetch(0, 1000)
    ahead.prefetch(2000, 2)
    dataset.may.set()
    assert ahead.load(2000, 2)[0].sample_ids == (2000, 2001)
    assert len(dataset.asked) <= 4
    ahead.close()


def test_close_does_not_wait_for_a_hanging_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.loader._PATIENCE", 0.01)
    dataset = Counting(may=False)
    ahead = loader(dataset)
    ahead.prefetch(0, 2)
    assert ahead._ahead is not None
    wait_until(ahead._ahead.microbatches[0].running)
    ahead.close()
    assert dataset.asked == [] and [thread.daemon for thread in readers()] == [True]
    dataset.may.set()
    wait_until(lambda: not readers(), seconds=5)
    ahead.close()
    assert ahead.load(0, 2)[0].sample_ids == (0, 1)
    ahead.close()


class Examples(Counting):
    """Two examples in a sample; in the first only the prediction of its second token counts, in the second all."""

    def packing(self, k: int) -> Packing:
        return Packing(starts=(0, 3), used=5, counts=np.array([1, 0, 1, 1, 1, 1], dtype=np.bool_))


def test_loss_mask_of_responses() -> None:
    (batch,) = loader(Examples(), packed=True, find_documents=True, micro_batch_size=1).load(0, 1)
    assert batch.loss_mask.tolist() == [[1, 0, 0, 1, 1, 0]]
    assert batch.document_starts == ((0, 3, 5),)
