"""Verify a conversion: compare every weight bit for bit, and the logits of source and target on the same tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megalite.conversion.open import build_stage
from megalite.conversion.weights import ConversionError, Weights, Wrapped, parameter_shapes
from megalite.models.shapes import VOCABULARY, parameter_count
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.topology import Topology

OLDEST = 5  # first major version of transformers with the argument names used here


def stock_version() -> str | None:
    """Return the version of transformers, or None if it is missing or too old."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if found.split(".")[0].isdecimal() and int(found.split(".")[0]) >= OLDEST else None


@torch.no_grad()
def stock_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype, *, has_experts: bool) -> torch.Tensor:
    """Compute logits [b, s, vocab_size] of tokens [b, s] with transformers' model in `dtype` on the CPU: the text model,
    or the whole multimodal one. transformers computes norms, rotary tables and softmaxes in float32 for every `dtype`.
    No code from the folder is run and nothing is downloaded."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # such as its hints to install kernels
    # transformers' grouped matrix products do not support float64.
    plain = {"experts_implementation": "eager"} if has_experts else {}
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        is_text = config.get_text_config() is config
        auto = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        model = auto.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **plain,
        )
        return model.eval()(tokens, use_cache=False).logits
    except Exception as error:  # the type depends on the fault in the folder
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConversionError(f"{folder}: transformers does not load it: {type(error).__name__}: {reason}") from None


DOUBLE_BELOW = 10_000_000  # parameters below which logits are computed in float64, else in float32
SEQUENCES, TOKENS = 2, 64  # maximum size of the batch for the logits
_OURS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_STOCK_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_CHUNK = 1 << 22
OURS, STOCK = "megalite", "transformers"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of a comparison: the largest absolute differences of tensors, by name, and of logits."""

    wrong: dict[str, float]  # tensors that differ bitwise from the source's, rounded to their dtype
    rounded: dict[str, float]  # tensors that were changed by rounding to a narrower dtype
    logits: float
    # Difference that rounding does not explain: between the target's logits and those of the source's weights rounded
    # to the target's dtypes or, if larger, between transformers and megalite on the source's weights.
    unexplained: float
    scale: float  # largest absolute logit of the source
    tolerance: float  # maximum of `unexplained`, relative to `scale`
    computed: str  # the programs that computed the logits, dtype and number of tokens

    @property
    def passed(self) -> bool:
        """Whether rounding explains all differences."""
        return not self.wrong and self.unexplained <= self.tolerance * max(self.scale, 1e-30)

    def lines(self) -> list[str]:
        found = []
        if self.rounded:
            name, worst = max(self.rounded.items(), key=lambda item: item[1])
            found.append(f"weights: {len(self.rounded)} tensors changed by rounding, {name} most, by {worst:.3g}")
        found += [f"weights: {name} differs by up to {worst:.6g}" for name, worst in [*self.wrong.items()][:10]]
        if len(self.wrong) > 10:
            found.append(f"weights: {len(self.wrong) - 10} more tensors differ")
        if not self.wrong:
            found.append("weights: bit-equal" + (" to the source's, rounded" if self.rounded else ""))
        found.append(f"logits: worst difference {self.logits:.3g}, largest logit {self.scale:.3g} ({self.computed})")
        if self.rounded:
            found.append(f"logits: beside what rounding explains, worst difference {self.unexplained:.3g}")
        limit = self.tolerance * self.scale
        verdict = "passed" if self.passed else "FAILED"
        why = f": {STOCK} computes rotary angles and softmaxes in float32" if STOCK in self.computed else ""
        return [*found, f"{verdict} (allowed beside rounding: weights none, logits {limit:.3g}{why})"]


class Rounded(Wrapped):
    """Weights rounded to the dtypes of another model's weights."""

    def __init__(self, inner: Weights, other: Weights) -> None:
        super().__init__(inner)
        self._other = other

    def dtype(self, name: str) -> torch.dtype:
        return self._other.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name).to(self.dtype(name))


