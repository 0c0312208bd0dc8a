"""Reference implementations of 1-bit optimizers: one process simulates all ranks, tensor by tensor."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megalite.kernels.optimizer_ops import norm
from megalite.optimizers.base import Update
from tests.data_parallel.toy import NO_DECAY, SHAPES, ToyRun, gradient
from tests.support.ranks import RankContext

Tensors = dict[str, torch.Tensor]
B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.1


class Layout(NamedTuple):
    """A bucket: its size and the ranges of its tensors."""

    size: int
    places: dict[str, tuple[int, int]]


def layouts(run: ToyRun) -> list[Layout]:
    return [
        Layout(
            bucket.grad.numel(),
            {placed.parameter.info.spec.name: (placed.start, placed.stop) for placed in bucket.placed},
        )
        for bucket in run.strategy.all_buckets()
    ]


class Means:
    """Computes the lossy mean over all ranks, for all buckets."""

    def __init__(self, buckets: Sequence[Layout], ranks: int, scale: str = "tensor") -> None:
        self.buckets, self.ranks, self.scale = buckets, ranks, scale
        self.errors = [[torch.zeros(bucket.size) for _ in range(ranks)] for bucket in buckets]
        self.server = [torch.zeros(bucket.size) for bucket in buckets]

    def pieces(self, bucket: Layout) -> Iterator[slice]:
        """Yield the ranges with one size: the part of a tensor, or of all tensors, in one rank's chunk."""
        places = list(bucket.places.values())
        if self.scale == "bucket":
            places = [(0, max(stop for _, stop in places))]
        chunk = bucket.size // self.ranks
        for first in range(0, bucket.size, chunk):
            for start, stop in places:
                a, b = max(first, start), min(first + chunk, stop)
                if a < b:
                    yield slice(a, b)

    @staticmethod
    def coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = (x.double().square().sum() / x.numel()).sqrt()
        return torch.where(x >= 0, 1.0, -1.0), size.to(x.dtype)

    def mean(self, values: Sequence[Tensors]) -> Tensors:
        """Return the lossy mean of each rank's tensors; a single rank's are unchanged."""
        if self.ranks == 1:
            return {name: value.clone() for name, value in values[0].items()}
        found: Tensors = {}
        for bucket, errors, server in zip(self.buckets, self.errors, self.server, strict=True):
            xs = [torch.zeros(bucket.size) for _ in values]
            for x, own, error in zip(xs, values, errors, strict=True):
                for name, (start, stop) in bucket.places.items():
                    x[start:stop] = own[name].flatten() + error[start:stop]
            out = torch.zeros(bucket.size)
            for piece in self.pieces(bucket):
                total = server[piece].clone()
                for x, error in zip(xs, errors, strict=True):
                    signs, size = self.coded(x[piece])
                    error[piece] = x[piece] - signs * size
                    total += signs * (size / self.ranks)
                signs, size = self.coded(total)
                server[piece] = total - signs * size
                out[piece] = signs * size
            for name, (start, stop) in bucket.places.items():
                found[name] = out[start:stop].view(SHAPES[name])
        return found


class Warmed:
    """A base optimizer over summed gradients on one rank, with its states after the warm-up."""

    def __init__(self, optimizer: str, ranks: int, beta2: float = B2) -> None:
        self.ranks = ranks
        settings = {"optimizer": optimizer, "adam_beta2": beta2}
        self.run = ToyRun(RankContext(0, {}).topology(dp=1), settings)

    def step(self, step: int) -> Tensors:
        run = self.run
        run.strategy.begin_step(step)
        for name in SHAPES:
            parts = torch.stack([gradient(name, step, rank) for rank in range(self.ranks)])
            getattr(run.toy, name).accumulate(parts.sum(dim=0))
        run.strategy.finish_grad_sync()
        run.strategy.update(run.optimizer, Update(step=step, lr=0.05, weight_decay=DECAY))
        return run.weights()

    def moments(self) -> tuple[Tensors, Tensors]:
        found: tuple[Tensors, Tensors] = ({}, {})
        for shard in self.run.strategy.shards:
            states = self.run.optimizer.state(shard.main_param)
            for placed in shard.bucket.placed:
                name = placed.parameter.info.spec.name
                for tensors, state in zip(found, ("exp_avg", "exp_avg_sq"), strict=True):
                    tensors[name] = states[state][placed.start : placed.stop].view(SHAPES[name]).clone()
        return found


