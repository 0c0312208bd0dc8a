"""How ranks are split: the sizes of the parallel axes and what runs over each."""

from dataclasses import dataclass

from megalite.config.option import option

PIPELINE_SCHEDULES = (
    *("1f1b", "interleaved", "gpipe", "looped-bfs"),
    *("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "auto"),
)
V_SCHEDULES = ("zb-v", "dualpipe-v")
"""Two virtual stages a rank, down and up again."""
DP_STRATEGIES = (
    *("all-reduce", "fused-all-reduce", "distributed-optimizer", "fully-sharded"),
    *("parameter-server", "sharded-parameter-server", "async-parameter-server"),
    *("local-sgd", "diloco", "gossip"),
)
LOCAL_STRATEGIES = ("local-sgd", "diloco", "gossip")
"""Each data-parallel rank has weights of its own, at least for some steps."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the axes. world = tp·cp·dp·pp; experts (ep) are carved out of the dp·cp grid of a pipeline stage."""

    tp: int = option(1, flags=("--tensor-model-parallel-size",), basic=True)
    """Tensor-parallel size: each layer's matrices are split over this many ranks."""
    pp: int = option(1, flags=("--pipeline-model-parallel-size",), basic=True)
    """Pipeline-parallel size: layers are split over this many ranks."""
    vpp: int = option(1, flags=("--num-virtual-stages-per-pipeline-rank",), basic=True)
    """Virtual stages (model chunks) on each pipeline rank; above 1 the default schedule is interleaved. Not given, it is
    what pipeline_layout or a V schedule needs."""
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
    pipeline_schedule: str | None = option(None, choices=PIPELINE_SCHEDULES, basic=True)
    """Pipeline order; default: interleaved if vpp > 1, else 1f1b. docs/schedules.md explains each; auto builds one for
    the costs of this model's stages."""
    pipeline_schedule_file: str | None = option(None)
    """Schedule of your own instead: a CSV file with one line a pipeline rank, as megalite schedule --write-csv writes."""
    pipeline_warmup: str = option("pa", choices=("pa", "pb"))
    """1f1b: forwards before the first backward, p-r on rank r (pa), or 2(p-r)-1 to hide messages (pb)."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None, flags=("--microbatch-group-size",)
    )
    """Microbatches that run through one chunk before the next (interleaved only); default: the least that fits, pp or
    more."""
    pipeline_layers: list[int] | None = option(None)
    """Layers on each virtual stage, in order, e.g. 3,1; default: cut so that the slowest stage is fastest."""
    pipeline_layout: str | None = option(None, flags=("--pipeline-model-parallel-layout",))
    """The same in words: E embedding, t layer, L head, | next stage, *n repeats, e.g. "Et*3|t*4|t*4|t*2L"."""
    pipeline_costs: str | None = option(None)
    """auto: JSON file with the times of each stage, as megalite schedule --costs reads; default: their FLOPs."""
    pipeline_memory_limit: str | None = option(None)
    """What activations may take on a rank, e.g. 12GiB: a schedule that needs more is refused, auto keeps within."""
    pipeline_recv_prefetch: int = option(1)
    """Actions between the posting of a receive and its reader: more hides more latency and holds more buffers."""
    pipeline_send_window: int = option(1)
    """Sends that may be pending to one neighbour; each keeps an output alive."""
    pipeline_check_memory: bool = option(False)
    """Assert after each action that what is alive is what the proof of the schedule said."""
    dp_strategy: str = option("all-reduce", choices=DP_STRATEGIES, basic=True)
    """What data-parallel ranks exchange; docs/data_parallel.md explains each. distributed-optimizer is ZeRO-1 (or 2),
    fully-sharded ZeRO-3."""
    ddp_bucket_size: int = option(40_000_000)
    """Parameters in one gradient bucket; fused-all-reduce and sharded-parameter-server cut by sizes of their own."""
    overlap_grad_reduce: bool = option(True)
    """Reduce gradient buckets while the last microbatch's backward still runs."""
    overlap_param_gather: bool = option(True)
    """distributed-optimizer, fully-sharded, parameter-server, sharded-parameter-server: gather updated parameters while the
    next forward runs."""
    distributed_backend: str = option("auto", choices=("auto", "nccl", "gloo"))
    """auto: nccl on cuda, gloo on cpu."""
    distributed_timeout_minutes: float = option(10.0)
    """A collective that waits longer fails."""
    hang_timeout_minutes: float | None = option(None)
    """If no rank progresses for so long, a process beside the run names the rank that stands still, writes all stacks to
    run_dir, and ends the run with status 44; 0: never. Default: 0.8 of distributed_timeout_minutes."""
    elastic: bool = option(False)
    """Take as many ranks as there are at each start: where the layout of the settings does not fit them, the planner gives
    another one. Settings of the layout given as flags stay; those in files are where it begins. docs/multi_node.md."""
    elastic_cluster: str | None = option(None)
    """elastic: machines for the planner, a name or a YAML file as megalite plan --cluster takes; default: by the device."""

    @property
    def schedule_name(self) -> str:
        """The schedule with its default filled in; `file` if it comes from one."""
        if self.pipeline_schedule_file is not None:
            return "file"
        return self.pipeline_schedule or ("interleaved" if self.vpp > 1 else "1f1b")

    @property
    def hang_timeout(self) -> float:
        """Minutes, with the default filled in: less than after which collectives fail, for those can name nobody."""
        given = self.hang_timeout_minutes
        return 0.8 * self.distributed_timeout_minutes if given is None else given

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size inside experts."""
        return self.etp or self.tp
