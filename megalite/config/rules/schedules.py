"""Rules about the schedules of learning rate, weight decay and loss scale."""

from megalite.config.batch import total_steps
from megalite.config.errors import Findings
from megalite.config.run import RunConfig


def check_schedules(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Learning rate, weight decay and loss scale settings agree with one another and all have an effect."""
    yield _check_units(config)
    yield _check_learning_rate(config, explicit)
    yield _check_wsd(config, explicit)
    yield _check_weight_decay(config, explicit)
    yield _check_loss_scale(config, explicit)


def _check_units(config: RunConfig) -> Findings:
    """Everything is counted in the unit in which the length of the run is given."""
    t, o = config.training, config.optimizer
    other = "samples" if t.train_iters is not None else "iters" if t.train_samples is not None else None
    unit = "iters" if other == "samples" else "samples"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        both = [f"{name}_{kind} {getattr(o, f'{name}_{kind}')}" for kind in ("iters", "samples")]
        given = [kind for kind in ("iters", "samples") if getattr(o, f"{name}_{kind}") is not None]
        if len(given) == 2:
            yield f"{both[0]} and {both[1]} say the same thing twice; keep one of them"
        if other in given:
            yield (
                f"{both[other == 'samples']} does not go with train_{unit}, in which the length of this run is given; "
                f"use {name}_{unit}"
            )


def _check_learning_rate(config: RunConfig, explicit: frozenset[str]) -> Findings:
    o = config.optimizer
    if o.min_lr > o.lr:
        yield f"min_lr {o.min_lr:g} is above lr {o.lr:g}; use min_lr {o.lr / 10:g}"
    if o.lr_decay_style == "constant":
        for name in ("min_lr", "lr_decay_iters", "lr_decay_samples"):
            value = getattr(o, name)
            if name in explicit and value:
                yield (f"{name} {value:g} has no effect with lr_decay_style constant; use cosine or remove it")
    warmups = [
        f"{name} {getattr(o, name):g}"
        for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        if getattr(o, name) is not None
    ]
    if len(warmups) > 1:
        yield f"{' and '.join(warmups)} both set the length of the warm-up; keep one of them"
    if o.lr_warmup_init > o.lr:
        yield f"lr_warmup_init {o.lr_warmup_init:g} is above lr {o.lr:g}; use 0"
    if o.lr_warmup_init and not warmups:
        yield (
            f"lr_warmup_init {o.lr_warmup_init:g} has no effect without a warm-up; add --lr-warmup-iters 100 or remove "
            f"it"
        )
    length, unit = decay_length(config)
    warmup = getattr(o, f"lr_warmup_{unit}")
    if length is not None and warmup is not None and warmup >= length and warmup > 0:
        yield (f"lr_warmup_{unit} {warmup} is not shorter than the decay of {length} {unit}; use at most {length - 1}")


def decay_length(config: RunConfig) -> tuple[int | None, str]:
    """(steps or samples at which decay ends, "iters" or "samples"); None if the length of the run is not given."""
    t, o = config.training, config.optimizer
    if t.train_samples is not None or (t.train_iters is None and o.lr_decay_samples is not None):
        return o.lr_decay_samples or t.train_samples, "samples"
    return o.lr_decay_iters or (None if t.train_iters is None else total_steps(config)), "iters"


def _check_wsd(config: RunConfig, explicit: frozenset[str]) -> Findings:
    o = config.optimizer
    if o.lr_decay_style != "WSD":
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"):
            if name in explicit or (name != "lr_wsd_decay_style" and getattr(o, name) is not None):
                yield (
                    f"{name} {getattr(o, name)} has no effect with lr_decay_style {o.lr_decay_style}; use "
                    f"--lr-decay-style WSD or remove it"
                )
        return
    length, unit = decay_length(config)
    final = getattr(o, f"lr_wsd_decay_{unit}")
    if final is None:
        example = max(1, length // 10) if length else 100
        yield f"lr_decay_style WSD needs the length of its final decay; add --lr-wsd-decay-{unit} {example}"
    elif length is not None and final > length:
        yield (f"lr_wsd_decay_{unit} {final} is longer than the decay of {length} {unit}; use at most {length}")


def _check_weight_decay(config: RunConfig, explicit: frozenset[str]) -> Findings:
    o = config.optimizer
    ends = {name: getattr(o, name) for name in ("start_weight_decay", "end_weight_decay")}
    style = o.weight_decay_incr_style
    if style == "constant":
        for name, value in ends.items():
            if value is not None:
                yield (
                    f"{name} {value:g} has no effect with weight_decay_incr_style constant; use linear or cosine, or "
                    f"remove it"
                )
        return
    for name, value in ends.items():
        if value is None:
            yield (f"weight_decay_incr_style {style} needs {name}; add --{name.replace('_', '-')} {o.weight_decay:g}")
    if "weight_decay" in explicit:
        yield (
            f"weight_decay {o.weight_decay:g} has no effect with weight_decay_incr_style {style}, which moves from "
            f"start_weight_decay to end_weight_decay; remove it"
        )


def _check_loss_scale(config: RunConfig, explicit: frozenset[str]) -> Findings:
    t = config.training
    dynamic = [
        name for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis") if name in explicit
    ]
    if t.precision != "fp16":
        for name in (["loss_scale"] if t.loss_scale is not None else []) + dynamic:
            yield (f"{name} {getattr(t, name):g} has no effect with precision {t.precision}; use --fp16 or remove it")
        return
    if t.loss_scale is not None:
        for name in dynamic:
            yield (
                f"{name} {getattr(t, name):g} has no effect with a fixed loss_scale of {t.loss_scale:g}; remove one of "
                f"them"
            )
    if t.min_loss_scale > t.initial_loss_scale:
        yield (
            f"min_loss_scale {t.min_loss_scale:g} is above initial_loss_scale {t.initial_loss_scale:g}; use at most "
            f"{t.initial_loss_scale:g}"
        )
