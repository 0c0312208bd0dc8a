"""Compare two trajectories number by number."""

from megalite.parity.report import compare
from megalite.parity.trajectory import Trajectory


class NumbersDifferError(AssertionError):
    """A layout changed a number by more than the tolerance."""


def require_same(ours: Trajectory, reference: Trajectory, tolerance: float) -> None:
    """Raise NumbersDifferError naming the first number that differs by more than `tolerance`; it is the one closest to
    the fault."""
    for line in compare(ours, reference):
        if not line.difference <= tolerance:
            where = f" of {line.tensor}" if line.tensor else ""
            when = f" in step {line.step}" if line.step else ""
            raise NumbersDifferError(
                f"{line.what}{where}{when}: {line.layout:.12g}, on one rank {line.one_rank:.12g}, relative difference "
                f"{line.difference:.2e}"
            )
