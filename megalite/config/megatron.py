"""Megatron-LM's flags that are not the name of a setting here, so that launch scripts port.

Flags that set a setting to a fixed value, or by a word; values that have another name here, or none; flags whose value
follows from other settings; and flags that cannot do anything here and are refused with the reason (never swallowed).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megalite.config.data import DATA_FILES, PATH_SETTINGS
from megalite.config.errors import ConfigError, nearest

SHORTHANDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "--bf16": {"precision": "bf16"},
        "--fp16": {"precision": "fp16"},
        "--fp32": {"precision": "fp32"},
        "--fp64": {"precision": "fp64"},
        "--swiglu": {"activation": "swiglu"},
        "--disable-bias-linear": {"add_bias_linear": False},
        "--untie-embeddings-and-output-weights": {"tie_embeddings": False},
        "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
        "--use-rope-scaling": {"rope_scaling": "llama3"},
        "--use-distributed-optimizer": {"dp_strategy": "distributed-optimizer"},
        "--use-torch-fsdp2": {"dp_strategy": "fully-sharded"},
        "--grad-reduce-in-bf16": {"wire_dtype": "bf16"},
        "--use-tp-pp-dp-mapping": {"rank_order": "tp-cp-ep-pp-dp"},
        "--recompute-activations": {"recompute_granularity": "selective"},
        "--exit-on-missing-checkpoint": {"fresh_if_missing": False},
    }
)
"""Flag without a value -> the settings it stands for."""

WORDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "--data-parallel-sharding-strategy": {
            "no_shard": {"dp_strategy": "all-reduce"},
            "optim": {"dp_strategy": "distributed-optimizer"},
            "optim_grads": {"dp_strategy": "distributed-optimizer", "shard_gradients": True},
            "optim_grads_params": {"dp_strategy": "fully-sharded"},
        }
    }
)
"""Flag with a word -> the word -> the settings it stands for."""

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "recompute_modules": {"moe_act": "mlp_act"},
        "attention_backend": {"fused": "cudnn", "unfused": "math", "local": "math"},
    }
)
"""Setting -> Megatron's word for one of its values on the command line -> ours."""

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "optimizer": {
            "dist_muon": "use --optimizer muon --dp-strategy distributed-optimizer, which deals out states and matrices"
        }
    }
)
"""Setting -> Megatron's word for a value that there is not here -> what to use."""

DERIVED: Mapping[str, bool] = MappingProxyType(
    {
        "--num-layers-per-virtual-pipeline-stage": True,
        "--decoder-first-pipeline-num-layers": True,
        "--decoder-last-pipeline-num-layers": True,
        "--group-query-attention": False,
    }
)
"""Flag that needs other settings before it means anything (see merge.py) -> whether it takes a whole number."""

_OF_DERIVED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--num-layers-per-virtual-pipeline-stage": ("vpp",),
        "--decoder-first-pipeline-num-layers": ("pipeline_layers",),
        "--decoder-last-pipeline-num-layers": ("pipeline_layers",),
        "--group-query-attention": (),
    }
)
STANDS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{flag: tuple(fixed) for flag, fixed in SHORTHANDS.items()},
        **{flag: tuple({name for fixed in words.values() for name in fixed}) for flag, words in WORDS.items()},
        **_OF_DERIVED,
        **dict.fromkeys(DATA_FILES, PATH_SETTINGS),
    }
)
"""Flag that is no setting -> the settings that it gives."""

_FUSED = "the fastest kernel for the device is picked by itself"
_ONE_MODEL = "there is one implementation of the model"
_ALWAYS_FP32 = "gradients are always accumulated in fp32, and reduced in it unless --wire-dtype bf16 is given"
_FSDP = "--data-parallel-sharding-strategy, or --dp-strategy, alone says what is sharded"
_MUON_QKV = "queries, keys and values of a layer are orthogonalised as one matrix"
_BUCKETS = "use --ddp-bucket-size; buckets are padded so that they divide among the ranks"
_ONE_FORMAT = "there is one checkpoint format, which any layout can load"
_ALWAYS_LOGGED = "it is always logged"
_UNSUPPORTED = "this is not supported"

NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "--use-flash-attn": "fused attention is always used (except with attention_dropout above 0)",
        "--use-mcore-models": _ONE_MODEL,
        "--use-legacy-models": _ONE_MODEL,
        "--transformer-impl": _ONE_MODEL,
        "--spec": _ONE_MODEL,
        "--no-gradient-accumulation-fusion": _FUSED,
        "--no-masked-softmax-fusion": _FUSED,
        "--no-bias-gelu-fusion": _FUSED,
        "--no-bias-swiglu-fusion": _FUSED,
        "--no-bias-dropout-fusion": _FUSED,
        "--no-rope-fusion": _FUSED,
        "--no-persist-layer-norm": _FUSED,
        "--use-te-activation-func": _ONE_MODEL,
        "--attention-softmax-in-fp32": "softmax is always computed in fp32 (fp64 in fp64 runs)",
        "--cross-entropy-loss-fusion": _FUSED,
        "--cross-entropy-fusion-impl": _FUSED,
        "--no-async-tensor-model-parallel-allreduce": "the all-reduce always overlaps with the weight gradient",
        "--overlap-p2p-communication": "sends and receives are always asynchronous",
        "--no-overlap-p2p-communication": "sends and receives are always asynchronous",
        "--tp-comm-overlap-cfg": "--tp-comm-overlap has no settings of its own",
        "--distribute-saved-activations": "use --sequence-parallel, which shards what recompute saves",
        "--accumulate-allreduce-grads-in-fp32": _ALWAYS_FP32,
        "--main-grads-dtype": _ALWAYS_FP32,
        "--main-params-dtype": "main parameters are fp32; --main-params split keeps of them what bf16 parameters lack",
        "--use-precision-aware-optimizer": "--main-params, --exp-avg-dtype and --exp-avg-sq-dtype work without it",
        "--optimizer-cpu-offload": f"{_UNSUPPORTED}: use --dp-strategy distributed-optimizer or fully-sharded",
        "--optimizer-offload-fraction": f"{_UNSUPPORTED}: use --dp-strategy distributed-optimizer or fully-sharded",
        "--num-distributed-optimizer-instances": f"{_UNSUPPORTED}: states are sharded over all replicas",
        "--use-megatron-fsdp": _FSDP,
        "--use-custom-fsdp": _FSDP,
        "--overlap-param-gather-with-optimizer-step": "use --overlap-param-gather, which overlaps with the next forward",
        "--align-param-gather": "each pipeline stage gathers on its own, before the layers that need it",
        "--no-align-grad-reduce": "each pipeline stage reduces on its own, as its gradients are ready",
        "--delay-grad-reduce": "use --no-overlap-grad-reduce to reduce after the last backward",
        "--ddp-num-buckets": _BUCKETS,
        "--ddp-pad-buckets-for-high-nccl-busbw": _BUCKETS,
        "--ddp-average-in-collective": "gradients are parts of the global mean already, so that a sum is right",
        "--use-nccl-ub": _UNSUPPORTED,
        "--fp8-param-gather": f"{_UNSUPPORTED}: parameters are gathered in the format of --precision",
        "--init-model-with-meta-device": f"{_UNSUPPORTED}: each rank builds its stages, which are cut then",
        "--muon-scale-mode": "updates of matrices have the root mean square --muon-scale",
        "--muon-extra-scale-factor": "use --muon-scale, which is the root mean square of an update",
        "--muon-split-qkv": _MUON_QKV,
        "--muon-no-split-qkv": _MUON_QKV,
        "--decoupled-lr": f"{_UNSUPPORTED}: all parameters have one learning rate",
        "--decoupled-min-lr": f"{_UNSUPPORTED}: all parameters have one learning rate",
        "--calculate-per-token-loss": "the loss is always the mean over the unmasked tokens of the global batch",
        "--num-workers": "one background thread prepares the next batch",
        "--dataloader-type": "samples are read once an epoch, in the order that --seed and --data-order give",
        "--no-mmap-bin-files": "token files are always memory-mapped",
        "--data-impl": "token files are always memory-mapped .bin/.idx pairs",
        "--no-create-attention-mask-in-dataloader": "no attention mask is ever made",
        "--num-dataset-builder-threads": "one thread makes the index of an epoch; the order of samples is computed",
        "--vocab-extra-ids": _UNSUPPORTED,
        "--use-cpu-initialization": "initial weights never depend on device or layout",
        "--data-parallel-random-init": "initial weights never depend on the layout",
        "--no-initialization": "each rank draws its own shards alone; --load then replaces them",
        "--no-position-embedding": "say --position-embedding-type rope or none instead",
        "--exit-signal-handler": "SIGTERM and SIGUSR1 always lead to a checkpoint: see --exit-signals",
        "--check-for-spiky-loss": "spikes of the loss are always reported: see --loss-spike-threshold",
        "--use-checkpoint-args": "the shape of the model is checked against the checkpoint; use --config with the "
        "config.yaml in it instead",
        "--override-opt-param-scheduler": "the schedule is always the one of the present settings",
        "--use-checkpoint-opt-param-scheduler": "the schedule is always the one of the present settings",
        "--ckpt-format": _ONE_FORMAT,
        "--use-dist-ckpt": _ONE_FORMAT,
        "--dist-ckpt-format": _ONE_FORMAT,
        "--dist-ckpt-optim-fully-reshardable": _ONE_FORMAT,
        "--ckpt-fully-parallel-save": _ONE_FORMAT,
        "--ckpt-fully-parallel-load": _ONE_FORMAT,
        "--ckpt-assume-constant-structure": _ONE_FORMAT,
        "--dist-ckpt-strictness": _ONE_FORMAT,
        "--auto-detect-ckpt-format": _ONE_FORMAT,
        "--no-load-optim": "use --finetune to load the weights alone",
        "--no-load-rng": "use --finetune to load the weights alone",
        "--no-save-optim": "a checkpoint always holds everything that a resumed run needs",
        "--no-save-rng": "a checkpoint always holds everything that a resumed run needs",
        "--async-strategy": "--async-save writes from a thread of each rank",
        "--use-persistent-ckpt-worker": "--async-save writes from a thread of each rank",
        "--save-retain-interval": "use --keep-latest 1 --keep-every N",
        "--verify-integrity": "every checkpoint has a sha256 of each file, and is verified when it is loaded",
        "--log-throughput": _ALWAYS_LOGGED,
        "--log-memory-to-tensorboard": _ALWAYS_LOGGED,
        "--log-world-size-to-tensorboard": _ALWAYS_LOGGED,
        "--log-batch-size-to-tensorboard": _ALWAYS_LOGGED,
        "--log-learning-rate-to-tensorboard": _ALWAYS_LOGGED,
        "--log-loss-scale-to-tensorboard": _ALWAYS_LOGGED,
        "--log-validation-ppl-to-tensorboard": _ALWAYS_LOGGED,
        "--tensorboard-log-interval": "TensorBoard follows --log-interval",
        "--local-rank": "ranks come from torchrun's environment",
        "--lazy-mpu-init": "ranks come from torchrun's environment",
        "--DDP-impl": "use --dp-strategy",
        "--disable-gloo-process-groups": "there are none but those that a CPU run or a background save needs",
        "--manual-gc": _UNSUPPORTED,
        "--manual-gc-interval": _UNSUPPORTED,
        "--deterministic-mode": f"{_UNSUPPORTED}: a CPU gives the same bits in every run, some kernels of CUDA do not",
        "--empty-unused-memory-level": _UNSUPPORTED,
        "--rotary-percent": "the whole head is rotated",
        "--rope-type": "use --position-embedding-type rope",
        "--squared-relu": f"{_UNSUPPORTED}: --activation is gelu, gelu_tanh, swiglu, geglu or geglu_tanh",
        "--window-size": "use --sliding-window, which counts the query's own key too: one more than the left size here",
        "--window-attn-skip-freq": f"{_UNSUPPORTED}: --sliding-window is for all layers alike",
        "--rotary-interleaved": "the two halves of a head are rotated against each other, as in Llama",
        "--rotary-seq-len-interpolation-factor": "use --rope-scaling linear with --rope-scaling-factor",
        "--hierarchical-context-parallel-sizes": "use --cp-comm-type p2p or a2a",
        "--mtp-num-layers": _UNSUPPORTED,
        "--multi-latent-attention": _UNSUPPORTED,
        "--moe-router-load-balancing-type": "the load-balancing loss is taken over each sequence, with the weight "
        "--moe-aux-loss-coeff",
        "--moe-router-score-function": f"{_UNSUPPORTED}: scores are a softmax",
        "--moe-router-dtype": "routing is always computed in fp32 (fp64 in fp64 runs)",
        "--moe-router-num-groups": _UNSUPPORTED,
        "--moe-router-group-topk": _UNSUPPORTED,
        "--moe-router-enable-expert-bias": _UNSUPPORTED,
        "--moe-router-bias-update-rate": _UNSUPPORTED,
        "--moe-input-jitter-eps": _UNSUPPORTED,
        "--moe-router-fusion": _FUSED,
        "--moe-grouped-gemm": _FUSED,
        "--moe-use-legacy-grouped-gemm": _FUSED,
        "--moe-permute-fusion": _FUSED,
        "--moe-token-dispatcher-type": "tokens are always exchanged by an all-to-all over --ep",
        "--moe-enable-deepep": "tokens are always exchanged by an all-to-all over --ep",
        "--moe-shared-expert-overlap": "tokens are not exchanged while the shared expert runs",
        "--moe-shared-expert-gate": _UNSUPPORTED,
        "--moe-pad-expert-input-to-capacity": "experts compute the tokens that they have, without padding",
        "--moe-layer-recompute": "use --recompute-granularity selective --recompute-modules moe",
        "--moe-per-layer-logging": _UNSUPPORTED,
        "--moe-extended-tp": "use --etp",
        "--moe-use-upcycling": _UNSUPPORTED,
        "--account-for-embedding-in-pipeline-split": "the cut of layers always weighs embedding and head",
        "--account-for-loss-in-pipeline-split": "the cut of layers always weighs embedding and head",
        "--step-batch-size-schedule": "use --rampup-batch-size START INCREMENT SAMPLES",
        "--decrease-batch-size-if-needed": _UNSUPPORTED,
        "--wandb-save-dir": "its files go to <run_dir>/wandb",
        "--log-timers-to-tensorboard": _ALWAYS_LOGGED,
        "--timing-log-option": "least and most over ranks are logged; TensorBoard has the most",
        "--log-straggler": "--timing-log-level 1, the default, names stragglers",
        "--use-pytorch-profiler": "--profile uses it without",
        "--memory-snapshot-path": "it is written to <run_dir>/out-of-memory-rank-N.pickle",
        "--fake-process-group": "use --dry-run, which needs no devices",
        "--sft": _UNSUPPORTED,
    }
)
"""Flag of Megatron-LM that would change nothing here -> why."""


def settings_of_word(flag: str, word: str, where: str) -> Mapping[str, Any]:
    """What a word stands for after a flag of `WORDS`.

    Raises:
        ConfigError: there is no such word; the message starts with `where`.
    """
    words = WORDS[flag]
    if word not in words:
        raise ConfigError(f"{where} cannot be {word}{nearest(word, words)} (one of {', '.join(words)})")
    return words[word]
