"""Rules about the network and its computation: shapes, kernels, recompute.

Whether a kernel works on the device is checked when it is built."""

from megalite.config.compute import kernel_requests, unknown_kernels
from megalite.config.describe import settings
from megalite.config.errors import Findings, nearest
from megalite.config.model import BLOCKS, LATENT_SIZES, LAYER_LISTS, LINEAR_SIZES
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.rules.rule import Check, Plain, Settings, divisors, owned, rules, without
from megalite.config.run import attention_in_tiles, stage_layers

MODULES = ("core_attn", "mla_up_proj", "mlp_act", "layernorm", "mlp", "shared_experts", "moe")
"""Modules that selective recompute supports."""
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "mlp_act")
"""Modules that can offload their activations separately."""


def _head_size(c: Settings) -> Findings:
    heads = c.num_attention_heads
    if c.kv_channels is None and c.hidden_size % heads and not c.multi_latent_attention:
        size, _ = divmod(c.hidden_size, heads)
        yield (
            f"{{hidden_size}} is not divisible by {{num_attention_heads}}; use hidden_size {(size + 1) * heads}, or set the "
            f"head size with --kv-channels {max(1, size)}"
        )


def _groups(c: Settings) -> Findings:
    if c.num_attention_heads % c.query_groups:
        works = divisors(c.num_attention_heads)
        yield f"{{num_attention_heads}} is not divisible by {{num_query_groups}}; use num_query_groups {works}"


def _layer_lists(c: Settings) -> Findings:
    """Check for one number from 1 on, or a 0 or 1 for each layer."""
    for name in LAYER_LISTS:
        given = getattr(c, name)
        if given is None or (len(given) == 1 and given[0]):
            continue
        if len(given) != c.num_layers or max(given) > 1:
            flag = f"--{name.replace('_', '-')}"
            yield f"{{{name}}} is neither one number nor a 0 or 1 for each of {{num_layers}}; use e.g. {flag} 2"


def _has_no_mlp(c: Settings) -> bool:
    return (any(map(c.has_dense_mlp, range(c.num_layers))) or c.moe_ffn_hidden_size is None) and c.ffn_size < 1


