"""How many elements of a parameter a rank holds."""

from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape


def local_size(shape: ParameterShape, config: RunConfig) -> int:
    """Elements of a parameter on one rank."""
    p = config.parallel
    if shape.expert:
        return shape.size // (p.ep * p.expert_tp)
    return shape.size if shape.shard_dim is None else shape.size // p.tp
