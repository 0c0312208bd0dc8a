"""How ranks are split: the sizes of the parallel axes and what runs over each."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the axes. world = tp·cp·dp·pp; experts (ep) are carved out of the dp·cp grid of a pipeline stage."""

    tp: int = option(1, flags=("--tensor-model-parallel-size",), basic=True)
    """Tensor-parallel size: each layer's matrices are split over this many ranks."""
    pp: int = option(1, flags=("--pipeline-model-parallel-size",), basic=True)
    """Pipeline-parallel size: layers are split over this many ranks."""
    vpp: int = option(1, flags=("--num-virtual-stages-per-pipeline-rank",), basic=True)
    """Virtual stages (model chunks) on each pipeline rank; above 1 the schedule is interleaved."""
    dp: int | None = option(None, flags=("--data-parallel-size",))
    """Data-parallel size; default world / (tp·pp·cp). Given, it must agree with the world size."""
    cp: int = option(1, flags=("--context-parallel-size",))
    """Context-parallel size: the sequence is split over this many ranks."""
    cp_comm_type: str = option("p2p", choices=("p2p", "a2a"))
    """How attention sees the whole sequence: keys and values go round a ring (p2p), or heads are exchanged (a2a)."""
    ep: int = option(1, flags=("--expert-model-parallel-size",))
    """Expert-parallel size."""
    etp: int | None = option(None, flags=("--expert-tensor-parallel-size",))
    """Tensor-parallel size inside experts; default tp."""
    rank_order: str = option("tp-cp-ep-dp-pp", choices=("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))
    """Which axis varies fastest over ranks, leftmost first."""
    sequence_parallel: bool = option(False, basic=True)
    """Split norms, dropout and residual stream over the sequence; inside the tp group, so tp must be above 1."""
    pipeline_schedule: str = option("auto", choices=("auto", "gpipe", "1f1b", "interleaved"), basic=True)
    """Order of forwards and backwards; auto: interleaved if vpp > 1, else 1f1b."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None, flags=("--microbatch-group-size",)
    )
    """Microbatches that run through one chunk before the next (interleaved only); default pp."""
    pipeline_layers: list[int] | None = option(None)
    """Layers on each virtual stage, in order, e.g. 3,1; default: cut so that the slowest stage is fastest."""
    dp_strategy: str = option("all-reduce", choices=("all-reduce", "distributed-optimizer"), basic=True)
    """Gradients of data-parallel ranks: all-reduce them, or shard optimizer state as ZeRO-1 does."""
    ddp_bucket_size: int = option(40_000_000)
    """Parameters in one gradient bucket."""
    overlap_grad_reduce: bool = option(True)
    """Reduce gradient buckets while the last microbatch's backward still runs."""
    overlap_param_gather: bool = option(True)
    """Gather updated parameters while the next forward runs (distributed-optimizer)."""
    distributed_backend: str = option("auto", choices=("auto", "nccl", "gloo"))
    """auto: nccl on cuda, gloo on cpu."""
    distributed_timeout_minutes: float = option(10.0)
    """A collective that waits longer fails."""

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size inside experts."""
        return self.etp or self.tp