def verify(source: Weights, target: Weights, *, log: Callable[[str], None], use_stock: bool = True) -> Verification:
    """Compare a converted and reopened model with its source. Logits of a Hugging Face folder are computed by
    transformers if it is installed, others by megalite. Only one model at a time is in memory."""
    ours, theirs = parameter_shapes(source.model), parameter_shapes(target.model)
    if source.model.vocab_size != target.model.vocab_size:
        sizes = f"vocab_size {source.model.vocab_size} and {target.model.vocab_size}"
        raise ConversionError(f"{source.path} and {target.path} are different models: {sizes}")
    if ours.keys() != theirs.keys():
        other = sorted(ours.keys() ^ theirs.keys())[0]
        raise ConversionError(f"{source.path} and {target.path} are different models: only one of them has {other}")
    log("comparing weights")
    wrong, rounded = _compare_weights(source, target)
    dtype = torch.float64 if parameter_count(source.model) < DOUBLE_BELOW else torch.float32
    tokens = _tokens(source, target)
    log(f"computing logits of {source.path}")
    first, first_by = _logits(source, tokens, dtype, use_stock)
    log(f"computing logits of {target.path}")
    second, second_by = _logits(target, tokens, dtype, use_stock)
    unexplained = logits = _worst(first, second)
    if rounded:
        log("computing logits of the source's weights after rounding")
        unexplained = _worst(our_logits(Rounded(source, target), tokens, dtype), second)
        if first_by != OURS:  # detect that megalite misreads the source
            unexplained = max(unexplained, _worst(first, our_logits(source, tokens, dtype)))
    tolerance = (_OURS_TOLERANCE if first_by == second_by == OURS else _STOCK_TOLERANCE)[dtype]
    by = first_by if first_by == second_by else f"{first_by} and {second_by}"
    chosen = ", of which the indexer chooses all" if source.model.is_sparse else ""
    return Verification(
        wrong=wrong,
        rounded=rounded,
        logits=logits,
        unexplained=unexplained,
        scale=float(first.abs().max()),
        tolerance=tolerance,
        computed=f"by {by}, {str(dtype).removeprefix('torch.')}, {tokens.numel()} random tokens{chosen}",
    )


def _compare_weights(source: Weights, target: Weights) -> tuple[dict[str, float], dict[str, float]]:
    """Return `wrong` and `rounded` of a `Verification`. Padding of the vocabulary is not compared."""
    vocab = source.model.vocab_size
    assert vocab is not None
    wrong: dict[str, float] = {}
    rounded: dict[str, float] = {}
    for name in parameter_shapes(source.model):
        ours, theirs = source.read(name), target.read(name)
        if name in VOCABULARY:
            ours, theirs = ours[:vocab], theirs[:vocab]
        if ours.shape != theirs.shape:
            raise ConversionError(f"{name}: {list(ours.shape)} in {source.path}, {list(theirs.shape)} in {target.path}")
        worst, worst_rounding, same = 0.0, 0.0, True
        for a, b in zip(ours.reshape(-1).split(_CHUNK), theirs.reshape(-1).split(_CHUNK)):
            expected = a.to(b.dtype)
            # A value that overflows the dtype was not rounded.
            if not torch.equal(a.isfinite(), expected.isfinite()):
                same, worst = False, float("inf")
                continue
            if not torch.equal(expected.view(torch.uint8), b.view(torch.uint8)):
                same = False
                worst = max(worst, _worst(expected, b))
            worst_rounding = max(worst_rounding, _worst(a, expected)) if a.dtype != b.dtype else 0.0
        if not same:
            wrong[name] = worst
        if worst_rounding > 0.0:
            rounded[name] = worst_rounding
    return wrong, rounded


def _worst(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference; infinite if an element is NaN or infinite on either side."""
    difference = (one.double() - other.double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0


def _tokens(source: Weights, target: Weights) -> torch.Tensor:
    """Draw random tokens, int64 [SEQUENCES, s], from a fixed seed: so few that sparse attention chooses all keys, since
    programs choose different ones of those with equal scores."""
    assert source.model.vocab_size is not None
    most = source.model.dsa_indexer_topk if source.model.is_sparse else TOKENS
    length = min(TOKENS, most, source.seq_length, target.seq_length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.model.vocab_size, (SEQUENCES, length), generator=generator)


def _logits(weights: Weights, tokens: torch.Tensor, dtype: torch.dtype, use_stock: bool) -> tuple[torch.Tensor, str]:
    """Return logits [b, s, vocab_size] and the name of the program that computed them."""
    found = stock_version()
    quantized = getattr(weights, "quantization", None) is not None  # transformers needs a GPU for these
    if weights.format == "huggingface" and use_stock and found is not None and not quantized:
        has_experts = weights.model.num_experts is not None
        return stock_logits(weights.path, tokens, dtype, has_experts=has_experts), f"{STOCK} {found}"
    return our_logits(weights, tokens, dtype), OURS


@torch.no_grad()
def our_logits(weights: Weights, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute logits [b, s, vocab_size] of tokens [b, s] with `GPTStage` on the CPU."""
    stage = build_stage(weights.model, tokens.shape[1], Topology.solo(), dtype)
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        values = weights.read(parameter.info.spec.name)
        parameter[: len(values)].copy_(values[: len(parameter)])  # the number of padding rows may differ
    logits: torch.Tensor = stage.eval()(tokens, stage.context())
    return logits.transpose(0, 1)[..., : weights.model.vocab_size]
