"""Settings of the model that `validate` refuses, with the exact message."""

MODELS = [
    (1, "--hidden-dropout 1", "hidden_dropout is 1; it must be below 1, e.g. 0.1"),
    (2, "--ep 2", "ep 2 has no effect without experts; add --num-experts 4 or use ep 1"),
    (1, "--etp 1", "etp 1 has no effect without experts; add --num-experts 8 or remove it"),
    (1, "--moe-router-topk 1", "moe_router_topk 1 has no effect without experts; add --num-experts 8 or remove it"),
    (1, "--num-experts 2 --moe-router-topk 3", "moe_router_topk 3 is more than num_experts 2; use at most 2"),
    (3, "--num-experts 8 --ep 3", "num_experts 8 is not divisible by ep 3; use ep 1"),
    (
        4,
        "--num-experts 8 --ep 8",
        "the tp·cp·dp = 4 ranks of a pipeline stage are not a multiple of etp·ep = 1·8 = 8; choose etp·ep among 1, 2, 4",
    ),
    (
        1,
        "--hidden-size 130",
        "hidden_size 130 is not divisible by num_attention_heads 4; use hidden_size 132, or say the size of a head with --kv-channels 32",
    ),
    (
        1,
        "--num-query-groups 3",
        "num_attention_heads 4 is not divisible by num_query_groups 3; use num_query_groups 1, 2, 4",
    ),
    (
        1,
        "--activation swiglu --hidden-size 16 --num-attention-heads 1",
        "hidden_size 16 with swiglu gives an MLP of width 8·h/3 rounded down to a multiple of 64 = 0; set --ffn-hidden-size, e.g. 64",
    ),
    (
        1,
        "--position-embedding-type rope --kv-channels 15",
        "a head size of 15 is odd, but rope turns pairs of channels; use --kv-channels 16",
    ),
    (
        1,
        "--rotary-base 500000",
        "rotary_base 500000 has no effect with position_embedding_type learned_absolute; use rope or remove it",
    ),
    (
        4,
        "--tp 4 --num-experts 4 --ffn-hidden-size 90 --etp 4",
        "ffn_hidden_size 90 is not divisible by etp 4; use etp 1, 2",
    ),
    (1, "--norm-epsilon 0", "norm_epsilon is 0; it must be above 0, e.g. 1e-05"),
    (1, "--vocab-size 0", "vocab_size is 0; it must be at least 1, e.g. 1"),
    (1, "--attention-dropout 1.5", "attention_dropout is 1.5; it must be below 1, e.g. 0.1"),
    (1, "--hidden-dropout -0.1", "hidden_dropout is -0.1; it must be at least 0, e.g. 0.1"),
    (
        4,
        "--cp 2 --etp 2 --num-experts 4 --ep 4",
        "the tp·cp·dp = 4 ranks of a pipeline stage are not a multiple of etp·ep = 2·4 = 8; choose etp·ep among 1, 2, 4",
    ),
    (1, "--sliding-window 1", "sliding_window is 1; it must be at least 2, e.g. 4096"),
    (1, "--num-experts 1", "num_experts is 1; it must be at least 2, e.g. 8"),
    (
        1,
        "--rope-scaling linear --rope-scaling-factor 1 --position-embedding-type rope",
        "rope_scaling_factor is 1; it must be above 1, e.g. 8",
    ),
    (
        1,
        "--moe-expert-capacity-factor 0 --num-experts 4",
        "moe_expert_capacity_factor is 0; it must be above 0, e.g. 1.25",
    ),
    (1, "--moe-aux-loss-coeff -0.1 --num-experts 4", "moe_aux_loss_coeff is -0.1; it must be at least 0, e.g. 0.01"),
    (
        1,
        "--add-qkv-bias",
        "add_qkv_bias has no effect with add_bias_linear, which gives every linear layer of attention a bias; remove it, or add --disable-bias-linear",
    ),
    (
        1,
        "--rope-scaling llama3",
        "rope_scaling llama3 has no effect with position_embedding_type learned_absolute; use rope, or --rope-scaling none",
    ),
    (
        1,
        "--rope-scaling linear --position-embedding-type none",
        "rope_scaling linear has no effect with position_embedding_type none; use rope, or --rope-scaling none",
    ),
    (
        1,
        "--position-embedding-type rope --rope-scaling-factor 4",
        "rope_scaling_factor 4 has no effect with rope_scaling none; use linear or llama3, or remove it",
    ),
    (
        1,
        "--position-embedding-type rope --rope-scaling linear --rope-low-freq-factor 2",
        "rope_low_freq_factor 2 has no effect with rope_scaling linear; use llama3 or remove it",
    ),
    (
        1,
        "--position-embedding-type rope --rope-original-max-positions 4096",
        "rope_original_max_positions 4096 has no effect with rope_scaling none; use llama3 or remove it",
    ),
    (
        1,
        "--position-embedding-type rope --rope-scaling llama3 --rope-low-freq-factor 4",
        "rope_low_freq_factor 4 is not below rope_high_freq_factor 4; use 1",
    ),
    (
        1,
        "--position-embedding-type none --rotary-base 500000",
        "rotary_base 500000 has no effect with position_embedding_type none; use rope or remove it",
    ),
    (
        1,
        "--activation geglu --hidden-size 16 --num-attention-heads 1",
        "hidden_size 16 with geglu gives an MLP of width 8·h/3 rounded down to a multiple of 64 = 0; set --ffn-hidden-size, e.g. 64",
    ),
    (
        1,
        "--moe-ffn-hidden-size 64",
        "moe_ffn_hidden_size 64 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-shared-expert-intermediate-size 64",
        "moe_shared_expert_intermediate_size 64 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (1, "--moe-layer-freq 2", "moe_layer_freq 2 has no effect without experts; add --num-experts 8 or remove it"),
    (
        1,
        "--moe-first-dense-layers 1",
        "moe_first_dense_layers 1 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-router-pre-softmax",
        "moe_router_pre_softmax has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-router-topk-scaling-factor 2.5",
        "moe_router_topk_scaling_factor 2.5 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-aux-loss-coeff 0.01",
        "moe_aux_loss_coeff 0.01 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-z-loss-coeff 0.001",
        "moe_z_loss_coeff 0.001 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-expert-capacity-factor 1.5",
        "moe_expert_capacity_factor 1.5 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--moe-token-drop-policy position",
        "moe_token_drop_policy position has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--num-experts 4 --moe-token-drop-policy position",
        "moe_token_drop_policy position has no effect without moe_expert_capacity_factor, because no token is dropped; add --moe-expert-capacity-factor 1.25 or remove it",
    ),
    (
        1,
        "--num-experts 8 --moe-expert-capacity-factor 4",
        "moe_expert_capacity_factor 4 has no effect with num_experts 8 and moe_router_topk 2: from 4 on, an expert has room for every token; use less or remove it",
    ),
    (
        1,
        "--num-experts 8 --moe-router-topk 1",
        "moe_router_topk 1 without moe_router_pre_softmax gives every chosen expert the weight 1, from which the router learns nothing; add --moe-router-pre-softmax, or use --moe-router-topk 2",
    ),
    (
        1,
        "--num-experts 8 --moe-first-dense-layers 2",
        "moe_first_dense_layers 2 leaves none of num_layers 2 to experts; use at most 1, or remove num_experts 8",
    ),
    (2, "--num-experts 3 --ep 2", "num_experts 3 is not divisible by ep 2; use ep 1"),
    (
        4,
        "--pp 2 --num-experts 4 --ep 2 --rank-order tp-cp-ep-pp-dp",
        "rank_order tp-cp-ep-pp-dp with pp 2 puts experts and the rest of a layer into one pipeline only if etp·ep = 1·2 = 2 is tp·cp = 1·1 = 1; use --rank-order tp-cp-ep-dp-pp",
    ),
    (
        2,
        "--tp 2 --num-experts 4 --moe-ffn-hidden-size 33",
        "moe_ffn_hidden_size 33 is not divisible by etp 2; use etp 1",
    ),
    (
        4,
        "--tp 2 --num-experts 4 --moe-ffn-hidden-size 34 --etp 4",
        "moe_ffn_hidden_size 34 is not divisible by etp 4; use etp 1, 2",
    ),
    (
        2,
        "--tp 2 --num-experts 4 --moe-shared-expert-intermediate-size 33",
        "moe_shared_expert_intermediate_size 33 is not divisible by tp 2; use tp 1",
    ),
    (
        2,
        "--tp 2 --num-experts 4 --moe-first-dense-layers 1 --ffn-hidden-size 33 --moe-ffn-hidden-size 64",
        "ffn_hidden_size 33 is not divisible by tp 2; use tp 1",
    ),
    (
        4,
        "--tp 4 --num-experts 4 --seq-length 102",
        "seq_length 102 is not divisible by tp 4, over which the layers of num_experts 4 split the tokens; use a multiple, e.g. 104",
    ),
    (
        8,
        "--tp 4 --cp 2 --num-experts 4 --seq-length 100",
        "seq_length 100 is not divisible by tp·cp = 8, over which the layers of num_experts 4 split the tokens; use a multiple, e.g. 104",
    ),
]
"""(world size, command line, message)."""
