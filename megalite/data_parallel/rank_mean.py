"""Means over ranks, added up in the order of ranks, and messages between single ranks: the parts of a mean under way."""

from collections.abc import Mapping

import torch

from megalite.data_parallel.wire import Channel
from megalite.topology.group import DONE, Work


def rank_mean(channel: Channel, tensor: torch.Tensor, *, wire_dtype: torch.dtype | None) -> None:
    """In place: the mean over ranks, with the same bits on each. Flat; its size is a multiple of the number of ranks.

    Each rank adds up its part of the values as they were sent, in fp64 and in the order of ranks, and the rounded means
    are gathered: as many bytes as a ring all-reduce. The mean of equal values of up to 32 bits is that value to the bit.

    Args:
        wire_dtype: what is sent is rounded to it, on both ways; None: nothing is.
    """
    if channel.size > 1:
        sent = tensor if wire_dtype is None else tensor.to(wire_dtype)
        part = _mean(channel.exchange_raw(sent).view(channel.size, -1))
        whole = torch.empty_like(sent)
        channel.gather_raw(whole, part)
        tensor.copy_(whole)


def _mean(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].double()
    for row in rows[1:]:
        total += row
    return (total / rows.shape[0]).to(rows.dtype)


def swap(
    channel: Channel, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
) -> list[Work]:
    """Send a tensor to each of some ranks and receive one from each of them; what is sent must stay as it is meanwhile.

    Messages have an order of their own, so collectives over the same ranks may run beside them. Each rank takes its
    pairs in the same order and in each pair the lower rank sends first: where a backend runs messages one by one, none
    waits for one that is queued behind it.
    """
    works = []
    for peer in sorted(outgoing):
        if channel.rank < peer:
            works.append(channel.send_async(outgoing[peer], to=peer))
        works.append(channel.receive_async(incoming[peer], source=peer))
        if channel.rank > peer:
            works.append(channel.send_async(outgoing[peer], to=peer))
    return works


class MeanUnderWay:
    """`rank_mean`, to the bit, while the ranks compute and use their group for other things.

    No thread: its messages are posted when it is made, its gather by the first call of `go_on` after, which all ranks
    make at the same place among their collectives.

    Args:
        tensor: not to be written any more.
    """

    def __init__(self, channel: Channel, tensor: torch.Tensor, *, wire_dtype: torch.dtype | None) -> None:
        assert channel.size > 1, "one rank has nobody to wait for"
        self._channel = channel
        self._sent = (tensor if wire_dtype is None else tensor.to(wire_dtype)).view(channel.size, -1)
        self._received = torch.empty_like(self._sent)
        self._received[channel.rank] = self._sent[channel.rank]
        others = [peer for peer in range(channel.size) if peer != channel.rank]
        self._posted = swap(
            channel,
            {peer: self._sent[peer] for peer in others},
            {peer: self._received[peer] for peer in others},
        )
        self._whole: torch.Tensor | None = None
        self._part = tensor

    def go_on(self) -> None:
        """Start the gather, once the parts are here."""
        if self._whole is None:
            self.wait_for_posted()
            self._part = _mean(self._received)
            # The buffer that was sent is free now.
            self._whole = self._sent.view(-1)
            self._posted = [self._channel.gather_raw_async(self._whole, self._part)]

    def wait_for_posted(self) -> None:
        """Return when nothing is under way; starts nothing."""
        works, self._posted = self._posted, [DONE]
        for work in works:
            work.wait()

    def result(self) -> torch.Tensor:
        """The mean, in the number format of the wire."""
        self.go_on()
        self.wait_for_posted()
        assert self._whole is not None
        return self._whole
