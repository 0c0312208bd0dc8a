"""Logits of a Hugging Face folder by the stock model of `transformers`, where that is installed."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megalite.conversion.weights import ConversionError

OLDEST = 5
"""First major version whose spelling of the settings is used here."""


def stock_version() -> str | None:
    """The version of transformers, if it is installed and new enough."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if found.split(".")[0].isdecimal() and int(found.split(".")[0]) >= OLDEST else None


@torch.no_grad()
def stock_logits(
    folder: Path, tokens: torch.Tensor, dtype: torch.dtype, *, has_experts: bool
) -> torch.Tensor:
    """Logits [b, s, vocab_size] of tokens [b, s] by `AutoModelForCausalLM`, computed in `dtype` on the CPU.

    transformers computes norms, rotary tables and softmaxes in float32 whatever `dtype` is. No code of the folder is
    run and nothing is downloaded.

    Raises:
        ConversionError: transformers does not load or run it.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # Grouped products take no float64.
    plain = {"experts_implementation": "eager"} if has_experts else {}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **plain,
        )
        logits: torch.Tensor = model.eval()(tokens, use_cache=False).logits
    except Exception as error:  # of many kinds, for whatever is wrong in the folder
        said = (str(error).strip().splitlines() or [""])[0]
        raise ConversionError(
            f"{folder}: transformers {stock_version()} does not load it: {type(error).__name__}: {said}"
        ) from None
    return logits
