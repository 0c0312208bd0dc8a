"""Settings of the optimizer, clipping, learning-rate and weight-decay schedules."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.errors import ConfigError
from megalite.config.numbers import as_number
from megalite.config.registry import Registry, option

Formats = Mapping[str, Literal["main", "bf16"]]
"""Optimizer state -> its number format: that of the main parameters, or bf16."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Facts about one optimizer."""

    states: "tuple[str, ...] | Callable[[OptimizerConfig, bool], Formats]"
    """Names of the per-element states, kept in the precision of the main parameters; or a function of the settings and
    of whether the parameter is a hidden matrix. Dry run and planner count these states, and a run checks that there are
    no others."""
    settings: str = "adam_beta1 adam_beta2 adam_eps"
    """Settings that this optimizer uses, of those that only some optimizers use."""
    averaged: bool = False
    """Evaluation and saving use an average of the trained weights, which are saved beside it as `train_param`."""
    host_passes: int = 0
    """Passes of one update over states in host memory, which visit the device for it; 0: offloading is unsupported."""
    separate_matrices: bool = False
    """Hidden matrices share no bucket with other parameters; `FlatParameter.orthogonal` marks them."""
    sides: int = 0
    """Number of dimensions n of a hidden matrix that have the states `SQUARES`: 2, or 1 for the smaller one. The rank
    that works on the matrix stores them."""
    exchanged: tuple[int, int] = (0, 0)
    """Values per element of a hidden matrix that are sent to the rank that works on it, and sent back."""

    def __post_init__(self) -> None:
        if isinstance(self.states, str):
            raise TypeError(f"states is the text {self.states!r}; write states=({self.states!r},)")


def _adam_states(c: "OptimizerConfig", hidden_matrix: bool) -> Formats:
    dtypes = {"exp_avg": c.exp_avg_dtype, "exp_avg_sq": c.exp_avg_sq_dtype}
    return {name: "bf16" if dtype == "bf16" else "main" for name, dtype in dtypes.items()}


def _muon_states(c: "OptimizerConfig", hidden_matrix: bool) -> Formats:
    """Return Muon's states; other parameters than hidden matrices are updated by AdamW."""
    return {"momentum_buffer": "main"} if hidden_matrix else {"exp_avg": "main", "exp_avg_sq": "main"}