def own_gradients(step: int, ranks: int) -> list[Tensors]:
    return [{name: gradient(name, step, rank) * float(ranks) for name in SHAPES} for rank in range(ranks)]


def blend(momentum: Tensors, gradients: Tensors) -> Tensors:
    return {name: torch.lerp(momentum[name], gradients[name], 1.0 - B1) for name in SHAPES}


def below(moment: torch.Tensor, updates: int, beta2: float = B2) -> tuple[torch.Tensor, float]:
    """Return √v̂ + ε without a factor by which steps are multiplied instead."""
    factor = math.sqrt(1.0 - beta2**updates)
    return moment.sqrt() + EPS * factor, factor


def bounded(moments: Tensors, groups: Sequence[Sequence[str]]) -> Tensors:
    """Raise second moments to at least a hundredth of the mean over the tensors of their group."""
    found = {}
    for names in groups:
        total = sum(float(moments[name].sum(dtype=torch.float64)) for name in names)
        lowest = 0.01 * total / sum(moments[name].numel() for name in names)
        found.update({name: moments[name].clamp(min=lowest) for name in names})
    return found


def each_alone() -> list[list[str]]:
    return [[name] for name in SHAPES]


def onebit_adam(
    buckets: Sequence[Layout], ranks: int, *, freeze: int, steps: int, scale: str = "tensor", lr: float = 0.05
) -> list[Tensors]:
    warmed, means = Warmed("adam", ranks), Means(buckets, ranks, scale)
    found = [warmed.step(step) for step in range(1, freeze + 1)]
    weights = {name: value.clone() for name, value in found[-1].items()}
    m, v = warmed.moments()
    v = bounded(v, [list(bucket.places) for bucket in buckets] if scale == "bucket" else each_alone())
    for step in range(freeze + 1, steps + 1):
        m = means.mean([blend(m, own) for own in own_gradients(step, ranks)])
        for name, x in weights.items():
            if name not in NO_DECAY:
                x.mul_(1.0 - lr * DECAY)
            d, factor = below(v[name], freeze)
            x.addcdiv_(m[name], d, value=-lr * (factor / (1.0 - B1**step)))
        found.append({name: x.clone() for name, x in weights.items()})
    return found


def onebit_lamb(
    buckets: Sequence[Layout],
    ranks: int,
    *,
    freeze: int,
    steps: int,
    beta2: float,
    scale: str = "tensor",
    lr: float = 0.05,
) -> tuple[list[Tensors], dict[str, float]]:
    """Return the weights after each step, and r after the last one."""
    warmed, means = Warmed("lamb", ranks, beta2), Means(buckets, ranks, scale)
    found, ratios = [], dict[str, float]()
    for step in range(1, freeze + 1):
        found.append(warmed.step(step))
        lamb: Any = warmed.run.optimizer
        for name, ratio in lamb.trust_ratios.items():
            ratios[name] = 0.9 * ratios[name] + (1.0 - 0.9) * ratio if name in ratios else ratio
    weights = {name: value.clone() for name, value in found[-1].items()}
    m, v = warmed.moments()
    v = bounded(v, each_alone())
    fresh = {name: value / (1.0 - beta2**freeze) for name, value in v.items()}
    r = dict.fromkeys(ratios, 1.0)
    sigma = dict.fromkeys(SHAPES, 1.0)
    if scale == "bucket":
        squares = {name: float(norm(m[name].flatten())) ** 2 for name in SHAPES}
        rms = {name: math.sqrt(squares[name] / m[name].numel()) for name in sorted(SHAPES)}
        mean = float(torch.tensor(list(rms.values()), dtype=torch.float64).mean())
        sigma = {name: mean / each for name, each in rms.items()}
    for step in range(freeze + 1, steps + 1):
        before, correction = m, 1.0 - B1**step
        sent = [blend(m, own) for own in own_gradients(step, ranks)]
        m = means.mean([{name: own[name] * sigma[name] for name in own} for own in sent])
        m = {name: value / sigma[name] for name, value in m.items()}
        for name, x in weights.items():
            new_grad = torch.sub(m[name], before[name], alpha=B1)
            fresh[name].mul_(beta2).addcmul_(new_grad, new_grad, value=(1.0 - beta2) / (1.0 - B1) ** 2)
            rate, (d, factor) = lr, below(v[name], freeze, beta2)
            direction, unit = m[name] / d, factor / correction
            if name not in NO_DECAY:
                largest = float((d / (fresh[name].sqrt() + EPS)).max()) / factor
                u = torch.add(direction, x, alpha=DECAY / unit)
                one, other = (float(norm(each.flatten())) ** 2 for each in (direction, u))
                share = min(math.sqrt(one / other), 1.0)
                wanted = min(max(largest * share + 1.0 - share, 0.5), 4.0)
                r[name] = min(max(wanted, r[name] * (1.0 - 0.1)), r[name] * (1.0 + 0.1))
                rate = lr * (ratios[name] * r[name])
                x.mul_(1.0 - rate * DECAY)
            x.add_(direction, alpha=-rate * unit)
        found.append({name: x.clone() for name, x in weights.items()})
    return found, r