NETWORK: tuple[Check, ...] = (
    _head_size,
    _groups,
    _layer_lists,
    *without(
        {
            "!mup_base_hidden_size|mup_base_head_dim": "--use-mup",
            "!window_attn_skip_freq|rotary_base_local": "--sliding-window 4096",
            f"!{'|'.join(LATENT_SIZES)}": "--multi-latent-attention",
            "?qk_norm_all_heads|apply_wd_to_qk_layernorm": "--qk-norm",
            "!mtp_loss_scaling_factor": "--mtp-num-layers 1",
        }
    ),
    *owned(
        "position_embedding_type",
        {"rotary_base|rotary_percent|rotary_interleaved|rotary_base_local|no_rope_freq": ("rope",)},
    ),
    *owned(
        "experimental_attention_variant",
        {
            f"linear_attention_freq|{'|'.join(LINEAR_SIZES)}": ("gated_delta_net", "mamba2"),
            "|".join(name for name in settings() if name.startswith("dsa_")): ("dsa",),
        },
    ),
    *owned(
        "rope_scaling",
        {
            "rope_scaling_factor": ("linear", "llama3", "yarn", "dynamic"),
            "rope_low_freq_factor|rope_high_freq_factor": ("llama3",),
            "rope_original_max_positions|attn_temperature_beta": ("llama3", "yarn", "dynamic"),
            "rope_beta_fast|rope_beta_slow|rope_truncate|rope_mscale|rope_mscale_all_dim|rope_attention_factor": (
                "yarn",
            ),
        },
    ),
    *rules(
        {
            "{hidden_size} with {activation} gives an MLP of width 8·h/3 rounded down to a multiple of 64 = 0; set "
            "--ffn-hidden-size, e.g. 64": _has_no_mlp,
            "{!activation_func_clamp_value|glu_linear_offset} has no effect with {activation}, which has no gate; use --swiglu or "
            "remove it": lambda c: not c.is_gated,
            "{?add_qkv_bias} has no effect with add_bias_linear, which gives every linear layer a bias; remove it, or add "
            "--disable-bias-linear": lambda c: c.add_bias_linear,
            "a head size of {=head_size} is odd, but RoPE rotates pairs of channels; use an even one, e.g. --kv-channels 64": (
                lambda c: c.position_embedding_type == "rope" and c.head_size % 2 and not c.multi_latent_attention
            ),
            "{?rotary_percent} of a head size of {=head_size} is {=rotary_size} channels, not whole pairs; use 1 or 0.5": (
                lambda c: (
                    c.position_embedding_type == "rope"
                    and (c.rotary_size % 2 or c.rotary_size < 2)
                    and not c.multi_latent_attention
                )
            ),
            "{?use_mup} does not go with {optimizer}: its learning rates are defined for Adam; use --optimizer adam": lambda c: (
                c.optimizer not in ("adam", "schedule-free-adamw")
            ),
            "{?use_mup} does not go with {softmax_scale}, which it sets; remove one of them": lambda c: (
                c.softmax_scale is not None
            ),
            "{?scale_embeddings} does not go with {embedding_multiplier}: each is the factor on word embeddings; remove one of "
            "them": lambda c: c.embedding_multiplier != 1.0,
            "{v_head_dim} is more than {qk_head_dim} and {qk_pos_emb_head_dim} together; use at most {=head_size}": lambda c: (
                c.multi_latent_attention and c.v_head_dim > c.head_size
            ),
            "{qk_pos_emb_head_dim} is odd, but RoPE rotates pairs of channels; use e.g. 64": lambda c: (
                c.multi_latent_attention and c.qk_pos_emb_head_dim % 2
            ),
            "{num_query_groups} does not go with multi_latent_attention, where each of {num_attention_heads} has a key; "
            "remove it": lambda c: c.multi_latent_attention and c.num_query_groups not in (None, c.num_attention_heads),
            "{!rotary_percent|rotary_interleaved|add_qkv_bias|qk_norm_all_heads} has no effect with multi_latent_attention; "
            "remove it": lambda c: c.multi_latent_attention,
            "{?apply_wd_to_qk_layernorm} does not go with multi_latent_attention, where no norm is decayed; remove it": (
                lambda c: c.multi_latent_attention
            ),
            "{?attention_output_gate} does not go with multi_latent_attention, which has no such gate; remove it": lambda c: (
                c.multi_latent_attention
            ),
            "{?attention_output_gate|qk_norm|qk_clip|softmax_type|softmax_scale|attn_logit_softcapping|attention_dropout} has no "
            "effect with {linear_attention_freq}: no layer has softmax attention; remove it": (
                lambda c: all(map(c.is_linear_layer, range(c.num_layers)))
            ),
            "{?sliding_window} has no effect with {linear_attention_freq}: no layer with softmax attention has a window; remove "
            "it": lambda c: c.linear_attention_freq is not None and not any(map(c.has_window, range(c.num_layers))),
            "{experimental_attention_variant} needs the layers that have it; add --linear-attention-freq 4": lambda c: (
                c.experimental_attention_variant in ("gated_delta_net", "mamba2") and c.linear_attention_freq is None
            ),
            "{linear_attention_freq} leaves no layer to linear attention; use e.g. --linear-attention-freq 4, or "
            "remove it and experimental_attention_variant": lambda c: (
                c.linear_attention_freq is not None and not any(map(c.is_linear_layer, range(c.num_layers)))
            ),
            "{linear_num_value_heads} is not a multiple of {linear_num_key_heads}; use --linear-num-value-heads "
            "{=linear_num_key_heads}": lambda c: (
                c.linear_attention_freq is not None and c.linear_num_value_heads % c.linear_num_key_heads
            ),
            "{experimental_attention_variant} is a kind of multi-latent attention; add --multi-latent-attention": lambda c: (
                c.is_sparse and not c.multi_latent_attention
            ),
            "{position_embedding_type} does not go with {experimental_attention_variant}: equal tokens would have equal scores, and "
            "rounding decide which are chosen; use --position-embedding-type rope": lambda c: (
                c.is_sparse and c.position_embedding_type == "none"
            ),
            "{?reset_position_ids} without reset_attention_mask does not go with {experimental_attention_variant}: tokens of two "
            "documents could have equal scores, and rounding decide between them; add --reset-attention-mask": lambda c: (
                c.is_sparse and not c.reset_attention_mask
            ),
            "{dsa_indexer_head_dim} is less than {qk_pos_emb_head_dim}, the channels that RoPE rotates; use at least "
            "{=qk_pos_emb_head_dim}": lambda c: c.is_sparse and c.dsa_indexer_head_dim < c.qk_pos_emb_head_dim,
            "{?no_rope_freq|sliding_window|softmax_type|attn_logit_softcapping|attention_dropout|qk_clip} is not supported with "
            "{experimental_attention_variant}; remove it": lambda c: c.is_sparse,
            "{cp_comm_type} does not go with {experimental_attention_variant}, which needs all keys of some queries; use "
            "--cp-comm-type allgather": lambda c: c.is_sparse and c.cp > 1 and c.cp_comm_type != "allgather",
            "{?qk_norm_all_heads} does not go with {normalization}; use --normalization RMSNorm": (
                lambda c: c.qk_norm and c.normalization != "RMSNorm"
            ),
            "pre_norms false leaves a layer without a norm; add --post-norms": lambda c: (
                not c.pre_norms and not c.post_norms
            ),
            "{mtp_num_layers} needs position embeddings inside the layers, not {position_embedding_type}; use "
            "--position-embedding-type rope": lambda c: (
                c.mtp_num_layers and c.position_embedding_type == "learned_absolute"
            ),
            "{?rope_scaling} has no effect with {position_embedding_type}; use rope, or --rope-scaling none": (
                lambda c: c.position_embedding_type != "rope"
            ),
            "rope_scaling dynamic cannot raise the base with only {=rotary_size} rotated channels; use yarn": (
                lambda c: c.rope_scaling == "dynamic" and c.rotary_size == 2
            ),
            "{rope_beta_slow} is more than {rope_beta_fast}; use at most {=rope_beta_fast}": (
                lambda c: c.rope_scaling == "yarn" and c.rope_beta_slow > c.rope_beta_fast
            ),
            "{!rope_mscale|rope_mscale_all_dim} needs the other of rope_mscale and rope_mscale_all_dim; set both or neither": (
                lambda c: (c.rope_mscale is None) != (c.rope_mscale_all_dim is None)
            ),
            "{!rope_mscale} does not go with {rope_attention_factor}, which sets the factor itself; remove one of them": lambda c: (
                c.rope_attention_factor is not None
            ),
            "{rope_low_freq_factor} is not below {rope_high_freq_factor}; use less than {=rope_high_freq_factor}": (
                lambda c: c.rope_scaling == "llama3" and c.rope_low_freq_factor >= c.rope_high_freq_factor
            ),
            "{seq_length} is more than {max_position_embeddings}; use --max-position-embeddings {=seq_length} or a shorter "
            "sequence": lambda c: c.max_position_embeddings is not None and c.seq_length > c.max_position_embeddings,
        }
    ),
)


