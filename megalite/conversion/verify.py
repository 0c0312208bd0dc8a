"""Is what was written what was read? Every weight bit for bit, and the logits of both on the same tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megalite.conversion.inference import build_stage
from megalite.conversion.weights import ConversionError, Weights, Wrapped, parameter_shapes
from megalite.models.shapes import parameter_count
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.topology import Topology

OLDEST = 5  # first major version that spells the settings as they are used here


def stock_version() -> str | None:
    """The version of transformers, if it is installed and new enough."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if found.split(".")[0].isdecimal() and int(found.split(".")[0]) >= OLDEST else None


@torch.no_grad()
def stock_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype, *, has_experts: bool) -> torch.Tensor:
    """Logits [b, s, vocab_size] of tokens [b, s] by `AutoModelForCausalLM`, computed in `dtype` on the CPU.
    transformers computes norms, rotary tables and softmaxes in float32 whatever `dtype` is. No code of the folder is
    run and nothing is downloaded."""
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
        raise ConversionError(f"{folder}: transformers does not load it: {type(error).__name__}: {said}") from None
    return logits


DOUBLE_BELOW = 10_000_000  # parameters of a model that is computed in float64; larger ones in float32
SEQUENCES, TOKENS = 2, 64  # of the batch that both sides are run on; no more tokens than the model takes
_OURS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_STOCK_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_CHUNK = 1 << 22
OURS, STOCK = "megalite", "transformers"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the comparison found: by name, and of logits, the largest absolute differences."""

    wrong: dict[str, float]  # tensors that are not the source's, rounded to their type, bit for bit
    rounded: dict[str, float]  # tensors that rounding to a narrower type has changed
    logits: float
    # What of it rounding does not explain: between the target's logits and those of the source's weights rounded to the
    # target's types, or, if it is larger, between the source's by two programs.
    unexplained: float
    scale: float
    tolerance: float  # on `unexplained`, for a scale of 1
    computed: str  # who computed the source's logits, the target's, in which type and on what

    @property
    def passed(self) -> bool:
        """Nothing differs but by rounding."""
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
    """Weights rounded to the types that another model stores them in."""

    def __init__(self, inner: Weights, other: Weights) -> None:
        super().__init__(inner)
        self._other = other

    def dtype(self, name: str) -> torch.dtype:
        return self._other.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name).to(self.dtype(name))


def verify(source: Weights, target: Weights, *, log: Callable[[str], None], use_stock: bool = True) -> Verification:
    """Compare a converted model, opened again, with what it was made from. Logits of a Hugging Face folder come from
    stock transformers where that is installed, others from this package. One model at a time is in memory."""
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
        if first_by != OURS:  # or nothing would tell that this package misreads the source
            unexplained = max(unexplained, _worst(first, our_logits(source, tokens, dtype)))
    tolerance = (_OURS_TOLERANCE if first_by == second_by == OURS else _STOCK_TOLERANCE)[dtype]
    by = first_by if first_by == second_by else f"{first_by} and {second_by}"
    return Verification(
        wrong=wrong,
        rounded=rounded,
        logits=logits,
        unexplained=unexplained,
        scale=float(first.abs().max()),
        tolerance=tolerance,
        computed=f"by {by}, {str(dtype).removeprefix('torch.')}, {tokens.numel()} random tokens",
    )


def _compare_weights(source: Weights, target: Weights) -> tuple[dict[str, float], dict[str, float]]:
    """(tensors that are wrong, tensors that rounding changed); padding of the vocabulary is left out."""
    vocab = source.model.vocab_size
    assert vocab is not None
    wrong: dict[str, float] = {}
    rounded: dict[str, float] = {}
    for name in parameter_shapes(source.model):
        ours, theirs = source.read(name), target.read(name)
        if name in ("embedding.word.weight", "head.weight"):
            ours, theirs = ours[:vocab], theirs[:vocab]
        if ours.shape != theirs.shape:
            raise ConversionError(f"{name}: {list(ours.shape)} in {source.path}, {list(theirs.shape)} in {target.path}")
        worst, worst_rounding, same = 0.0, 0.0, True
        for a, b in zip(ours.reshape(-1).split(_CHUNK), theirs.reshape(-1).split(_CHUNK)):
            expected = a.to(b.dtype)
            # What is too large for the type was not rounded to it.
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
    """Largest absolute difference; infinite where only one of two elements is a finite number."""
    difference = (one.double() - other.double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0


def _tokens(source: Weights, target: Weights) -> torch.Tensor:
    """int64 [SEQUENCES, s], drawn from a fixed seed: which they are does not matter to the comparison."""
    assert source.model.vocab_size is not None
    length = min(TOKENS, source.seq_length, target.seq_length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.model.vocab_size, (SEQUENCES, length), generator=generator)


def _logits(weights: Weights, tokens: torch.Tensor, dtype: torch.dtype, use_stock: bool) -> tuple[torch.Tensor, str]:
    """Logits [b, s, vocab_size] and who computed them."""
    found = stock_version()
    scaled = getattr(weights, "dequantised", None) is not None  # transformers needs a GPU for these
    if weights.format == "huggingface" and use_stock and found is not None and not scaled:
        has_experts = weights.model.num_experts is not None
        return stock_logits(weights.path, tokens, dtype, has_experts=has_experts), f"{STOCK} {found}"
    return our_logits(weights, tokens, dtype), OURS


@torch.no_grad()
def our_logits(weights: Weights, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits [b, s, vocab_size] of tokens [b, s] by `GPTStage` on the CPU."""
    stage = build_stage(weights.model, tokens.shape[1], Topology.solo(), dtype)
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        values = weights.read(parameter.info.spec.name)
        parameter[: len(values)].copy_(values[: len(parameter)])  # rows of padding, more or fewer, make no logits
    logits: torch.Tensor = stage.eval()(tokens, stage.context())
    return logits.transpose(0, 1)[..., : weights.model.vocab_size]
