"""Two trajectories side by side: every number that a layout must not change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megalite.parity.trajectory import Trajectory

NEGLIGIBLE = {"gradient": 1e-5, "weight": 1e-3}
"""A tensor with all elements below this share of the largest element of any is measured by that share: what
is zero but for rounding (the gradient of a bias that softmax cancels, and what Adam makes of it) has no digits to agree
in."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison."""

    what: str
    """`loss`, `gradient norm`, `load balancing loss`, ..., `gradient`, `weight` or `evaluation loss`."""
    step: int | None
    """From 1; None after the last step."""
    one_rank: float
    """The number, or of tensors the size of the worst of them (see `worst_tensor`)."""
    layout: float
    difference: float
    """Relative."""
    tensor: str | None = None
    """Name of the worst tensor."""


class NumbersDifferError(AssertionError):
    """A layout changed a number by more than the tolerance."""


def relative_difference(ours: float, reference: float) -> float:
    """|ours - reference| / |reference|; infinite where one of them is finite, 0 where neither is."""
    finite = math.isfinite(ours), math.isfinite(reference)
    if not all(finite):
        return math.inf if any(finite) else 0.0
    return abs(ours - reference) / max(abs(reference), 1e-30)


def _size(tensor: np.ndarray, by_elements: bool) -> float:
    return float(np.abs(tensor).max() if by_elements else np.sqrt(np.mean(np.square(tensor, dtype=np.float64))))


def worst_tensor(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], *, negligible: float, by_elements: bool = True
) -> tuple[float, str, float, float]:
    """(difference, name, size in the reference, in ours) of the tensor that differs most.

    The difference is the size of (ours - reference) over that of its tensor in the reference, or over `negligible`
    times the largest of all tensors if that is more. A tensor's size is its largest magnitude, or, unless
    `by_elements`, its root mean square: where both runs round, single elements say little.
    """
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    sizes = {name: _size(tensor, by_elements) for name, tensor in reference.items()}
    least = max(negligible * max(sizes.values()), 1e-30)

    def difference(name: str) -> float:
        worst = _size(ours[name] - reference[name], by_elements)
        return worst / max(sizes[name], least) if math.isfinite(worst) else math.inf

    found = {name: difference(name) for name in reference}
    name = max(found, key=lambda name: found[name])
    return found[name], name, sizes[name], _size(ours[name], by_elements)


def compare(ours: Trajectory, reference: Trajectory, *, by_elements: bool = True) -> list[Line]:
    """Losses, norms and every gradient of every step, then weights and evaluation.

    Where neither run's loss or norm is finite (fp16 that overflows, and skips the step) there are no gradients to compare.
    """
    assert len(ours.steps) == len(reference.steps)
    lines = []

    def number(what: str, step: int | None, mine: float, theirs: float) -> None:
        difference = relative_difference(mine, theirs)
        lines.append(Line(what=what, step=step, one_rank=theirs, layout=mine, difference=difference))

    def tensors(what: str, step: int | None, mine: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
        difference, name, size, own_size = worst_tensor(
            mine, theirs, negligible=NEGLIGIBLE[what], by_elements=by_elements
        )
        lines.append(Line(what=what, step=step, one_rank=size, layout=own_size, difference=difference, tensor=name))

    for index, (mine, theirs) in enumerate(zip(ours.steps, reference.steps, strict=True)):
        step = index + 1
        number("loss", step, mine.loss, theirs.loss)
        assert mine.auxiliary.keys() == theirs.auxiliary.keys()
        for name, value in theirs.auxiliary.items():
            number(name.replace("_", " "), step, mine.auxiliary[name], value)
        number("gradient norm", step, mine.grad_norm, theirs.grad_norm)
        if mine.is_finite or theirs.is_finite:
            tensors("gradient", step, ours.gradients[index], reference.gradients[index])
    tensors("weight", None, ours.weights, reference.weights)
    number("evaluation loss", None, ours.evaluation, reference.evaluation)
    return lines


def require_same(ours: Trajectory, reference: Trajectory, tolerance: float) -> None:
    """Check every line.

    Raises:
        NumbersDifferError: naming the first number that differs by more than `tolerance`: what it comes from is nearest
            to the fault.
    """
    for line in compare(ours, reference):
        if not line.difference <= tolerance:
            where = f" of {line.tensor}" if line.tensor else ""
            when = f" in step {line.step}" if line.step else ""
            raise NumbersDifferError(
                f"{line.what}{where}{when}: {line.layout:.12g}, on one rank {line.one_rank:.12g}, relative difference "
                f"{line.difference:.2e}"
            )
