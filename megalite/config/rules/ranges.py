"""Rules about single settings: bounds and choices."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megalite.config.describe import settings, values_of
from megalite.config.errors import Findings, Problems
from megalite.config.run import RunConfig
from megalite.config.values import check_choice

_MOST = 2.0**40
"""Where a setting has no bound of its own: more than any run needs, little enough that counting with it is quick."""


class Bounds(NamedTuple):
    """`low <= value` (or `low < value` if open) and `value < high` (or <= if closed)."""

    low: float
    example: float
    """A value that works."""
    open: bool = False
    high: float = _MOST
    closed: bool = False

    def error(self, value: float) -> str | None:
        """What is wrong with the value, or None."""
        low_kept = value > self.low if self.open else value >= self.low
        if not low_kept:
            return f"must be {'above' if self.open else 'at least'} {_shown(self.low)}"
        if not (value <= self.high if self.closed else value < self.high):
            return f"must be {'at most' if self.closed else 'below'} {_shown(self.high)}"
        return None


def _shown(value: float) -> str:
    """Whole numbers with all their digits."""
    return str(int(value)) if value == int(value) and abs(value) >= 1e6 else f"{value:g}"


_AT_LEAST_ONE: Mapping[float, tuple[str, ...]] = MappingProxyType(
    {
        10_000: ("num_layers", "moe_layer_freq", "recompute_num_layers"),
        2**20: ("tp", "pp", "vpp", "dp", "cp", "ep", "etp"),
        2**24: (
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "make_vocab_size_divisible_by",
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "micro_batch_size",
            "global_batch_size",
        ),
        2**31: ("vocab_size", "max_position_embeddings", "rope_original_max_positions", "seq_length"),
        _MOST: (
            "ddp_bucket_size",
            "train_iters",
            "train_samples",
            "loss_scale_window",
            "hysteresis",
            "eval_interval",
            "eval_iters",
            "exit_interval",
            "max_consecutive_skips",
            "save_interval",
            "keep_latest",
            "keep_every",
            "log_interval",
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        ),
    }
)
"""What they are below -> settings of which there is at least one: layers, ranks, widths and batches, tokens, steps."""

BOUNDS: Mapping[str, Bounds] = MappingProxyType(
    {name: Bounds(1, 1, high=most) for most, names in _AT_LEAST_ONE.items() for name in names}
    | {
        "pipeline_layers": Bounds(0, 1, high=10_000),
        "pipeline_recv_prefetch": Bounds(0, 1),
        "pipeline_send_window": Bounds(1, 1),
        "trace_steps": Bounds(1, 3),
        "timing_log_level": Bounds(0, 1, high=1, closed=True),
        "straggler_threshold": Bounds(1, 1.2, open=True),
        "profile_step_start": Bounds(2, 10),
        "profile_step_end": Bounds(3, 12),
        "profile_ranks": Bounds(0, 0),
        "rotary_base": Bounds(0, 10000, open=True),
        "rope_scaling_factor": Bounds(1, 8, open=True),
        "rope_low_freq_factor": Bounds(0, 1, open=True),
        "rope_high_freq_factor": Bounds(0, 4, open=True),
        "sliding_window": Bounds(2, 4096),
        "num_experts": Bounds(2, 8, high=2**20),
        "moe_first_dense_layers": Bounds(0, 1, high=10_000),
        "moe_router_topk_scaling_factor": Bounds(0, 1, open=True),
        "moe_aux_loss_coeff": Bounds(0, 0.01),
        "moe_z_loss_coeff": Bounds(0, 0.001),
        "moe_expert_capacity_factor": Bounds(0, 1.25, open=True),
        "norm_epsilon": Bounds(0, 1e-5, open=True),
        "init_method_std": Bounds(0, 0.02, open=True, high=100),
        "hidden_dropout": Bounds(0, 0.1, high=1),
        "attention_dropout": Bounds(0, 0.1, high=1),
        "distributed_timeout_minutes": Bounds(0, 10, open=True),
        "hang_timeout_minutes": Bounds(0, 8),
        "hang_save_timeout_minutes": Bounds(0, 9, open=True),
        "lr": Bounds(0, 1e-3, open=True),
        "min_lr": Bounds(0, 0),
        "lr_warmup_iters": Bounds(0, 0),
        "lr_warmup_samples": Bounds(0, 0),
        "lr_warmup_fraction": Bounds(0, 0.01, high=1),
        "lr_warmup_init": Bounds(0, 0),
        "weight_decay": Bounds(0, 0.01),
        "start_weight_decay": Bounds(0, 0),
        "end_weight_decay": Bounds(0, 0.01),
        "adam_beta1": Bounds(0, 0.9, high=1),
        "adam_beta2": Bounds(0, 0.999, high=1),
        "adam_eps": Bounds(0, 1e-8, open=True),
        "clip_grad": Bounds(0, 1),
        "seed": Bounds(0, 1234, high=2**63),
        "loss_scale": Bounds(0, 65536, open=True, high=2**64),
        "initial_loss_scale": Bounds(0, 65536, open=True, high=2**64),
        "min_loss_scale": Bounds(0, 1, open=True, high=2**64),
        "ckpt_step": Bounds(0, 1000),
        "fusion_threshold_mb": Bounds(0, 64, open=True),
        "server_chunk_mb": Bounds(0.001, 4, high=2000, closed=True),
        "max_staleness": Bounds(0, 1),
        "sync_interval": Bounds(1, 20),
        "sync_warmup_steps": Bounds(0, 100),
        "outer_lr": Bounds(0, 0.7, open=True),
        "outer_momentum": Bounds(0, 0.9, high=1),
        "sync_fragments": Bounds(1, 1),
        "sync_delay": Bounds(0, 0),
        "sync_mix": Bounds(0, 0.5, high=1),
        "compression_warmup_steps": Bounds(0, 100),
        "topk_density": Bounds(0, 0.01, open=True, high=1, closed=True),
        "powersgd_rank": Bounds(1, 4),
        "check_replicas_interval": Bounds(1, 100),
        "sgd_momentum": Bounds(0, 0.9, high=1),
        "lamb_min_coeff": Bounds(0, 0.01),
        "lamb_max_coeff": Bounds(0, 10, open=True),
        "muon_momentum": Bounds(0, 0.95, high=1),
        "muon_steps": Bounds(1, 5),
        "muon_scale": Bounds(0, 0.2, open=True),
        "freeze_step": Bounds(1, 1000),
        "freeze_threshold": Bounds(0, 0.96, open=True, high=1),
        "local_step_clipper": Bounds(1, 16),
        "local_step_scaler": Bounds(1, 1000),
        "variance_update_scaler": Bounds(1, 16),
        "exit_duration_in_mins": Bounds(0, 230, open=True),
        "exit_timeout_seconds": Bounds(0, 300, open=True),
        "max_failures_at_step": Bounds(0, 3),
        "loss_spike_threshold": Bounds(0, 10),
        "loss_spike_window": Bounds(8, 100),
        "peak_tflops": Bounds(0, 312, open=True),
    }
)
"""Setting -> its bounds (of each element, for a list)."""


def check_ranges(config: RunConfig, problems: Problems) -> None:
    """Add each setting that is outside its bounds or choices to the problems, and to what is wrong."""
    for name, value in values_of(config).items():
        if value is None or name in problems.wrong:
            continue
        with problems.collecting(name):
            check_choice(settings()[name], value, "config")
        if name in BOUNDS:
            problems.extend(_out_of_bounds(name, value, BOUNDS[name]), name)


def _out_of_bounds(name: str, value: Any, bounds: Bounds) -> Findings:
    for element in value if isinstance(value, list) else [value]:
        error = bounds.error(element)
        if error:
            what = (
                f"{name} has {_shown(element)} in it; each"
                if isinstance(value, list)
                else f"{name} is {_shown(element)}; it"
            )
            yield f"{what} {error}, e.g. {bounds.example:g}"
