"""Compare learning rates and weight decays, bit by bit in every step of a run, with a second implementation of
Megatron-LM's scheduler, written from its description."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from megalite.config.batch import batch_size
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.optimizers.schedules import Progress, Schedules
from tests.support.ranks import RankContext
from tests.support.tiny import Runner, build, tiny_config


@dataclass
class Theirs:
    """Counts samples, advancing after each step that is not skipped; rates are functions of the count."""

    max_lr: float
    min_lr: float
    init_lr: float
    style: str
    warmup: float
    decay: int
    wsd_decay: int
    wsd_style: str
    start_wd: float
    end_wd: float
    wd_style: str
    wd_length: int
    seen: int = 0

    def lr(self) -> float:
        n = self.seen
        if self.warmup > 0 and n <= self.warmup:
            return self.init_lr + ((self.max_lr - self.init_lr) * float(n) / float(self.warmup))
        if self.style == "constant":
            return self.max_lr
        if n > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * max(self.warmup, 1) ** 0.5 / (max(n, 1) ** 0.5))
        return self.min_lr + self.share(n) * (self.max_lr - self.min_lr)

    def share(self, n: int) -> float:
        """Return the remaining share of the decay from the highest rate."""
        style, done = self.style, float(n - self.warmup) / float(self.decay - self.warmup)
        if style == "WSD":
            first = self.decay - self.wsd_decay
            if n <= first:
                return 1.0
            style, done = self.wsd_style, float(n - first) / float(self.wsd_decay)
        if style == "linear":
            return 1.0 - done
        if style == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        return 2.0 * math.pow(0.5, done) - 1.0 if style == "exponential" else 1.0 - math.sqrt(done)

    def wd(self) -> float:
        if self.wd_style == "constant" or self.seen > self.wd_length:
            return self.end_wd
        done = float(self.seen) / float(self.wd_length)
        if self.wd_style == "cosine":
            done = 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return self.start_wd + done * (self.end_wd - self.start_wd)


def theirs(config: RunConfig) -> Theirs:
    """Return a scheduler with lengths in samples, as `get_optimizer_param_scheduler` computes them."""
    o, t = config.optimizer, config.training
    assert t.global_batch_size is not None
    if t.train_iters is not None:
        unit, length, decay = t.global_batch_size, t.train_iters, o.lr_decay_iters or t.train_iters
        warmup, final = o.lr_warmup_iters, o.lr_wsd_decay_iters
    else:
        assert t.train_samples is not None
        unit, length, decay = 1, t.train_samples, o.lr_decay_samples or t.train_samples
        warmup, final = o.lr_warmup_samples, o.lr_wsd_decay_samples
    fraction = o.lr_warmup_fraction
    moves = o.weight_decay_incr_style != "constant"
    return Theirs(
        max_lr=o.lr,
        min_lr=o.min_lr,
        init_lr=o.lr_warmup_init,
        style=o.lr_decay_style,
        warmup=(warmup or 0) * unit if fraction is None else fraction * (decay * unit),
        decay=decay * unit,
        wsd_decay=(final or 0) * unit,
        wsd_style=o.lr_wsd_decay_style,
        start_wd=(o.start_weight_decay if moves else o.weight_decay) or 0.0,
        end_wd=(o.end_weight_decay if moves else o.weight_decay) or 0.0,
        wd_style=o.weight_decay_incr_style,
        wd_length=length * unit,
    )


STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": "constant", "min_lr": 0.0},
    *({"lr_decay_style": style} for style in ("linear", "cosine", "inverse-square-root")),
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": style}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
]
WARMUPS: list[dict[str, Any]] = [
    {},
    {"lr_warmup": 7},
    {"lr_warmup": 7, "lr_warmup_init": 1e-5},
    {"lr_warmup_fraction": 0.137},
]
WEIGHT_DECAYS: list[dict[str, Any]] = [
    {"weight_decay": 0.07},
    *(
        {"weight_decay_incr_style": style, "start_weight_decay": 0.013, "end_weight_decay": 0.1}
        for style in ("linear", "cosine")
    ),
]


def configs(offset: str) -> Iterator[RunConfig]:
    """Yield all styles with all warm-ups, decays that end before or with the run, in steps, in samples, with a ramp-up."""
    lengths: list[dict[str, Any]] = [
        {"train_iters": 53},
        {"train_iters": 53, "lr_decay": 41},
        {"train_samples": 640, "lr_decay": 490},
        {"train_samples": 643, "rampup_batch_size": [3, 3, 90]},
    ]
    for number, style in enumerate(STYLES):
        for warmup in WARMUPS:
            for length in lengths:
                samples = "train_samples" in length
                unit, factor = ("samples", 12) if samples else ("iters", 1)
                given = {**style, **length, **warmup, **WEIGHT_DECAYS[number % len(WEIGHT_DECAYS)]}
                if style["lr_decay_style"] == "constant":
                    given.pop("lr_decay", None)
                if style["lr_decay_style"] == "WSD":
                    given["lr_wsd_decay"] = 11 * factor
                if "lr_warmup" in given:
                    given["lr_warmup"] *= factor
                for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
                    if name in given:
                        given[f"{name}_{unit}"] = given.pop(name)
                common = {"vocab_size": 100, "micro_batch_size": 1, "global_batch_size": 12, "lr": 3e-4}
                settings = {"min_lr": 3.1e-5, **common, "lr_schedule_offset": offset, **given}
                yield validate(replace(RunConfig(), **settings), 1)


def trajectory(config: RunConfig) -> list[tuple[float, float]]:
    """Return the rate and weight decay of each step, and of some after the end of the run."""
    schedules, before, found = Schedules(config), Progress(0, 0), []
    for _ in range(65):
        after = Progress(before.step + 1, before.samples + batch_size(config, before.samples))
        position = schedules.read_at(before, after)
        found.append((schedules.lr(position), schedules.weight_decay(position)))
        before = after
    return found


def reference(config: RunConfig, *, ahead: int) -> list[tuple[float, float]]:
    scheduler, samples, found = theirs(config), 0, []
    for step in range(65 + ahead):
        if step >= ahead:
            found.append((scheduler.lr(), scheduler.wd()))
        samples += batch_size(config, samples)
        scheduler.seen = samples
    return found


@pytest.mark.parametrize(("offset", "ahead"), [("megatron", 0), ("step-end", 1)])
def test_schedules_are_bitwise_equal_to_megatron(offset: str, ahead: int) -> None:
    count = 0
    for config in configs(offset):
        assert trajectory(config) == reference(config, ahead=ahead), config.optimizer
        count += 1
    assert count == 8 * 4 * 4


def test_first_step_can_have_the_initial_rate() -> None:
    """By default, the rates are those of one step later."""
    rates = {}
    for offset in ("megatron", "step-end"):
        config = tiny_config(1, num_layers=1, lr_warmup_iters=4, lr_schedule_offset=offset)
        runner = Runner(build(RankContext(0, {}), config))
        rates[offset] = [runner.step().lr for _ in range(4)]
    assert rates["megatron"][0] == 0.0
    assert rates["megatron"][1:] == rates["step-end"][:-1]