def zero_one_adam(
    buckets: Sequence[Layout],
    ranks: int,
    *,
    variance_steps: Sequence[int],
    freeze: int,
    exchange_steps: Sequence[int],
    steps: int,
    lr: float = 0.05,
) -> list[list[Tensors]]:
    """Return the weights of each rank after each step."""
    means = Means(buckets, ranks)
    warmed = Warmed("adam", ranks)
    start = warmed.run.weights()
    xs = [{name: value.clone() for name, value in start.items()} for _ in range(ranks)]
    ms = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(ranks)]
    v = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    us = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(ranks)]
    anchor: Tensors = {}
    found, seen, decay, total = [], 0, 1.0, 0.0
    for step in range(1, steps + 1):
        rate, kept = lr / (1.0 - B1**step), 1.0 - lr * DECAY
        if step - 1 in variance_steps and step not in variance_steps:
            v = bounded(v, each_alone())
        if step <= freeze:
            if step in variance_steps:
                seen += 1
                parts = [{name: gradient(name, step, rank) for name in SHAPES} for rank in range(ranks)]
                mean = {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in SHAPES}
                for name, g in mean.items():
                    v[name].mul_(B2).addcmul_(g, g, value=1.0 - B2)
            else:
                mean = means.mean(own_gradients(step, ranks))
            for x, m in zip(xs, ms, strict=True):
                m.update(blend(m, mean))
                for name in SHAPES:
                    if name not in NO_DECAY:
                        x[name].mul_(kept)
                    d, factor = below(v[name], seen)
                    x[name].addcdiv_(m[name], d, value=-rate * factor)
            anchor = {name: value.clone() for name, value in xs[0].items()}
        else:
            decay, total = decay * kept, total + rate
            for m, u, own in zip(ms, us, own_gradients(step, ranks), strict=True):
                m.update(blend(m, own))
                for name in SHAPES:
                    if name not in NO_DECAY:
                        u[name].mul_(kept)
                    u[name].add_(m[name], alpha=rate)
            exchanged = step in exchange_steps
            steps_taken = means.mean([{n: u[n] / total for n in u} for u in us]) if exchanged else {}
            for x, m, u in zip(xs, ms, us, strict=True):
                for name in SHAPES:
                    x[name] = anchor[name] * (1.0 if name in NO_DECAY else decay)
                    moved, far = (steps_taken[name], -total) if exchanged else (u[name], -1.0)
                    d, factor = below(v[name], seen)
                    x[name].addcdiv_(moved, d, value=far * factor)
                    if exchanged:
                        m[name] = moved * (1.0 - B1**step)
                        u[name].zero_()
            if exchanged:
                anchor = {name: value.clone() for name, value in xs[0].items()}
                decay, total = 1.0, 0.0
        found.append([{name: value.clone() for name, value in x.items()} for x in xs])
    return found
