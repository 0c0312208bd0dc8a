"""Settings of layout and recompute that `validate` refuses, with the exact message."""

LAYOUTS = [
    (1, "--num-layers 0", "num_layers is 0; it must be at least 1, e.g. 1"),
    (2, "--pipeline-layers 2,-1 --pp 2", "pipeline_layers has -1 in it; each must be at least 0, e.g. 1"),
    (
        1,
        "--tp 2",
        "world size 1 is not a multiple of tp·pp·cp = 2·1·1 = 2; start 2 ranks (torchrun --nproc-per-node 2 -m "
        "megalite.cli.main train ...), or choose tp, pp, cp with a product among 1",
    ),
    (
        1,
        "--tp 4 --pp 4 --num-layers 4",
        "world size 1 is not a multiple of tp·pp·cp = 4·4·1 = 16; start 16 ranks (torchrun --nnodes 2 --nproc-per-node 8 "
        "-m megalite.cli.main train ...), or choose tp, pp, cp with a product among 1",
    ),
    (0, "", "world size is 0; it must be at least 1"),
    (
        6,
        "--tp 2 --pp 2 --num-layers 4",
        "world size 6 is not a multiple of tp·pp·cp = 2·2·1 = 4; start 4 or 8 ranks, or choose tp, pp, cp with a product among 1, 2, 3, 6",
    ),
    (
        2,
        "--tp 4",
        "world size 2 is not a multiple of tp·pp·cp = 4·1·1 = 4; start 4 ranks, or choose tp, pp, cp with a product among 1, 2",
    ),
    (8, "--tp 2 --pp 2 --dp 3", "dp 3 does not fit: world size 8 / (tp·pp·cp = 4) is 2; use --dp 2 or start 12 ranks"),
    (4, "--vpp 2", "vpp 2 has no effect with pp 1; use pp 2 or more, or vpp 1"),
    (
        4,
        "--sequence-parallel",
        "sequence_parallel has no effect with tp 1; use tp 2 or more, or --no-sequence-parallel",
    ),
    (
        4,
        "--pp 2 --microbatch-group-size 4",
        "microbatch_group_size_per_virtual_pipeline_stage 4 has no effect with vpp 1: only the interleaved schedule has groups; use vpp 2 or more, or remove it",
    ),
    (
        4,
        "--pp 2 --vpp 2 --num-layers 4 --pipeline-schedule looped-bfs --microbatch-group-size 4",
        "microbatch_group_size_per_virtual_pipeline_stage 4 has no effect with looped-bfs: only the interleaved schedule has groups; use --pipeline-schedule interleaved, or remove it",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-schedule zb-h1 --pipeline-warmup pb",
        "pipeline_warmup pb has no effect with schedule zb-h1; use --pipeline-schedule 1f1b or remove it",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-costs costs.json",
        "pipeline_costs costs.json has no effect with schedule 1f1b; use --pipeline-schedule auto or remove it",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-schedule zb-h1 --pipeline-schedule-file mine.csv",
        "pipeline_schedule zb-h1 and pipeline_schedule_file mine.csv both name the schedule; remove one of them",
    ),
    (
        1,
        "--num-layers 4 --pipeline-recv-prefetch 2",
        "pipeline_recv_prefetch 2 has no effect with pp 1; use pp 2 or more, or remove it",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-layers 2,2 --pipeline-layout Ett|ttL",
        "pipeline_layers 2,2 and pipeline_layout 'Ett|ttL' both cut the model; remove one of them",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-layout Ett|tL",
        "pipeline_layout, in layers 2,1 adds up to 3, but num_layers is 4; use 2,2",
    ),
    (
        4,
        "--pp 4 --vpp 1 --num-layers 4 --pipeline-layout E|tt||ttL",
        "pipeline_layout 'E|tt||ttL': stage 2 of 4 is empty, and each needs something to do; e.g. \"Et*3|t*4|t*4|t*2L\" for four stages of 3, 4, 4 and 2 layers",
    ),
    (
        3,
        "--pp 3 --num-layers 4 --pipeline-layers 2,0,2",
        "pipeline_layers 2,0,2 leaves stage 1 without a layer; only the first, which has the embedding, and the last, which has the head, can do without: use 1,1,2",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --recompute-ahead",
        "recompute_ahead has no effect with recompute_granularity none; use --recompute-granularity full or remove it",
    ),
    (
        1,
        "--num-layers 4 --recompute-granularity full --recompute-ahead",
        "recompute_ahead has no effect with pp 1, where no gradient is waited for; use pp 2 or more, or remove it",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --recompute-granularity full --recompute-num-layers 2 --recompute-ahead",
        "recompute_num_layers 2 does not go with recompute_ahead, which recomputes whole stages; remove one of them",
    ),
    (
        1,
        "--overlap-param-gather",
        "overlap_param_gather has no effect with dp_strategy all-reduce; use --dp-strategy distributed-optimizer or remove it",
    ),
    (
        1,
        "--device cpu --distributed-backend nccl",
        "distributed_backend nccl cannot run on device cpu; use gloo or auto",
    ),
    (
        2,
        "--hang-timeout-minutes 10",
        "hang_timeout_minutes 10 is not below distributed_timeout_minutes 10: collectives would fail before anyone could "
        "say which rank stands still; use --hang-timeout-minutes 8 or --distributed-timeout-minutes 12.5",
    ),
    (
        2,
        "--hang-save-timeout-minutes 10",
        "hang_save_timeout_minutes 10 is not below distributed_timeout_minutes 10: collectives would fail before anyone "
        "could say which rank stands still; use --hang-save-timeout-minutes 9 or --distributed-timeout-minutes 11.1111",
    ),
    (
        1,
        "--hang-save-timeout-minutes 5",
        "hang_save_timeout_minutes 5 is below hang_timeout_minutes 8, and is for what may take longer; use "
        "--hang-save-timeout-minutes 8 or --hang-timeout-minutes 5",
    ),
    (
        1,
        "--hang-save-timeout-minutes 5 --hang-timeout-minutes 0",
        "hang_save_timeout_minutes 5 has no effect with hang_timeout_minutes 0; remove one of them",
    ),
    (1, "--hang-timeout-minutes -1", "hang_timeout_minutes is -1; it must be at least 0, e.g. 8"),
    (
        1,
        "--seq-length 512 --max-position-embeddings 256",
        "seq_length 512 is more than max_position_embeddings 256; use --max-position-embeddings 512 or a shorter sequence",
    ),
    (3, "--tp 3", "num_attention_heads 4 is not divisible by tp 3; use tp 1, 2, 4"),
    (4, "--tp 4 --num-query-groups 2", "num_query_groups 2 is not divisible by tp 4; use tp 1, 2"),
    (
        8,
        "--tp 8 --num-attention-heads 8 --ffn-hidden-size 100",
        "ffn_hidden_size 100 is not divisible by tp 8; use tp 1, 2, 4",
    ),
    (
        3,
        "--tp 3 --num-attention-heads 3 --hidden-size 96 --ffn-hidden-size 384 --vocab-size 1000",
        "the vocabulary of 1000, padded to 1024 by make_vocab_size_divisible_by 128, is not divisible by tp 3; use --make-vocab-size-divisible-by 384",
    ),
    (4, "--cp 4 --seq-length 100", "seq_length 100 is not divisible by 2·cp = 8; use a multiple, e.g. 104"),
    (
        4,
        "--tp 4 --sequence-parallel --seq-length 102",
        "seq_length 102 is not divisible by tp 4, which sequence_parallel needs; use a multiple, e.g. 104",
    ),
    (1, "--pp 0", "pp is 0; it must be at least 1, e.g. 1"),
    (
        4,
        "--tp 4 --num-attention-heads 6 --hidden-size 96",
        "num_attention_heads 6 is not divisible by tp 4; use tp 1, 2, 3, 6",
    ),
    (2, "--dp 1", "dp 1 does not fit: world size 2 / (tp·pp·cp = 1) is 2; use --dp 2 or start 1 ranks"),
    (
        8,
        "--tp 4 --cp 2 --sequence-parallel --seq-length 36",
        "seq_length 36 is not divisible by tp·cp = 8, which sequence_parallel needs; use a multiple, e.g. 40",
    ),
    (
        4,
        "--pp 4 --num-layers 3",
        "num_layers 3 is less than pp·vpp = 4·1 = 4 stages, which need a layer each; use num_layers 4 or more, or pp·vpp up to 3",
    ),
    (
        2,
        "--pp 2 --vpp 2 --num-layers 3",
        "num_layers 3 is less than pp·vpp = 2·2 = 4 stages, which need a layer each; use num_layers 4 or more, or pp·vpp up to 3",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-layers 2,1,1",
        "pipeline_layers 2,1,1 has 3 entries, but there are pp·vpp = 2·1 = 2 stages; use 2,2",
    ),
    (
        2,
        "--pp 2 --num-layers 5 --pipeline-layers 2,2",
        "pipeline_layers 2,2 adds up to 4, but num_layers is 5; use 2,3",
    ),
    (1, "--cp-comm-type a2a", "cp_comm_type a2a has no effect with cp 1; use cp 2 or more, or remove it"),
    (
        1,
        "--cp-comm-type p2p --seq-length 128",
        "cp_comm_type p2p has no effect with cp 1; use cp 2 or more, or remove it",
    ),
    (
        4,
        "--cp 4 --cp-comm-type a2a --num-attention-heads 8 --num-query-groups 2",
        "cp_comm_type a2a deals out the num_query_groups/tp = 2/1 = 2 key/value heads of a rank over cp, but they are not divisible by cp 4; use cp 1, 2, or --cp-comm-type p2p",
    ),
    (
        4,
        "--tp 2 --cp 2 --cp-comm-type a2a --num-attention-heads 8 --num-query-groups 2",
        "cp_comm_type a2a deals out the num_query_groups/tp = 2/2 = 1 key/value heads of a rank over cp, but they are not divisible by cp 2; use cp 1, or --cp-comm-type p2p",
    ),
    (
        8,
        "--tp 2 --cp 4 --cp-comm-type a2a --num-attention-heads 8 --num-query-groups 4",
        "cp_comm_type a2a deals out the num_query_groups/tp = 4/2 = 2 key/value heads of a rank over cp, but they are not divisible by cp 4; use cp 1, 2, or --cp-comm-type p2p",
    ),
    (2, "--cp 2 --seq-length 102", "seq_length 102 is not divisible by 2·cp = 4; use a multiple, e.g. 104"),
    (
        4,
        "--tp 2 --cp 2 --sequence-parallel --seq-length 6",
        "seq_length 6 is not divisible by 2·cp = 4; use a multiple, e.g. 8",
    ),
    (4, "--tp 2 --cp 2 --seq-length 102", "seq_length 102 is not divisible by 2·cp = 4; use a multiple, e.g. 104"),
    (
        1,
        "--recompute-modules mlp",
        "recompute_modules mlp has no effect with recompute_granularity none; use --recompute-granularity selective or remove it",
    ),
    (
        1,
        "--recompute-granularity full --recompute-modules core_attn",
        "recompute_modules core_attn has no effect with recompute_granularity full; use --recompute-granularity selective or remove it",
    ),
    (
        1,
        "--recompute-method block",
        "recompute_method block has no effect with recompute_granularity none; use --recompute-granularity full or remove it",
    ),
    (
        1,
        "--recompute-granularity selective --recompute-method uniform",
        "recompute_method uniform has no effect with recompute_granularity selective; use --recompute-granularity full or remove it",
    ),
    (
        1,
        "--recompute-granularity selective --recompute-num-layers 2",
        "recompute_num_layers 2 has no effect with recompute_granularity selective; use --recompute-granularity full or remove it",
    ),
    (
        1,
        "--recompute-activations --recompute-modules core_atn",
        "recompute_modules has core_atn in it: did you mean core_attn? (one of core_attn, mlp_act, layernorm, mlp, moe)",
    ),
    (
        1,
        "--recompute-activations --recompute-modules rope",
        "recompute_modules has rope in it (one of core_attn, mlp_act, layernorm, mlp, moe)",
    ),
    (1, "--recompute-activations --recompute-modules mlp mlp", "recompute_modules names mlp twice; keep one of them"),
    (
        1,
        "--recompute-activations --recompute-modules mlp_act moe_act",
        "recompute_modules names mlp_act twice; keep one of them",
    ),
    (
        1,
        "--recompute-activations --recompute-modules mlp mlp_act",
        "recompute_modules mlp_act has no effect with mlp, which runs the activation again too; remove one of them",
    ),
    (
        1,
        "--recompute-activations --recompute-modules moe",
        "recompute_modules moe has no effect without experts; add --num-experts 8 or remove it",
    ),
    (
        1,
        "--recompute-activations --recompute-modules mlp --num-experts 4",
        "recompute_modules mlp has no effect with num_experts 4: no layer has a dense MLP; use moe or remove it",
    ),
    (
        1,
        "--recompute-activations --recompute-modules moe mlp_act --num-experts 4",
        "recompute_modules mlp_act has no effect with moe, which runs the activation again too; remove one of them",
    ),
    (
        1,
        "--recompute-activations --recompute-modules moe mlp mlp_act --num-experts 4 --moe-first-dense-layers 1",
        "recompute_modules mlp_act has no effect with mlp and moe, which runs the activation again too; remove one of them",
    ),
    (
        1,
        "--recompute-granularity full --recompute-num-layers 3",
        "recompute_num_layers 3 is more than the 2 layers of the model; use at most 2",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --recompute-granularity full --recompute-method block --recompute-num-layers 4",
        "recompute_num_layers 4 is more than the 3 layers of a stage of num_layers 4 cut over pp·vpp = 2; use at most 3",
    ),
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-layers 2,2 --recompute-granularity full --recompute-num-layers 3",
        "recompute_num_layers 3 is more than the 2 layers of a stage of num_layers 4 cut over pp·vpp = 2; use at most 2",
    ),
    (
        1,
        "--recompute-num-layers 0 --recompute-granularity full",
        "recompute_num_layers is 0; it must be at least 1, e.g. 1",
    ),
]
"""(world size, command line, message)."""
