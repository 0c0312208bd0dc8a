"""Is what was read what was saved?"""

import torch

from megalite.conversion.weights import Weights, parameter_shapes

VOCABULARY = ("embedding.word.weight", "head.weight")


def assert_same(found: Weights, made: Weights) -> None:
    """Every tensor is bit-equal, rows of padding aside: those must be zeros."""
    assert parameter_shapes(found.model).keys() == parameter_shapes(made.model).keys()
    assert found.model.vocab_size == made.model.vocab_size
    for name, shape in parameter_shapes(found.model).items():
        ours, theirs = made.read(name), found.read(name)
        assert tuple(theirs.shape) == shape.shape, name
        assert theirs.dtype == found.dtype(name) == ours.dtype, name
        size = made.model.vocab_size if name in VOCABULARY else None
        assert torch.equal(ours[:size], theirs[:size]), name
        assert size is None or not theirs[size:].any(), name
