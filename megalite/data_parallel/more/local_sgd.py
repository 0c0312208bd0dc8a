"""Local SGD and DiLoCo: replicas step by themselves for some steps, then exchange the mean of their weights."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.more.local_weights import LocalWeights, MeanUnderWay, all_kept, rank_mean
from megalite.data_parallel.shards import StrategyGroups, StrategyOptions
from megalite.data_parallel.strategy import FlatState
from megalite.optimizers.base import Optimizer, Update
from megalite.tensor_parallel.parameter import ShardedParameter


class LocalSGD(LocalWeights):
    """Every `sync_interval` updates x = mean over ranks of x_i (arXiv 1805.09767); any optimizer takes the steps between.

    With `sync_warmup_steps` it is post-local SGD (arXiv 1808.07217). With `average_optimizer_state` the optimizer's
    states become their mean too; else each rank keeps its own.

    A bf16 wire would round the weights themselves; so what travels is each rank's difference from the last common
    weights a: x = a + mean(bf16(x_i - a)), the mean rounded to bf16 too. That costs a copy of the weights. Averaged
    states of the optimizer are rounded to bf16 by it.

    Wire: 2·(d-1)/d of the bytes of the main parameters (in the wire's format) once in `sync_interval` steps; twice more
    for Adam's averaged moments. After an exchange replicas are equal to the bit.
    """

    def __init__(self, stages: Mapping[int, torch.nn.Module], **common: Any) -> None:
        super().__init__(stages, **common)
        self._anchors: dict[Bucket, torch.Tensor] = {}
        if self.options.wire_dtype is not None and not self.alone:
            self._anchors = self._copies()

    def _local_phase(self, local: int) -> str:
        return "weights" if local % self.settings.sync_interval == 0 else "local"

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        optimizer.step(update)
        if self.local == 0:
            self._set_anchors()
        if self.local > 0 and self.local % self.settings.sync_interval == 0 and not self.alone:
            self._average(optimizer)

    def _set_anchors(self) -> None:
        for shard in self.shards:
            if shard.bucket in self._anchors:
                self._anchors[shard.bucket].copy_(shard.main_param.data)

    def _average(self, optimizer: Optimizer) -> None:
        for shard in self.shards:
            channel, main = self.channel(shard.bucket), shard.main_param.data
            anchor = self._anchors.get(shard.bucket)
            if anchor is None:
                rank_mean(channel, main, wire_dtype=None)
            else:
                difference = main - anchor
                rank_mean(channel, difference, wire_dtype=self.options.wire_dtype)
                anchor += difference
                main.copy_(anchor)
            if self.settings.average_optimizer_state:
                for values in optimizer.state(shard.main_param).values():
                    rank_mean(channel, values, wire_dtype=self.options.wire_dtype)

    def states(self) -> list[FlatState]:
        return super().states() + all_kept("anchor", self._anchors)


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def fragment_of(name: str, fragments: int) -> int:
    """The fragment that a tensor belongs to: layers go round them; what is in no layer is in the first.

    By name alone, so that it is the same in every layout and for both copies of a tied embedding.
    """
    layer = _LAYER.search(name)
    return int(layer.group(1)) % fragments if layer else 0


class DiLoCo(LocalWeights):
    """Every `sync_interval` H updates, with Δ = mean over ranks of (a - x_i) from the common anchor a (arXiv 2311.08105):

        m = μ·m + Δ,   a = a - η·(Δ + μ·m),   x_i = a

    that is SGD with Nesterov momentum, η = `outer_lr`, μ = `outer_momentum`. The inner optimizer's states stay each
    rank's own. A lone rank takes no outer steps: it is the inner optimizer.

    Streaming (arXiv 2501.18512): fragment f of P = `sync_fragments` is exchanged in the updates (f+1)·H/P, and every H
    after; its result is used `sync_delay` updates later, while the exchange is in flight: only then the outer
    step is taken and x_i = α·x_i + (1-α)·a, α = `sync_mix`. P must divide H, and the delay be less than H/P.

    Wire: 2·(d-1)/d of the bytes of the main parameters (in the wire's format) in H steps, a fragment's at a time. Memory:
    two copies of the main parameters, three with a delay. What is in flight is finished before a checkpoint or an
    evaluation, which changes no number: its result waits for its time, in the checkpoint if need be.
    """

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], *, groups: StrategyGroups, options: StrategyOptions
    ) -> None:
        self._fragments: dict[Bucket, int] = {}
        self._count, self._delay = options.settings.sync_fragments, options.settings.sync_delay
        super().__init__(stages, groups=groups, options=options)
        self._anchors = {} if self.alone else self._copies()
        self._momenta = {bucket: torch.zeros_like(anchor) for bucket, anchor in self._anchors.items()}
        delayed = self._anchors if self._delay else {}
        self._arrived = {bucket: torch.zeros_like(anchor) for bucket, anchor in delayed.items()}
        """Means that wait for their time; what they hold at others says nothing."""
        self._under_way: dict[Bucket, MeanUnderWay] = {}
        self._due: dict[int, int] = {}
        """Fragment -> the local update in which its mean is used."""

    def _make_buckets(self, parameters: list[ShardedParameter]) -> list[Bucket]:
        found: list[Bucket] = []
        for fragment in range(self._count):
            own = [p for p in parameters if fragment_of(p.info.spec.name, self._count) == fragment]
            buckets = super()._make_buckets(own) if own else []
            self._fragments |= dict.fromkeys(buckets, fragment)
            found += buckets
        return found

    # ---- what it does when

    def _sent_in(self, local: int) -> list[int]:
        interval = self.settings.sync_interval
        each = interval // self._count
        return [f for f in range(self._count) if local > 0 and local % interval == (f + 1) * each % interval]

    def _local_phase(self, local: int) -> str:
        names = {"exchange": self._sent_in(local)}
        if self._delay:
            names = {"send": self._sent_in(local), "use": self._sent_in(local - self._delay)}
        words = [
            name if self._count == 1 else f"{name} {fragment}" for name, which in names.items() for fragment in which
        ]
        return ", ".join(words) or "local"

    # ---- weights

    def _step(self, optimizer: Optimizer, update: Update) -> None:
        optimizer.step(update)
        if self.alone:
            return
        if self.local == 0:
            for shard in self.shards:
                self._anchors[shard.bucket].copy_(shard.main_param.data)
        for under_way in self._under_way.values():
            under_way.advance()
        for fragment in self._sent_in(self.local):
            self._send(fragment)
        for fragment in [f for f, due in self._due.items() if due <= self.local]:
            del self._due[fragment]
            self._use(fragment)

    def _send(self, fragment: int) -> None:
        self._due[fragment] = self.local + self._delay
        if self._delay:
            for bucket, main in self._mains(fragment):
                difference = self._anchors[bucket] - main
                self._under_way[bucket] = MeanUnderWay(
                    self.channel(bucket), difference, wire_dtype=self.options.wire_dtype
                )

    def _mains(self, fragment: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for shard in self.shards:
            if self._fragments[shard.bucket] == fragment:
                yield shard.bucket, shard.main_param.data

    def _use(self, fragment: int) -> None:
        for bucket, main in self._mains(fragment):
            anchor, momentum = self._anchors[bucket], self._momenta[bucket]
            if self._delay:
                self._finish(bucket)
                mean = self._arrived[bucket]
            else:
                mean = anchor - main
                rank_mean(self.channel(bucket), mean, wire_dtype=self.options.wire_dtype)
            beta, mix = self.settings.outer_momentum, self.settings.sync_mix
            momentum.mul_(beta).add_(mean)
            anchor.add_(mean.add(momentum, alpha=beta), alpha=-self.settings.outer_lr)
            if mix == 0.0:
                main.copy_(anchor)
            else:
                main.mul_(mix).add_(anchor, alpha=1.0 - mix)

    def _finish(self, bucket: Bucket) -> None:
        under_way = self._under_way.pop(bucket, None)
        if under_way is not None:
            self._arrived[bucket].copy_(under_way.result())

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """As all with own weights. Inside, nothing is in flight.

        Collectives: those of exchanges in flight come first.
        """
        for under_way in self._under_way.values():
            under_way.advance()
        for bucket in list(self._under_way):
            self._finish(bucket)
        with super().consensus():
            yield

    def close(self) -> None:
        for under_way in self._under_way.values():
            # A peer may be gone, which is known by then.
            with contextlib.suppress(RuntimeError):
                under_way.wait_for_posted()
        super().close()

    # ---- what is saved

    def states(self) -> list[FlatState]:
        return [
            *super().states(),
            *all_kept("anchor", self._anchors),
            *all_kept("outer_momentum", self._momenta),
            *all_kept("outer_mean", self._arrived),
        ]

    def counters(self) -> dict[str, Any]:
        due = {"due": sorted(self._due.items()), "sync_fragments": self._count} if self._due else {}
        return super().counters() | due

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Means that were to be used by a run with other fragments, or with no delay, are left: nothing is lost, for
        weights are still as far from their anchor, and the next exchange says so."""
        super().load_counters(counters)
        self._due = {}
        if self._delay and not self.alone and counters.get("sync_fragments") == self._count:
            self._due = {int(fragment): int(due) for fragment, due in counters["due"]}
