"""Optimizer, clipping, learning-rate and weight-decay schedules."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedules. Norms and biases are not decayed."""

    optimizer: str = option("adam", choices=("adam",))
    """adam is AdamW (decoupled weight decay)."""
    lr: float = option(1e-3, basic=True)
    """Peak learning rate."""
    min_lr: float = option(0.0, basic=True)
    """Learning rate at and after the end of decay."""
    lr_decay_style: str = option(
        "cosine", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"), basic=True
    )
    """Decay after warm-up."""
    lr_decay_iters: int | None = option(None)
    """Steps at which min_lr is reached; default train_iters."""
    lr_decay_samples: int | None = option(None)
    """The same in samples; default train_samples."""
    lr_warmup_iters: int | None = option(None)
    """Steps of linear warm-up."""
    lr_warmup_samples: int | None = option(None)
    """The same in samples."""
    lr_warmup_fraction: float | None = option(None, basic=True)
    """Warm-up as a fraction of the decay length."""
    lr_warmup_init: float = option(0.0)
    """Learning rate before the first step; the first step already runs above it."""
    lr_wsd_decay_iters: int | None = option(None)
    """Length of the final decay of WSD, in steps."""
    lr_wsd_decay_samples: int | None = option(None)
    """The same in samples."""
    lr_wsd_decay_style: str = option("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Shape of the final decay of WSD."""
    weight_decay: float = option(0.01)
    """Decoupled weight decay."""
    weight_decay_incr_style: str = option("constant", choices=("constant", "linear", "cosine"))
    """How weight decay moves from start_weight_decay to end_weight_decay."""
    start_weight_decay: float | None = option(None)
    """First value of a moving weight decay."""
    end_weight_decay: float | None = option(None)
    """Last value of a moving weight decay."""
    adam_beta1: float = option(0.9)
    """Decay of the first moment."""
    adam_beta2: float = option(0.999)
    """Decay of the second moment."""
    adam_eps: float = option(1e-8)
    """Added to the square root of the second moment."""
    clip_grad: float = option(1.0)
    """Largest global gradient norm; 0 turns clipping off."""
