"""Megatron-LM's flags that are not the name of a setting here, so that launch scripts port.

Flags that set a setting to a fixed value, or by a word; values that have another name here, or none; flags with a value
that follows from other settings; and flags that cannot do anything here and are refused with the reason (never swallowed).
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

STANDS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{flag: tuple(fixed) for flag, fixed in SHORTHANDS.items()},
        **{flag: tuple({name for fixed in words.values() for name in fixed}) for flag, words in WORDS.items()},
        "--num-layers-per-virtual-pipeline-stage": ("vpp",),
        "--decoder-first-pipeline-num-layers": ("pipeline_layers",),
        "--decoder-last-pipeline-num-layers": ("pipeline_layers",),
        "--group-query-attention": (),
        **dict.fromkeys(DATA_FILES, PATH_SETTINGS),
    }
)
"""Flag that is no setting -> the settings that it gives."""

_REASONS: Mapping[str, str] = {
    "fused attention is always used (except with attention_dropout above 0)": "--use-flash-attn",
    "there is one implementation of the model": (
        "--use-mcore-models --use-legacy-models --transformer-impl --spec --use-te-activation-func"
    ),
    "the fastest kernel for the device is picked by itself": (
        "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
        "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --moe-router-fusion --moe-grouped-gemm "
        "--moe-use-legacy-grouped-gemm --moe-permute-fusion"
    ),
    "softmax is always computed in fp32 (fp64 in fp64 runs)": "--attention-softmax-in-fp32",
    "the all-reduce always overlaps with the weight gradient": "--no-async-tensor-model-parallel-allreduce",
    "sends and receives are always asynchronous": "--overlap-p2p-communication --no-overlap-p2p-communication",
    "--tp-comm-overlap has no settings": "--tp-comm-overlap-cfg",
    "use --sequence-parallel, which shards what recompute saves": "--distribute-saved-activations",
    "gradients are always accumulated in fp32, and reduced in it unless --wire-dtype bf16 is given": (
        "--accumulate-allreduce-grads-in-fp32 --main-grads-dtype"
    ),
    "main parameters are fp32; --main-params split keeps of them what bf16 parameters lack": "--main-params-dtype",
    "--main-params, --exp-avg-dtype and --exp-avg-sq-dtype work without it": "--use-precision-aware-optimizer",
    "this is not supported: use --dp-strategy distributed-optimizer or fully-sharded": (
        "--optimizer-cpu-offload --optimizer-offload-fraction"
    ),
    "this is not supported: states are sharded over all replicas": "--num-distributed-optimizer-instances",
    "--data-parallel-sharding-strategy, or --dp-strategy, alone says what is sharded": (
        "--use-megatron-fsdp --use-custom-fsdp"
    ),
    "use --overlap-param-gather, which overlaps with the next forward": "--overlap-param-gather-with-optimizer-step",
    "each pipeline stage gathers on its own, before the layers that need it": "--align-param-gather",
    "each pipeline stage reduces on its own, as its gradients are ready": "--no-align-grad-reduce",
    "use --no-overlap-grad-reduce to reduce after the last backward": "--delay-grad-reduce",
    "use --ddp-bucket-size; buckets are padded so that they divide among the ranks": (
        "--ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw"
    ),
    "gradients are parts of the global mean already, so that a sum is right": "--ddp-average-in-collective",
    "this is not supported": (
        "--use-nccl-ub --vocab-extra-ids --manual-gc --manual-gc-interval --empty-unused-memory-level "
        "--mtp-num-layers --multi-latent-attention --moe-router-num-groups --moe-router-group-topk "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-input-jitter-eps "
        "--moe-shared-expert-gate --moe-per-layer-logging --moe-use-upcycling --decrease-batch-size-if-needed "
        "--sft"
    ),
    "this is not supported: parameters are gathered in the format of --precision": "--fp8-param-gather",
    "this is not supported: each rank builds its stages, which are cut then": "--init-model-with-meta-device",
    "updates of matrices have the root mean square --muon-scale": "--muon-scale-mode",
    "use --muon-scale, which is the root mean square of an update": "--muon-extra-scale-factor",
    "queries, keys and values of a layer are orthogonalised as one matrix": "--muon-split-qkv --muon-no-split-qkv",
    "this is not supported: all parameters have one learning rate": "--decoupled-lr --decoupled-min-lr",
    "the loss is always the mean over the unmasked tokens of the global batch": "--calculate-per-token-loss",
    "one background thread prepares the next batch": "--num-workers",
    "samples are read once an epoch, in the order that --seed and --data-order give": "--dataloader-type",
    "token files are always memory-mapped": "--no-mmap-bin-files",
    "token files are always memory-mapped .bin/.idx pairs": "--data-impl",
    "no attention mask is ever made": "--no-create-attention-mask-in-dataloader",
    "one thread makes the index of an epoch; the order of samples is computed": "--num-dataset-builder-threads",
    "initial weights never depend on device or layout": "--use-cpu-initialization",
    "initial weights never depend on the layout": "--data-parallel-random-init",
    "each rank draws its own shards alone; --load then replaces them": "--no-initialization",
    "say --position-embedding-type rope or none instead": "--no-position-embedding",
    "SIGTERM and SIGUSR1 always lead to a checkpoint: see --exit-signals": "--exit-signal-handler",
    "spikes of the loss are always reported: see --loss-spike-threshold": "--check-for-spiky-loss",
    "the shape of the model is checked against the checkpoint; use --config with the config.yaml in it instead": "--use-checkpoint-args",
    "the schedule is always the one of the present settings": (
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler"
    ),
    "there is one checkpoint format, which any layout can load": (
        "--ckpt-format --use-dist-ckpt --dist-ckpt-format --dist-ckpt-optim-fully-reshardable "
        "--ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure "
        "--dist-ckpt-strictness --auto-detect-ckpt-format"
    ),
    "use --finetune to load the weights alone": "--no-load-optim --no-load-rng",
    "a checkpoint always holds everything that a resumed run needs": "--no-save-optim --no-save-rng",
    "--async-save writes from a thread of each rank": "--async-strategy --use-persistent-ckpt-worker",
    "use --keep-latest 1 --keep-every N": "--save-retain-interval",
    "every checkpoint has a sha256 of each file, and is verified when it is loaded": "--verify-integrity",
    "it is always logged": (
        "--log-throughput --log-memory-to-tensorboard --log-world-size-to-tensorboard "
        "--log-batch-size-to-tensorboard --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-timers-to-tensorboard"
    ),
    "TensorBoard follows --log-interval": "--tensorboard-log-interval",
    "ranks come from torchrun's environment": "--local-rank --lazy-mpu-init",
    "use --dp-strategy": "--DDP-impl",
    "there are none but those that a CPU run or a background save needs": "--disable-gloo-process-groups",
    "the whole head is rotated": "--rotary-percent",
    "use --position-embedding-type rope": "--rope-type",
    "this is not supported: --activation is gelu, gelu_tanh, swiglu, geglu or geglu_tanh": "--squared-relu",
    "use --sliding-window, which counts the query's own key too: one more than the left size here": "--window-size",
    "this is not supported: --sliding-window is for all layers alike": "--window-attn-skip-freq",
    "the two halves of a head are rotated against each other, as in Llama": "--rotary-interleaved",
    "use --rope-scaling linear with --rope-scaling-factor": "--rotary-seq-len-interpolation-factor",
    "use --cp-comm-type p2p or a2a": "--hierarchical-context-parallel-sizes",
    "the load-balancing loss is taken over each sequence, with the weight --moe-aux-loss-coeff": "--moe-router-load-balancing-type",
    "this is not supported: scores are a softmax": "--moe-router-score-function",
    "routing is always computed in fp32 (fp64 in fp64 runs)": "--moe-router-dtype",
    "tokens are always exchanged by an all-to-all over --ep": "--moe-token-dispatcher-type --moe-enable-deepep",
    "tokens are not exchanged while the shared expert runs": "--moe-shared-expert-overlap",
    "experts compute the tokens that they have, without padding": "--moe-pad-expert-input-to-capacity",
    "use --recompute-granularity selective --recompute-modules moe": "--moe-layer-recompute",
    "use --etp": "--moe-extended-tp",
    "the cut of layers always weighs embedding and head": (
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    ),
    "use --rampup-batch-size START INCREMENT SAMPLES": "--step-batch-size-schedule",
    "its files go to <run_dir>/wandb": "--wandb-save-dir",
    "least and most over ranks are logged; TensorBoard has the most": "--timing-log-option",
    "--timing-log-level 1, the default, names stragglers": "--log-straggler",
    "--profile uses it without": "--use-pytorch-profiler",
    "it is written to <run_dir>/out-of-memory-rank-N.pickle": "--memory-snapshot-path",
    "use --dry-run, which needs no devices": "--fake-process-group",
}
NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {flag: why for why, flags in _REASONS.items() for flag in flags.split()}
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
