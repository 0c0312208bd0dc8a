"""What a step of GPT would take if each of its pieces ran at the measured ceiling: what is above it has a name."""

from collections.abc import Sequence

from gpu_legs import Row

from megalite.config.model import ModelConfig
from megalite.models.shapes import attention_core_flops, flops_per_token, parameter_count

NORMS_AND_ACTIVATIONS = 36
"""Passes over [tokens, hidden] that a layer must make: two sums with their norms, 4 each way, and GELU, 8 and 12."""
HALF = 2
LOSS = 6
"""Bytes an element of the logits in bf16: one read forward, one read and one write backward."""
OPTIMIZER = 34
"""Bytes a parameter: AdamW's 30 with fp32 gradients and bf16 weights, and 4 for the gradient norm."""


def copy_rate(rows: Sequence[Row]) -> float | None:
    """Measured GB/s, reads and writes together."""
    return next((row["gb_s"] for row in rows if row.get("what") == "copy" and "gb_s" in row), None)


def gemm_rate(rows: Sequence[Row], dtype: str = "bfloat16") -> float | None:
    """Measured TFLOP/s of the square product."""
    return next(
        (
            row["tflops"]
            for row in rows
            if row.get("what") == "gemm"
            and row["shape"].startswith("square")
            and row["dtype"] == dtype
            and "tflops" in row
        ),
        None,
    )


def attention_rates(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Measured TFLOP/s of the fastest backend, forward and backward, of the half that a causal mask leaves."""
    found = [row for row in rows if row.get("what") == "attention" and "tflops" in row]
    best = min(found, key=lambda row: row["ms"] + row["backward_ms"], default=None)
    return None if best is None else (best["tflops"], best["backward_tflops"])


def floor(
    ceilings: Sequence[Row], model: ModelConfig, *, seq_length: int, microbatch: int, accumulation: int
) -> dict[str, float] | None:
    """Category of the profile -> ms of a step in bf16 without recomputation; None without all three ceilings."""
    copy, gemm, attention = copy_rate(ceilings), gemm_rate(ceilings), attention_rates(ceilings)
    if copy is None or gemm is None or attention is None:
        return None
    tokens = seq_length * microbatch * accumulation
    core = model.num_layers * attention_core_flops(model, seq_length, "megatron")  # forward, a token
    products = flops_per_token(model, seq_length, "megatron") - 3 * core
    passes = model.num_layers * NORMS_AND_ACTIVATIONS * model.hidden_size * HALF
    return {
        "GEMM": tokens * products / gemm / 1e9,
        # The backward has five products where the forward has two.
        "attention": tokens * core * (1 / attention[0] + 2.5 / attention[1]) / 1e9,
        "norms and activations": tokens * passes / copy / 1e6,
        "cross-entropy": tokens * model.padded_vocab_size * LOSS / copy / 1e6,
        "optimizer": parameter_count(model) * OPTIMIZER / copy / 1e6,
    }
