"""What data-parallel ranks exchange, how often and in which form; `dp_strategy` (config/parallel.py) chooses the scheme."""

from dataclasses import dataclass

from megalite.config.option import option

COMPRESSIONS = ("none", "onebit", "uint8", "topk", "powersgd")
GOSSIP_GRAPHS = ("ring", "one-peer")
GOSSIP_ALGORITHMS = ("d-psgd", "decentlam")


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Settings of the data-parallel strategies; each has an effect with some of them only."""

    wire_dtype: str = option("fp32", choices=("fp32", "bf16"))
    """Number format in which gradients and exchanged weights travel; sums are made in fp32 or wider either way. fp32 is
    fp64 in a run of that precision. Parameters that ZeRO and servers hand out travel in the run's precision."""
    reduction_order: str = option("backend", choices=("backend", "rank"))
    """Order in which gradients of ranks are added: the backend's own, or by rank. Then all-reduce, fused-all-reduce,
    distributed-optimizer and the synchronous servers (which always add by rank) give the same bits."""
    shard_gradients: bool = option(False)
    """distributed-optimizer: keep only the owned part of the gradients between microbatches, as ZeRO-2 does."""
    fusion_threshold_mb: float = option(64.0)
    """fused-all-reduce: gradients that are ready are reduced together once they are this many MB."""
    server_chunk_mb: float = option(4.0)
    """parameter-server, sharded-parameter-server, async-parameter-server: MB in one message to or from a server."""
    max_staleness: int = option(1)
    """async-parameter-server: steps that a worker may be ahead of the slowest one; 0 makes it synchronous."""
    staleness_aware_lr: bool = option(True)
    """async-parameter-server: divide the learning rate of an update by 1 + the updates that its weights are behind, where
    that is more than dp, by which it is divided otherwise."""
    sync_interval: int = option(20)
    """local-sgd, diloco: steps between two exchanges of weights."""
    sync_warmup_steps: int = option(0)
    """local-sgd, diloco, gossip: first steps in which gradients are all-reduced instead."""
    average_optimizer_state: bool = option(False)
    """local-sgd: average the optimizer's state with the weights."""
    outer_lr: float = option(0.7)
    """diloco: learning rate of the outer Nesterov step on the averaged change of the weights."""
    outer_momentum: float = option(0.9)
    """diloco: momentum of the outer step."""
    sync_fragments: int = option(1)
    """diloco: fragments of the network, each exchanged at a time of its own (streaming DiLoCo)."""
    sync_delay: int = option(0)
    """diloco: steps during which an exchange may be under way before its result is used."""
    sync_mix: float = option(0.0)
    """diloco: share of a rank's own weights that stays when a fragment's result is taken up; 0 takes the result."""
    gossip_graph: str = option("ring", choices=GOSSIP_GRAPHS)
    """gossip: average with both neighbours of a ring, or with one peer that changes from step to step."""
    gossip_algorithm: str = option("d-psgd", choices=GOSSIP_ALGORITHMS)
    """gossip: average weights before the optimizer's update, or correct momentum for what averaging does (DecentLaM)."""
    grad_compression: str = option("none", choices=COMPRESSIONS)
    """all-reduce: lossy gradients with error feedback: signs, 8-bit integers, the largest elements, or low rank."""
    compression_warmup_steps: int = option(0)
    """First steps with whole gradients."""
    topk_density: float = option(0.01)
    """topk: share of the elements that is sent."""
    powersgd_rank: int = option(4)
    """powersgd: rank of the matrices that stand for a gradient."""
    check_replicas_interval: int | None = option(
        None, flags=("--check-weight-hash-across-dp-replicas-interval",)
    )
    """Steps between comparisons of the weights of data-parallel ranks, which must be equal to the bit; default: none."""