_HERE = "megalite.optimizers"
_ADAM = "adam_beta1 adam_beta2 adam_eps"
_ONEBIT = f"{_ADAM} freeze_step freeze_threshold onebit_scale"
_LAMB = "lamb_min_coeff lamb_max_coeff"
_SOAP = f"{_ADAM} soap_frequency"
MOMENTS = ("exp_avg", "exp_avg_sq")
SQUARES = ("gram", "eigenbasis")
"""States [n, n] in the format of the main parameters."""
EMA = "ema"
"""State that `ema_decay` adds to any optimizer."""
MUON_SCALES = ("spectral", "shape_scaling", "unit_rms_norm")
OPTIMIZERS: Registry[Any] = Registry(
    "optimizer",
    {
        "adam": (
            f"{_HERE}.adam:AdamW",
            OptimizerFacts(
                states=_adam_states,
                settings=f"{_ADAM} exp_avg_dtype exp_avg_sq_dtype stochastic_rounding",
                host_passes=1,
            ),
        ),
        "sgd": (
            f"{_HERE}.base:SGD",
            OptimizerFacts(
                states=lambda c, _: {"momentum_buffer": "main"} if c.sgd_momentum else {},
                settings="sgd_momentum sgd_nesterov",
                host_passes=1,
            ),
        ),
        "lamb": (f"{_HERE}.lamb:LAMB", OptimizerFacts(states=MOMENTS, settings=f"{_ADAM} {_LAMB}", host_passes=2)),
        "muon": (
            f"{_HERE}.matrix_optimizers:Muon",
            OptimizerFacts(
                states=_muon_states,
                settings=f"{_ADAM} muon_momentum muon_nesterov muon_steps muon_scale muon_scale_mode muon_split_qkv",
                host_passes=1,
                separate_matrices=True,
                exchanged=(1, 1),
            ),
        ),
        "soap": (
            f"{_HERE}.matrix_optimizers:SOAP",
            OptimizerFacts(
                states=MOMENTS, settings=_SOAP, host_passes=2, separate_matrices=True, sides=2, exchanged=(3, 2)
            ),
        ),
        "one-sided-soap": (
            f"{_HERE}.matrix_optimizers:SOAP",
            OptimizerFacts(
                states=MOMENTS, settings=_SOAP, host_passes=2, separate_matrices=True, sides=1, exchanged=(3, 2)
            ),
        ),
        "schedule-free-adamw": (
            f"{_HERE}.adam:ScheduleFreeAdamW",
            OptimizerFacts(states=("z", "exp_avg_sq"), averaged=True),
        ),
        "onebit-adam": (
            f"{_HERE}.onebit:OneBitAdam",
            OptimizerFacts(states=MOMENTS, settings=f"{_ONEBIT} onebit_rule"),
        ),
        "onebit-lamb": (
            f"{_HERE}.onebit_lamb:OneBitLAMB",
            OptimizerFacts(states=(*MOMENTS, "exp_avg_sq_fresh"), settings=f"{_ONEBIT} onebit_rule {_LAMB}"),
        ),
        "zero-one-adam": (
            f"{_HERE}.onebit:ZeroOneAdam",
            OptimizerFacts(
                states=(*MOMENTS, "local_update", "synced_param"),
                settings=f"{_ONEBIT} local_step_clipper local_step_scaler variance_update_scaler",
            ),
        ),
    },
    OptimizerFacts,
)
"""Subclasses of `optimizers.base.Optimizer`. Register one with `@OPTIMIZERS.register("mine", states=("exp_avg",))`."""
LR_SCHEDULES: Registry[Callable[..., float]] = Registry(
    "lr_decay_style",
    {
        "constant": f"{_HERE}.schedules:constant",
        "linear": f"{_HERE}.schedules:linear",
        "cosine": f"{_HERE}.schedules:cosine",
        "inverse-square-root": f"{_HERE}.schedules:inverse_square_root",
        "WSD": f"{_HERE}.schedules:warmup_stable_decay",
    },
)
"""Functions of an `optimizers.schedules.Decay`, from the end of warm-up to the end of decay."""
HOST_PIECE, HOST_SLOTS = 1 << 22, 3
"""Elements per piece of offloaded states that visits the device, and the number of pieces with room there."""
ONEBIT_OPTIMIZERS = ("onebit-adam", "onebit-lamb", "zero-one-adam")
"""Optimizers that exchange their own state instead of gradients after the warm-up."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedules. Biases and norms are not decayed, except with apply_wd_to_qk_layernorm."""

    optimizer: str = option("adam", choices=OPTIMIZERS)
    """Optimizer; adam is AdamW (docs/data_parallel.md)."""
    lr: float = option(1e-3, above=0, basic=True)
    """Peak learning rate."""
    min_lr: float = option(0.0, at_least=0, basic=True)
    """Learning rate at and after the end of decay."""
    decoupled_lr: float | None = option(None, above=0)
    """Peak learning rate of the word embedding and head; default: lr."""
    decoupled_min_lr: float | None = option(None, at_least=0)
    """decoupled_lr: final learning rate; default: min_lr."""
    lr_multipliers: list[str] = option([])
    """PATTERN=FACTOR ...: multiply the learning rate of matching parameters, such as 'layers.0.*=0.5'."""
    lr_decay_style: str = option("cosine", choices=LR_SCHEDULES, basic=True)
    """Decay after warm-up."""
    lr_decay_iters: int | None = option(None, at_least=1)
    """Step at which min_lr is reached; default: train_iters."""
    lr_decay_samples: int | None = option(None, at_least=1)
    """Sample at which min_lr is reached; default: train_samples."""
    lr_warmup_iters: int | None = option(None, at_least=0)
    """Steps of linear warm-up."""
    lr_warmup_samples: int | None = option(None, at_least=0)
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = option(None, at_least=0, below=1, basic=True)
    """Warm-up as a fraction of the decay length."""
    lr_warmup_init: float = option(0.0, at_least=0)
    """Learning rate at the start of the warm-up."""
    lr_schedule_offset: str = option("step-end", choices=("step-end", "megatron"))
    """A step uses the learning rate and weight decay of its end in the schedules, or of its start (megatron)."""
    lr_wsd_decay_iters: int | None = option(None, at_least=1)
    """Length of the final decay of WSD, in steps."""
    lr_wsd_decay_samples: int | None = option(None, at_least=1)
    """Length of the final decay of WSD, in samples."""
    lr_wsd_decay_style: str = option("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Shape of the final decay of WSD."""
    weight_decay: float = option(0.01, at_least=0)
    """Decoupled weight decay."""
    weight_decay_incr_style: str = option("constant", choices=("constant", "linear", "cosine"))
    """Change of the weight decay from start_weight_decay to end_weight_decay."""
    start_weight_decay: float | None = option(None, at_least=0)
    """First weight decay, if it changes."""
    end_weight_decay: float | None = option(None, at_least=0)
    """Last weight decay, if it changes."""
    adam_beta1: float = option(0.9, at_least=0, below=1)
    """Decay of the first moment (not sgd)."""
    adam_beta2: float = option(0.999, at_least=0, below=1)
    """Decay of the second moment."""
    adam_eps: float = option(1e-8, above=0)
    """Constant added to the square root of the second moment."""
    clip_grad: float = option(1.0, at_least=0)
    """Largest global gradient norm; 0 turns clipping off."""
    sgd_momentum: float = option(0.9, at_least=0, below=1)
    """sgd: momentum."""
    sgd_nesterov: bool = option(False)
    """sgd: Nesterov momentum."""
    lamb_min_coeff: float = option(0.01, at_least=0)
    """lamb, onebit-lamb: lowest trust ratio."""
    lamb_max_coeff: float = option(10.0, above=0)
    """lamb, onebit-lamb: highest trust ratio."""
    muon_momentum: float = option(0.95, at_least=0, below=1)
    """muon: momentum of matrices."""
    muon_nesterov: bool = option(True)
    """muon: Nesterov momentum."""
    muon_steps: int = option(5, at_least=1, flags=("--muon-num-ns-steps",))
    """muon: Newton-Schulz iterations."""
    muon_scale: float = option(0.2, above=0, flags=("--muon-extra-scale-factor",))
    """muon: factor on all updates; with spectral it is the root mean square of a matrix's update."""
    muon_scale_mode: str = option("spectral", choices=MUON_SCALES)
    """muon: factor on the update of [r, c]: √max(r, c) (spectral), √max(1, r/c) (shape_scaling), √(r/c)
    (unit_rms_norm)."""
    muon_split_qkv: bool = option(True)
    """muon: treat queries, keys, values and their gates in a layer as separate matrices instead of one."""
    soap_frequency: int = option(10, at_least=1)
    """soap, one-sided-soap: updates between recomputations of the eigenbases."""
    qk_clip: bool = option(False)
    """MuonClip: after a step, shrink query and key weights of heads with attention logits above qk_clip_threshold."""
    qk_clip_threshold: float = option(100.0, above=0)
    """qk_clip: largest attention logit."""
    qk_clip_alpha: float = option(0.5, at_least=0, at_most=1)
    """qk_clip: share of the scaling applied to the queries."""
    freeze_step: int | None = option(None, at_least=1)
    """1-bit optimizers: last step of the warm-up with uncompressed gradients; default: see freeze_threshold."""
    freeze_threshold: float = option(0.96, above=0, below=1)
    """1-bit optimizers: end the warm-up, after the learning rate's, once the second moment's L1 norm changes by less
    than this ratio over 1/(1-beta2) steps."""
    onebit_scale: str = option("tensor", choices=("tensor", "bucket"))
    """1-bit optimizers: magnitude of the signs: one per tensor, or per bucket as in the papers."""
    onebit_rule: str = option("megalite", choices=("megalite", "deepspeed"))
    """onebit-adam, onebit-lamb: megalite's algorithm or DeepSpeed's."""
    local_step_clipper: int = option(16, at_least=1)
    """zero-one-adam: most local steps between two exchanges."""
    local_step_scaler: int = option(32678, at_least=1)
    """zero-one-adam: steps after which the number of local steps doubles."""
    variance_update_scaler: int = option(16, at_least=1)
    """zero-one-adam: second-moment updates after which their interval doubles."""
    ema_decay: float | None = option(None, at_least=0, below=1)
    """Keep an exponential moving average (EMA) of the main parameters with this decay per step; default: none."""
    eval_ema: bool = option(False)
    """Evaluate and export the EMA."""
    main_params: str = option("fp32", choices=("fp32", "split"))
    """bf16: store fp32 main parameters separately, or only the 16 bits that the model's parameters lack."""
    exp_avg_dtype: str = option("fp32", choices=("fp32", "bf16"))
    """adam: number format of the first moment."""
    exp_avg_sq_dtype: str = option("fp32", choices=("fp32", "bf16"))
    """adam: number format of the second moment."""
    stochastic_rounding: bool = option(False)
    """adam: round bf16 moments stochastically."""
    optimizer_cpu_offload: bool = option(False)
    """Keep main parameters and optimizer states in host memory; updates run on the device."""
    optimizer_offload_fraction: float = option(1.0, above=0, at_most=1)
    """optimizer_cpu_offload: smallest share to offload, in whole buckets."""

    @property
    def deepspeed_onebit(self) -> bool:
        """Whether a 1-bit optimizer runs DeepSpeed's algorithm."""
        return self.onebit_rule == "deepspeed"

    @property
    def host_fraction(self) -> float:
        """Share of main parameters and states in host memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0


def parse_lr_multipliers(texts: Sequence[str]) -> list[tuple[str, float]]:
    """Parse `lr_multipliers` into (pattern, factor) pairs. Raises ConfigError: an entry is malformed."""
    found = []
    for text in texts:
        pattern, _, number = text.rpartition("=")
        factor = as_number(number)
        if not pattern or not 0.0 <= factor < math.inf:
            raise ConfigError(f"lr_multipliers has {text!r} in it; write PATTERN=FACTOR, e.g. 'layers.0.*=0.5'")
        found.append((pattern, factor))
    return found


def state_formats(config: OptimizerConfig, *, hidden_matrix: bool = True) -> Formats:
    """Return the optimizer's states of a parameter, in their order."""
    states = OPTIMIZERS.facts(config.optimizer).states
    formats: Formats = states(config, hidden_matrix) if callable(states) else dict.fromkeys(states, "main")
    return formats if config.ema_decay is None else {**formats, EMA: "main"}


def matrix_sides(config: OptimizerConfig, rows: int, columns: int) -> dict[str, int]:
    """Return the sides of a hidden matrix that have `SQUARES`: left (rows) and right (columns) -> n."""
    lengths = {"left": rows, "right": columns}
    return dict(sorted(lengths.items(), key=lambda side: side[1])[: OPTIMIZERS.facts(config.optimizer).sides])


MatrixKey = tuple[str, int]
"""Tensor name and the index of the matrix in it."""


def deal(config: OptimizerConfig, matrices: Mapping[MatrixKey, tuple[int, int]], ranks: int) -> dict[MatrixKey, int]:
    """Assign each hidden matrix [r, c] to one of the ranks that share the work: largest first, each to the least loaded
    rank. The result is in that order."""
    both = OPTIMIZERS.facts(config.optimizer).sides > 1
    # Multiplications by its Gram matrix, or by both.
    cost = {key: r * c * (r + c if both else min(r, c)) for key, (r, c) in matrices.items()}
    work, found = [(0, rank) for rank in range(ranks)], {}
    for key in sorted(cost, key=lambda key: (-cost[key], key)):
        least, rank = work[0]
        heapq.heapreplace(work, (least + cost[key], rank))
        found[key] = rank
    return found