def _kernels(c: Settings) -> Findings:
    yield from map(Plain, unknown_kernels(kernel_requests(c.kernels)))


def _has_fp32_products(c: Settings) -> bool:
    """Return whether any matrix product is in fp32; routing, linear and sparse attention, Muon, SOAP and PowerSGD use
    fp32 with bf16 and fp16 too."""
    matrices = OPTIMIZERS.facts(c.optimizer).separate_matrices or c.grad_compression == "powersgd"
    of_half = c.num_experts is not None or matrices or c.experimental_attention_variant is not None
    return c.precision == "fp32" or (c.precision in ("bf16", "fp16") and of_half)


def _merged_attention(c: Settings) -> Findings:
    tiled = attention_in_tiles(c.run)
    if tiled is not None and c.attention_backend not in ("auto", "flash"):
        yield (
            f"{{attention_backend}} does not support {tiled}: merging tiles needs values that only flash returns; use flash or auto"
        )


COMPUTE: tuple[Check, ...] = (
    _kernels,
    _merged_attention,
    *without({"?tp_comm_overlap_backend": "--tp-comm-overlap", "?fp8_recipe|fp8_wgrad|fp8_param_gather": "--fp8"}),
    *rules(
        {
            "{?attention_backend} has no effect with {attention_dropout}, which needs the probabilities in memory; set "
            "attention_dropout 0 or remove it": lambda c: c.attention_dropout,
            "{?attention_backend} has no effect with {experimental_attention_variant}, which has its own computation; remove it": (
                lambda c: c.is_sparse
            ),
            "{?tp_comm_overlap} has no effect without sequence_parallel; add --tp 2 --sequence-parallel or remove it": (
                lambda c: c.tp == 1 or not c.sequence_parallel
            ),
            "{?tp_comm_overlap} has no effect with fp8: a tensor in pieces has no single scale": (lambda c: c.fp8),
            "{?tf32} has no effect with precision {=precision}, which has no fp32 products; use --precision fp32 or "
            "remove it": lambda c: not _has_fp32_products(c),
            "{?deterministic} and compile do not go together: the compiler chooses the order of addition by timing; keep one of "
            "them": lambda c: c.compile,
            "{?deterministic} and {attention_backend} (fused) do not go together: its backward adds in a varying order; use flash or "
            "auto": lambda c: c.attention_backend == "cudnn" and not c.is_sparse,
            "{?deterministic} and {dp_strategy} do not go together: a worker's weights depend on timing; use "
            "parameter-server or remove it": lambda c: c.dp_strategy == "async-parameter-server",
            "{?fp8} needs precision bf16, not {=precision}; add --bf16": lambda c: c.precision != "bf16",
            "{?fp8_recipe} has one scale per 128 tokens, but {seq_length} / {cp} times {micro_batch_size} is not a multiple of "
            "128; choose --seq-length so that it is": lambda c: (
                c.fp8 and c.fp8_recipe == "blockwise" and c.seq_length // c.cp * c.micro_batch_size % 128
            ),
            "{?fp8_param_gather} needs one scale per tensor, not {fp8_recipe}; use fp8_recipe tensorwise, or remove it": (
                lambda c: c.fp8_recipe != "tensorwise"
            ),
            "{?fp8_param_gather} has no effect with one data-parallel rank, where nothing is gathered; remove it": (
                lambda c: c.dp is not None and c.dp * c.cp == c.instances
            ),
            "{?fp8_param_gather} does not go with {block}: its fp8 layers are unknown; remove it": (
                lambda c: c.block not in BLOCKS.builtin
            ),
            # The first and last layer stay in bf16.
            "{?fp8} has no effect with {num_layers}; use num_layers 3 or more, or remove it": lambda c: (
                c.num_layers < 3
            ),
        }
    ),
)


