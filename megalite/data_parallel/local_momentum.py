"""Data parallelism for 0/1 Adam, whose replicas go apart between exchanges."""

from megalite.data_parallel.momentum_exchange import MomentumExchange
from megalite.data_parallel.own_weights import OwnWeights


class LocalMomentumExchange(OwnWeights, MomentumExchange):
    """`MomentumExchange` for an optimizer that steps without an exchange too. Replicas then have weights and states of
    their own.

    Wire: as `MomentumExchange` in steps with an exchange; nothing in the others.
    """
