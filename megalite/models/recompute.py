"""Which activations the backward computes again instead of keeping them (arXiv 2205.05198)."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The plan of a run, the same for every stage.

    Args:
        granularity: none, selective (`modules`) or full (whole layers).
        modules: what selective recompute runs again.
        method: of full recompute: `uniform` makes units of `num_layers` layers, of which only the input is kept;
            `block` recomputes the first `num_layers` layers of each stage one by one and keeps the others' activations.
    """

    MODULES: ClassVar[tuple[str, ...]] = ("core_attn", "mlp_act", "layernorm", "mlp", "moe")

    granularity: str = "none"
    modules: frozenset[str] = frozenset({"core_attn"})
    method: str = "uniform"
    num_layers: int = 1

    def selects(self, module: str) -> bool:
        """Selective recompute runs this kind of module again."""
        return self.granularity == "selective" and module in self.modules