def _modules(c: Settings) -> Findings:
    asked = [("recompute_modules", MODULES)]
    asked += [("offload_modules", OFFLOAD_MODULES)] if c.fine_grained_activation_offloading else []
    for name, known in asked:
        modules: list[str] = getattr(c, name)
        if not modules:
            yield f"{name} is empty; name some of {', '.join(known)}"
        for module in dict.fromkeys(modules):
            if module not in known:
                yield Plain(f"{name} has {module} in it{nearest(module, known)} (one of {', '.join(known)})")
            if modules.count(module) > 1:
                yield Plain(f"{name} names {module} twice; keep one of them")


def _covered_modules(c: Settings) -> Findings:
    """Check that no module is contained in another or missing from the model: it would have no effect."""
    if c.recompute_granularity != "selective":
        return
    modules = c.recompute_modules
    around = {"moe" if c.is_moe_layer(index) else "mlp" for index in range(c.num_layers) if c.has_mlp(index)}
    if "moe" in modules and c.num_experts is None:
        yield "recompute_modules moe has no effect without experts; add --num-experts 8 or remove it"
    if "mla_up_proj" in modules and not c.multi_latent_attention:
        yield "recompute_modules mla_up_proj has no effect without multi_latent_attention; remove it"
    if "mlp" in modules and "mlp" not in around:
        yield "recompute_modules mlp has no effect with {num_experts}: no layer has a dense MLP; use moe or remove it"
    if "shared_experts" in modules and (c.moe_shared_expert_intermediate_size is None or "moe" in modules):
        reason = "moe, where they are recomputed too" if "moe" in modules else "a model without one"
        yield f"recompute_modules shared_experts has no effect with {reason}; remove it"
    if "mlp_act" in modules and around <= set(modules):
        within = " and ".join(sorted(around))
        yield f"recompute_modules mlp_act has no effect with {within}, where it is recomputed too; remove one of them"


def _saving_modules(c: Settings) -> Findings:
    """Check that each module saves tensors, and saves them alone: it would have no effect otherwise."""
    if not c.fine_grained_activation_offloading:
        return
    modules = c.offload_modules
    again = set(c.recompute_modules) if c.recompute_granularity == "selective" else set()
    around = {"moe" if c.is_moe_layer(index) else "mlp" for index in range(c.num_layers) if c.has_mlp(index)}
    whole_units = c.recompute_granularity == "full" and c.recompute_method == "uniform" and not c.recompute_ahead
    if whole_units and set(modules) - {"attn_norm"}:
        yield (
            "offload_modules other than attn_norm have no effect with recompute_granularity full, which only keeps the "
            "input of layers; use --offload-modules attn_norm, or remove one of them"
        )
    if "expert_fc1" in modules and (c.num_experts is None or "moe" in again):
        reason = "recompute_modules moe, where it is recomputed" if "moe" in again else "a model without experts"
        yield f"offload_modules expert_fc1 has no effect with {reason}; remove it"
    if "mlp_act" in modules and around <= again:
        within = " and ".join(sorted(around))
        yield f"offload_modules mlp_act has no effect with recompute_modules {within}, where it is recomputed; remove it"
    if "qkv_linear" in modules and "layernorm" in again and not (c.qk_norm or c.multi_latent_attention):
        yield "offload_modules qkv_linear has no effect with recompute_modules layernorm, which recomputes its input; remove it"
    if "attn_proj" in modules and not {"core_attn"} & (set(modules) | again) and not c.attention_dropout:
        yield "offload_modules attn_proj has no effect without core_attn, which keeps the same tensor; add core_attn"


def _chosen_layers(c: Settings) -> Findings:
    stages, cut = c.pp * c.vpp, stage_layers(c.run)
    # Without pipeline_layers the split is not known here, but no stage can have more than this.
    largest = max(cut) if cut else c.num_layers - (stages - 1)
    wanted = ["recompute_num_layers"] if c.recompute_granularity == "full" else []
    for name in [*wanted, "cpu_offloading_num_layers"]:
        if largest < 1 or getattr(c, name) <= largest:
            continue
        yield (
            f"{{{name}}} is more than the {largest} layers of a stage of {{num_layers}} split over pp·vpp = "
            f"{stages}; use at most {largest}"
        )


RECOMPUTE: tuple[Check, ...] = (
    *without({"!offload_modules": "--fine-grained-activation-offloading"}),
    *owned(
        "recompute_granularity",
        {"recompute_modules": ("selective",), "recompute_method|recompute_num_layers": ("full",)},
    ),
    _modules,
    _covered_modules,
    _saving_modules,
    _chosen_layers,
)
