"""Settings that `validate` refuses, with what the message says of them."""

import re

ELASTIC = "--elastic --global-batch-size 8 --run-dir r --save-interval 5 --load r/checkpoints --fresh-if-missing --train-iters 100"
TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax"

_TABLE = """
# Layout, pipeline, recompute.
1 --num-layers 0 => num_layers is 0 … at least 1, e.g. 2
2 --pipeline-layers 2,-1 --pp 2 => pipeline_layers has -1 in it … at least 0
1 --tp 2 => world size 1 … tp·pp·cp = 2·1·1 = 2 … start 2 ranks (torchrun --nproc-per-node 2
1 --tp 4 --pp 4 --num-layers 4
    => world size 1 … tp·pp·cp = 4·4·1 = 16 … start 16 ranks (torchrun --nnodes 2 --nproc-per-node 8
0 => world size is 0 … at least 1
6 --tp 2 --pp 2 --num-layers 4 => world size 6 … tp·pp·cp = 2·2·1 = 4 … start 4 or 8 ranks … among 1, 2, 3, 6
2 --tp 4 => world size 2 … tp·pp·cp = 4·1·1 = 4 … start 4 ranks … among 1, 2
8 --tp 2 --pp 2 --dp 3 => dp 3 does not fit … --dp 2 or start 12 ranks
4 --vpp 2 => vpp 2 has no effect with pp 1 … pp 2 or more, or vpp 1
4 --pp 2 --microbatch-group-size 4 => microbatch_group_size_per_virtual_pipeline_stage 4 … schedule auto … vpp 2
4 --pp 2 --vpp 2 --num-layers 4 --pipeline-schedule looped-bfs --microbatch-group-size 4
    => microbatch_group_size_per_virtual_pipeline_stage 4 … schedule looped-bfs … vpp 2
2 --pp 2 --num-layers 4 --pipeline-schedule zb-h1 --pipeline-warmup pb
    => pipeline_warmup pb … schedule zb-h1 … pipeline-schedule 1f1b
2 --pp 2 --num-layers 4 --pipeline-schedule 1f1b --pipeline-costs costs.json
    => pipeline_costs costs.json … schedule 1f1b … pipeline-schedule auto
2 --pp 2 --num-layers 4 --pipeline-schedule zb-h1 --pipeline-schedule-file mine.csv
    => pipeline_schedule zb-h1 and pipeline_schedule_file mine.csv both name the schedule
1 --num-layers 4 --pipeline-recv-prefetch 2 => pipeline_recv_prefetch 2 has no effect with pp 1 … pp 2 or more
2 --pp 2 --num-layers 4 --pipeline-layers 2,2 --pipeline-layout Ett|ttL
    => pipeline_layers 2,2 and pipeline_layout Ett|ttL both cut the model
2 --pp 2 --num-layers 4 --pipeline-layout Ett|tL
    => pipeline_layout, in layers 2,1 adds up to 3, but num_layers is 4 … 2,2
1 --num-layers 4 --num-experts 4 --moe-aux-loss-coeff 0.1 --moe-aux-loss-sequences 2 --micro-batch-size 3
    => moe_aux_loss_sequences 2 does not divide micro_batch_size 3; use 3 or less, or a multiple of 2
2 --pp 2 --num-layers 4 --pipeline-layout Ett|ttmL => pipeline_layout Ett|ttmL has 1 m, but mtp_num_layers 0 … or none
4 --pp 4 --vpp 1 --num-layers 4 --pipeline-layout E|tt||ttL => pipeline_layout 'E|tt||ttL' … e.g. "Et*3|t*4|t*4|t*2L"
3 --pp 3 --num-layers 4 --pipeline-layers 2,0,2 => pipeline_layers 2,0,2 leaves stage 1 without a layer … use 1,1,2
2 --pp 2 --num-layers 4 --recompute-ahead => recompute_ahead … recompute_granularity none … recompute-granularity full
1 --num-layers 4 --recompute-granularity full --recompute-ahead => recompute_ahead … pp 1 … pp 2 or more
1 --num-layers 4 --cpu-offloading-num-layers 5 => cpu_offloading_num_layers 5 is more than the 4 layers … at most 4
2 --num-layers 4 --pp 2 --cpu-offloading-num-layers 2 --recompute-granularity full --recompute-ahead
    => cpu_offloading_num_layers 2 does not go with recompute_ahead
1 --num-layers 4 --fine-grained-activation-offloading => offload_modules is empty; name some of attn_norm
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules core_atn
    => offload_modules has core_atn in it: did you mean core_attn
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules moe_act mlp_act
    => offload_modules names mlp_act twice
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules attn_proj
    => offload_modules attn_proj … without core_attn … add core_attn
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules expert_fc1
    => offload_modules expert_fc1 has no effect with a model without experts
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules mlp_act --recompute-activations --recompute-modules mlp
    => offload_modules mlp_act has no effect with recompute_modules mlp
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules core_attn --recompute-granularity full
    => offload_modules other than attn_norm … recompute_granularity full
1 --num-layers 4 --fine-grained-activation-offloading --offload-modules qkv_linear --recompute-activations --recompute-modules layernorm
    => offload_modules qkv_linear has no effect with recompute_modules layernorm
2 --pp 2 --num-layers 4 --recompute-granularity full --recompute-num-layers 2 --recompute-ahead
    => recompute_num_layers 2 … recompute_ahead
1 --overlap-param-gather => overlap_param_gather … dp_strategy all-reduce … --dp-strategy distributed-optimizer
1 --device cpu --distributed-backend nccl => distributed_backend nccl cannot run on device cpu … gloo or auto
2 --hang-timeout-minutes 10 => hang_timeout_minutes 10 … distributed_timeout_minutes 10 … --hang-timeout-minutes 8
2 --hang-save-timeout-minutes 10
    => hang_save_timeout_minutes 10 … distributed_timeout_minutes 10 … hang-save-timeout-minutes 9
1 --hang-save-timeout-minutes 5
    => hang_save_timeout_minutes 5 is below hang_timeout_minutes 8 … hang-save-timeout-minutes 8
1 --hang-save-timeout-minutes 5 --hang-timeout-minutes 0 => hang_save_timeout_minutes 5 … hang_timeout_minutes 0
1 --hang-timeout-minutes -1 => hang_timeout_minutes is -1 … at least 0
1 --seq-length 512 --max-position-embeddings 256
    => seq_length 512 is more than max_position_embeddings 256 … max-position-embeddings 512
3 --tp 3 => num_attention_heads 4 is not divisible by tp 3 … tp 1, 2, 4
4 --tp 4 --num-attention-heads 12 --num-query-groups 6 --hidden-size 96 --ffn-hidden-size 384
    => num_query_groups 6 is neither a multiple nor a divisor of tp 4 … tp 1, 2, 3, 6, 12
4 --tp 4 --num-query-groups 1 --kv-channels 5 => 5 channels … the 4 of the tp 4 ranks … --kv-channels 8
8 --tp 8 --num-attention-heads 8 --ffn-hidden-size 100 => ffn_hidden_size 100 … tp 8 … tp 1, 2, 4
3 --tp 3 --num-attention-heads 3 --hidden-size 96 --ffn-hidden-size 384 --vocab-size 1000
    => the vocabulary of 1000 … tp 3 … make-vocab-size-divisible-by 384
4 --cp 4 --seq-length 96 --seq-length-warmup 12 100 => seq_length_warmup 12 100 … 8 … --seq-length-warmup 8 1000
1 --seq-length 64 --seq-length-warmup 64 100 => seq_length_warmup 64 100 … seq_length 64 … --seq-length-warmup 8 1000
1 --seq-length-warmup 64 => seq_length_warmup 64 is not two numbers … START STEPS … --seq-length-warmup 32 1000
1 --seq-length-warmup 64 100 --step-batch-size-schedule 0:1
    => seq_length_warmup 64 100 does not go with step_batch_size_schedule 0:1 … rampup_batch_size
4 --cp 4 --seq-length 100 => seq_length 100 is not divisible by 2·cp = 8 … a multiple, e.g. 104
4 --tp 4 --sequence-parallel --seq-length 102 => seq_length 102 is not divisible by tp 4 … a multiple, e.g. 104
2 --dp 1 => dp 1 does not fit … --dp 2 or start 1 ranks
8 --tp 4 --cp 2 --sequence-parallel --seq-length 36 => seq_length 36 … tp·cp = 8 … a multiple, e.g. 40
4 --pp 4 --num-layers 3 => num_layers 3 is less than pp·vpp = 4·1 = 4 stages … num_layers 4 or more, or pp·vpp up to 3
2 --pp 2 --vpp 2 --num-layers 3
    => num_layers 3 is less than pp·vpp = 2·2 = 4 stages … num_layers 4 or more, or pp·vpp up to 3
2 --pp 2 --num-layers 4 --pipeline-layers 2,1,1 => pipeline_layers 2,1,1 has 3 entries … pp·vpp = 2·1 = 2 stages … 2,2
2 --pp 2 --num-layers 5 --pipeline-layers 2,2 => pipeline_layers 2,2 adds up to 4, but num_layers is 5 … 2,3
4 --cp 4 --cp-comm-type a2a --num-attention-heads 12 --num-query-groups 6 --hidden-size 96
    => cp_comm_type a2a … 12 query and 6 key/value heads … cp 4 … cp 1, 2, 3, 6, 12
4 --tp 2 --cp 2 --cp-comm-type a2a --num-attention-heads 10 --num-query-groups 2 --hidden-size 80 --ffn-hidden-size 320
    => cp_comm_type a2a … 5 query and 1 key/value heads … cp 2 … cp 1, 5
4 --cp 4 --cp-comm-type a2a+p2p --num-attention-heads 6 --hidden-size 48
    => hierarchical_context_parallel_sizes is missing … cp 4 … a2a+p2p … --hierarchical-context-parallel-sizes 2 2
4 --cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 3 2
    => hierarchical_context_parallel_sizes is 3 2 … cp 4 … --hierarchical-context-parallel-sizes 2 2
4 --cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1 --num-attention-heads 6 --hidden-size 48
    => cp_comm_type a2a+p2p … 6 query … hierarchical_context_parallel_sizes 4,1 … --hierarchical-context-parallel-sizes 2 2
2 --context-parallel-load-balancer area --reset-attention-mask => context_parallel_load_balancer area … cp 1
2 --cp 2 --context-parallel-load-balancer area => context_parallel_load_balancer area … --packing best-fit or headtail
2 --cp 2 --context-parallel-load-balancer area --reset-attention-mask --cp-comm-type a2a
    => context_parallel_load_balancer area … cp_comm_type a2a … cp_comm_type allgather
2 --cp 2 --context-parallel-load-balancer area --reset-attention-mask --attention-dropout 0.1
    => context_parallel_load_balancer area … attention_dropout 0.1 … attention_dropout 0
4 --tp 2 --cp 2 --sequence-parallel --seq-length 6 => seq_length 6 … 2·cp = 4 … a multiple, e.g. 8
1 --recompute-activations --recompute-modules core_atn => recompute_modules has core_atn in it: did you mean core_attn?
1 --recompute-activations --recompute-modules mlp mlp => recompute_modules names mlp twice
1 --recompute-activations --recompute-modules mlp_act moe_act => recompute_modules names mlp_act twice
1 --recompute-activations --recompute-modules mlp mlp_act => recompute_modules mlp_act has no effect with mlp
1 --recompute-activations --recompute-modules moe => recompute_modules moe … experts … --num-experts 8
1 --recompute-activations --recompute-modules mlp --num-experts 4 => recompute_modules mlp … num_experts 4 … moe
1 --use-mup --optimizer muon => use_mup does not go with optimizer muon … use --optimizer adam
1 --use-mup --softmax-scale 0.1 => use_mup does not go with softmax_scale 0.1
1 --mup-base-hidden-size 64 => mup_base_hidden_size 64 has no effect without use_mup; add --use-mup
1 --recompute-activations --recompute-modules shared_experts --num-experts 4
    => recompute_modules shared_experts has no effect with a model without one
1 --recompute-activations --recompute-modules moe mlp_act --num-experts 4 => recompute_modules mlp_act … moe
1 --recompute-activations --recompute-modules moe mlp mlp_act --num-experts 4 --moe-first-dense-layers 1
    => recompute_modules mlp_act … mlp and moe
1 --recompute-granularity full --recompute-num-layers 3
    => recompute_num_layers 3 is more than the 2 layers of a stage of num_layers 2 cut over pp·vpp = 1 … at most 2
2 --pp 2 --num-layers 4 --recompute-granularity full --recompute-method block --recompute-num-layers 4
    => recompute_num_layers 4 is more than the 3 layers … pp·vpp = 2 … at most 3
2 --pp 2 --num-layers 4 --pipeline-layers 2,2 --recompute-granularity full --recompute-num-layers 3
    => recompute_num_layers 3 is more than the 2 layers … pp·vpp = 2 … at most 2
# Model and experts.
1 --hidden-dropout 1 => hidden_dropout is 1 … below 1, e.g. 0.0
2 --ep 2 => ep 2 has no effect without experts … --num-experts 2 or use ep 1
1 --num-experts 2 --moe-router-topk 3 => moe_router_topk 3 is more than num_experts 2 … at most 2
3 --num-experts 8 --ep 3 => num_experts 8 is not divisible by ep 3 … ep 1
4 --num-experts 8 --ep 8 => tp·cp·dp = 4 … etp·ep = 1·8 = 8 … choose etp·ep among 1, 2, 4
1 --hidden-size 130 => hidden_size 130 … num_attention_heads 4 … hidden_size 132 … --kv-channels 32
1 --num-query-groups 3 => num_attention_heads 4 is not divisible by num_query_groups 3 … num_query_groups 1, 2, 4
1 --activation swiglu --hidden-size 16 --num-attention-heads 1
    => hidden_size 16 with activation swiglu … 0 … --ffn-hidden-size, e.g. 64
1 --position-embedding-type rope --kv-channels 15
    => a head size of 15 is odd, but rope turns pairs of channels … an even one, e.g. --kv-channels 64
4 --tp 4 --num-experts 4 --ffn-hidden-size 90 --etp 4 => ffn_hidden_size 90 is not divisible by etp 4 … etp 1, 2
1 --add-qkv-bias => add_qkv_bias has no effect with add_bias_linear … remove it, or add --disable-bias-linear
1 --rope-scaling llama3 => rope_scaling llama3 … position_embedding_type learned_absolute … rope
1 --position-embedding-type rope --rope-scaling-factor 4 => rope_scaling_factor 4 … rope_scaling none … linear, llama3, yarn or dynamic
1 --position-embedding-type rope --rope-scaling linear --rope-low-freq-factor 2
    => rope_low_freq_factor 2 … rope_scaling linear … llama3
1 --position-embedding-type rope --rope-original-max-positions 4096
    => rope_original_max_positions 4096 … rope_scaling none … llama3
1 --position-embedding-type rope --rope-scaling llama3 --rope-low-freq-factor 4
    => rope_low_freq_factor 4 … rope_high_freq_factor 4 … less than 4
1 --position-embedding-type rope --rope-scaling llama3 --rope-beta-fast 16
    => rope_beta_fast 16 … rope_scaling llama3 … yarn
1 --position-embedding-type rope --rope-scaling yarn --rope-beta-slow 40
    => rope_beta_slow 40 … rope_beta_fast 32 … at most 32
1 --position-embedding-type rope --rope-scaling yarn --rope-mscale 2 => rope_mscale 2 … both or none
1 --position-embedding-type rope --rope-scaling yarn --rope-mscale 2 --rope-mscale-all-dim 1 --rope-attention-factor 2
    => rope_mscale 2 … rope_attention_factor 2 … remove one
1 --num-experts 8 --moe-expert-capacity-factor 4
    => moe_expert_capacity_factor 4 … num_experts 8 and moe_router_topk 2 … less than 4
1 --num-experts 8 --moe-router-topk 1
    => moe_router_topk 1 without moe_router_pre_softmax … --moe-router-pre-softmax, or use --moe-router-topk 2
1 --num-experts 8 --moe-first-dense-layers 2
    => moe_first_dense_layers 2 leaves none of num_layers 2 to experts … less than 2, or remove num_experts 8
4 --pp 2 --num-experts 4 --ep 2 --rank-order tp-cp-ep-pp-dp
    => rank_order tp-cp-ep-pp-dp with pp 2 … etp·ep = 1·2 = 2 is tp·cp = 1·1 = 1 … rank-order tp-cp-ep-dp-pp
2 --tp 2 --num-experts 4 --moe-ffn-hidden-size 33 => moe_ffn_hidden_size 33 is not divisible by etp 2 … etp 1
4 --tp 2 --num-experts 4 --moe-ffn-hidden-size 34 --etp 4 => moe_ffn_hidden_size 34 … etp 4 … etp 1, 2
2 --tp 2 --num-experts 4 --moe-shared-expert-intermediate-size 33
    => moe_shared_expert_intermediate_size 33 … tp 2 … tp 1
2 --tp 2 --num-experts 4 --moe-first-dense-layers 1 --ffn-hidden-size 33 --moe-ffn-hidden-size 64
    => ffn_hidden_size 33 … tp 2 … tp 1
4 --tp 4 --num-experts 4 --seq-length 102 => seq_length 102 is not divisible by tp 4 … a multiple, e.g. 104
8 --tp 4 --cp 2 --num-experts 4 --seq-length 100 => seq_length 100 … tp·cp = 8 … a multiple, e.g. 104
# Layers of different kinds, norms, scores.
1 --sliding-window 8 --window-attn-skip-freq 1,0,1
    => window_attn_skip_freq 1,0,1 is neither one number nor a 0 or 1 for each of num_layers 2 … --window-attn-skip-freq 2
1 --position-embedding-type rope --no-rope-freq 2,0 => no_rope_freq 2,0 is neither … num_layers 2 … --no-rope-freq 2
1 --window-attn-skip-freq 2 => window_attn_skip_freq 2 has no effect without sliding_window … --sliding-window 4096
1 --sliding-window 8 --rotary-base-local 10 => rotary_base_local 10 … position_embedding_type learned_absolute … rope
1 --no-pre-norms => pre_norms false leaves a layer without a norm … --post-norms
1 --mtp-num-layers 1 => mtp_num_layers 1 … position_embedding_type learned_absolute … rope
1 --kv-lora-rank 8 => kv_lora_rank 8 … multi_latent_attention … remove
1 --multi-latent-attention --v-head-dim 200 => v_head_dim 200 … qk_head_dim 128 … at most 192
1 --multi-latent-attention --qk-pos-emb-head-dim 7 => qk_pos_emb_head_dim 7 … odd … 64
1 --multi-latent-attention --num-query-groups 2 => num_query_groups 2 … multi_latent_attention … num_attention_heads 4 … remove
1 --multi-latent-attention --position-embedding-type rope --rotary-interleaved => rotary_interleaved … multi_latent_attention … remove
1 --qk-norm-all-heads => qk_norm_all_heads has no effect without qk_norm … --qk-norm
1 --qk-norm --qk-norm-all-heads => qk_norm_all_heads does not go with normalization LayerNorm … --normalization RMSNorm
1 --attention-backend math --attn-logit-softcapping 5
    => attention_backend math cannot serve attn_logit_softcapping 5 … flash or auto
1 --activation-func-clamp-value 7 => activation_func_clamp_value 7 has no effect with activation gelu … --swiglu
1 --position-embedding-type rope --rope-scaling dynamic --kv-channels 2 => rope_scaling dynamic … 2 channels … use yarn
# Kernels and attention.
1 --attention-backend math --softmax-type learnable
    => attention_backend math cannot serve softmax_type learnable … flash or auto
1 --attention-backend math --sliding-window 8 => attention_backend math cannot serve sliding_window 8 … flash or auto
2 --attention-backend cudnn --cp 2 => attention_backend cudnn cannot serve cp 2 with cp_comm_type p2p … flash or auto
1 --attention-backend efficient --reset-attention-mask
    => attention_backend efficient cannot serve reset_attention_mask … flash or auto
2 --nccl-max-ctas pp=2 --pp 2 --device cpu => nccl_max_ctas pp=2 has no effect on gloo … remove it
2 --nccl-max-ctas world=2 --device cuda => nccl_max_ctas: 'world=2' is no limit; use GROUP=NUMBER … such as pp=2
2 --nccl-max-ctas pp=0 --device cuda => nccl_max_ctas: 'pp=0' is no limit … a NUMBER of at least 1, such as pp=2
2 --nccl-max-ctas pp=1,pp=2 --device cuda => nccl_max_ctas gives pp 1 and 2; keep one of them
2 --tp-comm-overlap-backend ring => tp_comm_overlap_backend ring has no effect without tp_comm_overlap; add it or remove it
1 --fp8 --fp16 --num-layers 3 => fp8 needs precision bf16, not fp16 … --bf16
1 --fp8 --bf16 --num-layers 2 => fp8 has no effect with num_layers 2 … num_layers 3 or more
2 --fp8-param-gather --dp-strategy zero3 --bf16 --num-layers 3
    => fp8_param_gather has no effect without fp8 … --fp8
1 --fp8 --fp8-param-gather --dp-strategy zero3 --bf16 --num-layers 3
    => fp8_param_gather has no effect with one data-parallel rank … remove it
2 --fp8 --fp8-param-gather --dp-strategy zero1 --bf16 --num-layers 3
    => fp8_param_gather has no effect with dp_strategy distributed-optimizer … fully-sharded
# Strategies, optimizers, number formats.
2 --sync-interval 8 => sync_interval 8 has no effect with dp_strategy all-reduce … --dp-strategy local-sgd
2 --dp-strategy local-sgd --outer-lr 0.5 => outer_lr 0.5 … dp_strategy local-sgd … --dp-strategy diloco
2 --dp-strategy fully-sharded --grad-compression topk
    => grad_compression topk … dp_strategy fully-sharded … dp-strategy all-reduce
2 --dp-strategy parameter-server --shard-gradients
    => shard_gradients … dp_strategy parameter-server … dp-strategy distributed-optimizer
4 --dp-strategy gossip --cp 2 => cp 2 … dp_strategy gossip … leave it out, or use --dp-strategy all-reduce
2 --dp-strategy async-parameter-server --ep 2 --num-experts 4 TOP1
    => ep 2 … dp_strategy async-parameter-server … leave it out, or use --dp-strategy all-reduce
2 --dp-strategy async-parameter-server --precision fp16
    => precision fp16 … dp_strategy async-parameter-server … precision bf16
5 --dp-strategy gossip --gossip-graph one-peer
    => gossip_graph one-peer pairs up replicas, but dp is 5 … gossip-graph ring,
2 --dp-strategy diloco --sync-interval 10 --sync-fragments 4 --num-layers 4
    => sync_interval 10 … sync_fragments 4 … fragments 1, 2, 5, 10
2 --dp-strategy diloco --sync-interval 10 --sync-fragments 5 --sync-delay 2 --num-layers 6
    => sync_delay 2 … sync_interval / sync_fragments = 10/5 = 2 … sync-delay 1
6 --dp-strategy gossip --gossip-graph one-peer --dp-instances 3
    => gossip_graph one-peer pairs up replicas, but dp_instances is 3 … dp_instances 2 or 4
4 --dp-strategy local-sgd --dp-instances 4 => dp_instances 4 … 4 ranks … leave two or more to each … --dp-instances 1, 2
2 --dp-strategy local-sgd --sync-interval 4 --sync-delay 4
    => sync_delay 4 … sync_interval / sync_fragments = 4/1 = 4 … sync-delay 3
2 --dp-strategy local-sgd --sync-delay 4 --average-optimizer-state
    => average_optimizer_state does not go with sync_delay 4 … --sync-delay 0
2 --dp-strategy local-sgd --optimizer one-sided-soap --average-optimizer-state
    => average_optimizer_state does not go with optimizer one-sided-soap … remove it
2 --dp-strategy gossip --check-replicas-interval 5 => check_replicas_interval 5 … dp_strategy gossip
8 --dp-strategy fully-sharded --dp-instances 3
    => dp_instances 3 must divide the dp·cp = 8·1 = 8 ranks and … --dp-instances 1, 2, 4 … --dp-strategy all-reduce
8 --cp 2 --dp-strategy distributed-optimizer --dp-instances 8
    => dp_instances 8 … dp·cp = 4·2 = 8 … leave two or more to each instance … --dp-instances 1, 2, 4
8 --dp-strategy distributed-optimizer --num-experts 8 --ep 4 --dp-instances 4
    => dp_instances 4 … 8 ranks, and the 2 of each expert, … --dp-instances 1, 2
8 --dp-instances 2 => dp_instances 2 has no effect with dp_strategy all-reduce … --dp-strategy distributed-optimizer
2 --dp-strategy fully-sharded --check-replicas-interval 5 => check_replicas_interval 5 … dp_strategy fully-sharded
2 --optimizer zero-one-adam --check-replicas-interval 5 => check_replicas_interval 5 … optimizer zero-one-adam
2 --dp-strategy gossip --wire-dtype fp16 => wire_dtype fp16 does not go with dp_strategy gossip … --wire-dtype bf16
2 --grad-compression uint8 --wire-dtype fp16 => grad_compression uint8 … wire_dtype fp16 … --wire-dtype bf16
2 --compression-warmup-steps 10 => compression_warmup_steps 10 … grad_compression none … --grad-compression onebit
2 --grad-compression uint8 --powersgd-rank 2 => powersgd_rank 2 … grad_compression uint8 … grad-compression powersgd
2 --grad-compression onebit --compression-warmup-steps 60 --train-iters 60
    => compression_warmup_steps 60 … train_iters 60 … compression-warmup-steps 10
2 --freeze-step 10 => freeze_step 10 has no effect with optimizer adam … --optimizer onebit-adam
2 --optimizer zero-one-adam --onebit-rule deepspeed
    => onebit_rule deepspeed has no effect with optimizer zero-one-adam … --optimizer onebit-adam
2 --optimizer onebit-lamb --onebit-rule deepspeed --onebit-scale tensor
    => onebit_scale tensor has no effect with onebit_rule deepspeed … remove it
2 --optimizer onebit-adam --onebit-rule deepspeed --cp 2 => cp 2 … onebit_rule deepspeed … --onebit-rule megalite
2 --optimizer onebit-lamb --dp-strategy distributed-optimizer
    => optimizer onebit-lamb … dp_strategy distributed-optimizer … dp-strategy all-reduce
2 --optimizer zero-one-adam --dp-strategy gossip
    => optimizer zero-one-adam … dp_strategy gossip … dp-strategy all-reduce
2 --optimizer onebit-adam --grad-compression topk
    => grad_compression topk … optimizer onebit-adam … grad-compression none
2 --optimizer onebit-adam --freeze-step 600 --train-iters 600 => freeze_step 600 … train_iters 600 … freeze-step 100
2 --optimizer muon --dp-strategy async-parameter-server
    => optimizer muon … dp_strategy async-parameter-server … optimizer adam
2 --optimizer lamb --dp-strategy gossip => optimizer lamb … dp_strategy gossip … --optimizer adam
2 --dp-strategy gossip --gossip-algorithm decentlam
    => gossip_algorithm decentlam corrects the momentum of SGD, not optimizer adam … optimizer sgd
2 --main-params split
    => main_params split keeps the 16 bits that bf16 parameters lack, but this run has precision fp32 … precision bf16
2 --main-params split --precision bf16 --dp-strategy diloco
    => main_params split … dp_strategy diloco … dp-strategy distributed-optimizer
2 --dp-strategy diloco --ema-decay 0.9 => ema_decay 0.9 … dp_strategy diloco … --dp-strategy all-reduce
2 --optimizer zero-one-adam --ema-decay 0.9 => ema_decay 0.9 … optimizer zero-one-adam … --optimizer onebit-adam
2 --optimizer schedule-free-adamw --lr-decay-style constant --ema-decay 0.9 => ema_decay 0.9 … schedule-free-adamw, which averages itself
2 --optimizer schedule-free-adamw --lr-decay-style constant --dp-strategy diloco
    => optimizer schedule-free-adamw … dp_strategy diloco … --dp-strategy all-reduce
2 --optimizer schedule-free-adamw --lr-decay-style constant --main-params split --bf16
    => optimizer schedule-free-adamw … main_params split … --main-params fp32
1 --optimizer schedule-free-adamw => optimizer schedule-free-adamw … lr_decay_style cosine … --lr-decay-style constant
1 --optimizer schedule-free-adamw --lr-decay-style constant --adam-beta1 0 => adam_beta1 0 … --adam-beta1 0.9
2 --qk-clip --dp-strategy local-sgd => qk_clip does not go with dp_strategy local-sgd … --dp-strategy all-reduce
2 --qk-clip --optimizer onebit-adam => qk_clip does not go with optimizer onebit-adam … --optimizer muon
1 --qk-clip --qk-layernorm => qk_clip has no effect with qk_norm … remove one of them
1 --qk-clip-alpha 0.4 => qk_clip_alpha 0.4 has no effect without qk_clip … --qk-clip
1 --lr-multipliers layers.0.* => lr_multipliers has 'layers.0.*' in it … PATTERN=FACTOR
1 --lr-multipliers a=-1 => lr_multipliers has 'a=-1' in it … PATTERN=FACTOR
2 --lr-multipliers *=0.5 --optimizer onebit-adam => lr_multipliers *=0.5 … optimizer onebit-adam … --optimizer adam
2 --lr-multipliers *=0.5 --dp-strategy gossip => lr_multipliers *=0.5 … dp_strategy gossip … all-reduce
1 --eval-ema => eval_ema needs an average … --ema-decay 0.9999
2 --precision fp64 --exp-avg-dtype bf16 => exp_avg_dtype bf16 does not go with precision fp64 … --precision fp32
2 --stochastic-rounding => stochastic_rounding … exp_avg_dtype fp32 and exp_avg_sq_dtype fp32 … exp-avg-dtype bf16
4 --dp-strategy gossip --gossip-graph one-peer --gossip-algorithm decentlam --optimizer sgd
    => gossip_algorithm decentlam … gossip_graph one-peer … gossip-graph ring
4 --dp-strategy gossip --gossip-graph one-peer --gossip-algorithm choco-sgd
    => gossip_algorithm choco-sgd … gossip_graph one-peer … gossip-graph ring
2 --dp-strategy gossip --gossip-algorithm choco-sgd --wire-dtype bf16
    => wire_dtype bf16 has no effect with gossip_algorithm choco-sgd … sync_warmup_steps 0 … --sync-warmup-steps 100
4 --dp-strategy gossip --gossip-algorithm decentlam --optimizer sgd --sgd-nesterov
    => sgd_nesterov … gossip_algorithm decentlam … --no-sgd-nesterov
2 --dp-strategy diloco --sync-interval 12 --sync-fragments 6 --num-layers 4
    => sync_fragments 6 is more than num_layers 4 … sync-fragments 4
4 --dp-strategy diloco --tp 2 --etp 1 --num-experts 4 TOP1 => etp 1 … dp_strategy diloco and tp 2 … --etp 2
2 --main-params split --precision bf16 --optimizer zero-one-adam
    => main_params split … optimizer zero-one-adam … main-params fp32
1 --num-layers 4 --optimizer-offload-fraction 0.5
    => optimizer_offload_fraction 0.5 has no effect without optimizer_cpu_offload … --optimizer-cpu-offload
1 --num-layers 4 --optimizer-cpu-offload --optimizer onebit-adam --freeze-step 1
    => optimizer_cpu_offload … optimizer onebit-adam … --optimizer adam
2 --num-layers 4 --optimizer-cpu-offload --dp-strategy diloco
    => optimizer_cpu_offload … dp_strategy diloco … distributed-optimizer
1 --num-layers 4 --bf16 --optimizer-cpu-offload --main-params split
    => optimizer_cpu_offload … main_params split … --main-params fp32
1 --num-layers 4 --optimizer-cpu-offload --optimizer sgd --sgd-momentum 0
    => optimizer_cpu_offload has no effect … sgd_momentum 0 … --sgd-momentum 0.9
2 --exp-avg-sq-dtype bf16
    => exp_avg_sq_dtype bf16 with adam_beta2 0.999 stands still … --stochastic-rounding, or use --adam-beta2 0.99
2 --optimizer zero-one-adam --cp 2 => cp 2 … optimizer zero-one-adam … leave it out, or use --optimizer onebit-adam
2 --dp-strategy gossip --reduction-order rank
    => reduction_order rank … dp_strategy gossip and sync_warmup_steps 0 … sync-warmup-steps 100
2 --dp-strategy async-parameter-server --reduction-order rank
    => reduction_order rank … dp_strategy async-parameter-server … dp-strategy all-reduce
2 --dp-strategy fused-all-reduce --ddp-bucket-size 1000
    => ddp_bucket_size 1000 … dp_strategy fused-all-reduce … dp-strategy all-reduce
2 --check-replicas-interval 61 --train-iters 60
    => check_replicas_interval 61 … train_iters 60 … check-replicas-interval 10
2 --optimizer sgd --adam-beta2 0.95 => adam_beta2 0.95 has no effect with optimizer sgd … --optimizer adam
1 --optimizer sgd --sgd-momentum 0 --sgd-nesterov
    => sgd_nesterov is a form of momentum, but the run has sgd_momentum 0 … sgd-momentum 0.9
2 --dp-strategy local-sgd --average-optimizer-state --optimizer sgd --sgd-momentum 0
    => average_optimizer_state … optimizer sgd and sgd_momentum 0 … sgd-momentum 0.9
2 --optimizer lamb --lamb-min-coeff 2 --lamb-max-coeff 1 => lamb_min_coeff 2 is above lamb_max_coeff 1 … at most 1
2 --optimizer onebit-lamb --freeze-step 9 --freeze-threshold 0.9 => freeze_threshold 0.9 … freeze_step 9
2 --optimizer onebit-adam --freeze-step 3 --train-iters 3 => freeze_step 3 … train_iters 3 … --freeze-step 1
2 --optimizer onebit-adam --freeze-step 1 --train-iters 1
    => freeze_step 1 … train_iters 1 … for so short a run use --optimizer adam
2 --optimizer onebit-adam --freeze-step 12 --train-samples 100 --global-batch-size 8
    => freeze_step 12 … train_samples 100 (12 steps) … freeze-step 2
2 --grad-compression topk --compression-warmup-steps 1 --train-samples 2
    => compression_warmup_steps 1 … train_samples 2 (1 step) … compression-warmup-steps 0
2 --optimizer zero-one-adam --train-iters 2000
    => optimizer zero-one-adam without freeze_step ends its warm-up after step 2000 … train_iters 2000 … freeze-step 333
2 --optimizer onebit-adam --adam-beta2 0.9 --lr-warmup-iters 30 --train-iters 40
    => optimizer onebit-adam without freeze_step ends its warm-up after step 40 … train_iters 40 … freeze-step 6
2 --dp-strategy gossip --sync-warmup-steps 40 --train-iters 40
    => sync_warmup_steps 40 … train_iters 40 … sync-warmup-steps 6
2 --dp-strategy local-sgd --train-iters 19
    => sync_interval 20 … sync_warmup_steps 0 and sync_delay 0 is 20 steps, more than train_iters 19 … sync-interval 19
2 --dp-strategy diloco --sync-fragments 2 --sync-delay 3 --sync-warmup-steps 10 --train-iters 32
    => sync_interval 20 … sync_warmup_steps 10 and sync_delay 3 is 33 steps, more than train_iters 32 … sync-interval 18
2 --dp-strategy diloco --sync-fragments 2 --sync-delay 3 --train-iters 10
    => sync_interval 20 … sync_warmup_steps 0 and sync_delay 3 … train_iters 10 … a run of 23 steps or more
2 --topk-density 1.5 => topk_density is 1.5 … at most 1, e.g. 0.01
2 --server-chunk-mb 0.0009 => server_chunk_mb is 0.0009 … at least 0.001, e.g. 4.0
# Batch, schedules, data, checkpoints, reports.
1 --straggler-threshold 1 => straggler_threshold is 1 … above 1, e.g. 1.2
1 --timing-log-level 0 --straggler-threshold 1.5 => straggler_threshold 1.5 … timing_log_level 0 … timing-log-level 1
1 --timing-log-level 0 --log-phases => log_phases … timing_log_level 0 … timing-log-level 1
1 --metrics cvs --run-dir r => metrics has cvs in it: did you mean csv?
1 --metrics csv => metrics csv has no folder to write to … --run-dir runs/mine
1 --metrics prometheus => metrics prometheus has no folder to write to … --run-dir runs/mine
1 --wandb-entity team => wandb_entity team has no effect without wandb_project … --wandb-project NAME
1 --metrics wandb --run-dir r => metrics wandb needs a project to write to … --wandb-project NAME
1 --metrics wandb --wandb-project tiny => metrics wandb needs a name for the run … --wandb-exp-name NAME
1 --profile => profile has no folder to write to … --run-dir runs/mine
1 --profile-step-end 20 => profile_step_end 20 has no effect without profile … --profile
1 --profile --run-dir r --profile-step-start 12
    => profile_step_start 12 and profile_step_end 12 leave no step to profile … profile-step-end 14
1 --profile --run-dir r --train-iters 5 => profile_step_end 12 is beyond the last step … profile-step-start 5
2 --profile --run-dir r --profile-ranks 0 2 => profile_ranks has 2 in it, but ranks go from 0 to 1 … profile-ranks 0
1 --record-memory-history --device cpu --run-dir r => record_memory_history … device cpu … --device cuda
1 --record-memory-history => record_memory_history has no folder to write to … --run-dir runs/mine
1 --exit-duration-in-mins 30 => exit_duration_in_mins 30 has nowhere to save … --save checkpoints
1 --exit-signals SIGTERM SIGUSR3 => exit_signals has SIGUSR3 in it: did you mean SIGUSR1?
1 --max-consecutive-skips 5 => max_consecutive_skips 5 … on_non_finite stop … --on-non-finite skip
1 --on-non-finite skip --no-check-for-nan-in-loss-and-grad => on_non_finite skip … check_for_nan_in_loss_and_grad False
2 --on-non-finite skip --dp-strategy async-parameter-server
    => on_non_finite skip … dp_strategy async-parameter-server … on-non-finite stop
1 --loss-spike-threshold 0 --loss-spike-window 50
    => loss_spike_window 50 … loss_spike_threshold 0 … loss-spike-threshold 10
1 --max-failures-at-step 5 => max_failures_at_step 5 has no effect in a run that saves nothing … save-interval 100
2 --micro-batch-size 2 --global-batch-size 10 => global_batch_size 10 … micro_batch_size·dp = 2·2 = 4 … 8 or 12
2 --global-batch-size 1 => global_batch_size 1 is … micro_batch_size·dp = 1·2 = 2 … 2
1 --train-iters 10 --train-samples 100 => train_iters 10 and train_samples 100 both set the length of the run
1 --train-samples 10 --global-batch-size 16 => train_samples 10 is less than one batch of 16 … at least 16
1 --rampup-batch-size 16 16 --global-batch-size 32
    => rampup_batch_size takes three numbers, START INCREMENT SAMPLES, got 2 … e.g. 16 16 100000
1 --rampup-batch-size 0 16 100 --global-batch-size 32 => rampup_batch_size START is 0 … at least 1, e.g. 16 16 100000
1 --rampup-batch-size 16 0 100 --global-batch-size 32
    => rampup_batch_size INCREMENT is 0 … at least 1, e.g. 16 16 100000
1 --rampup-batch-size 16 16 -1 --global-batch-size 32 => rampup_batch_size SAMPLES is -1 … at least 0, e.g. 16 16 100000
1 --rampup-batch-size 16 16 100 => rampup_batch_size needs the batch size to grow to … --global-batch-size, e.g. 32
1 --rampup-batch-size 64 16 100 --global-batch-size 32
    => rampup_batch_size starts at 64, above global_batch_size 32 … start at a multiple of 1 up to 32
1 --rampup-batch-size 16 12 100 --global-batch-size 32
    => rampup_batch_size … 16 to global_batch_size 32 … 12 … an increment of 1 or global_batch_size 28 or 40
4 --rampup-batch-size 2 4 100 --global-batch-size 32 => rampup_batch_size START 2 … micro_batch_size·dp = 1·4 = 4 … 4
4 --rampup-batch-size 4 2 100 --global-batch-size 32
    => rampup_batch_size INCREMENT 2 … micro_batch_size·dp = 1·4 = 4 … 4
1 --lr-decay-iters 5 --lr-decay-samples 5 => lr_decay_iters 5 and lr_decay_samples 5 say the same thing twice
1 --train-iters 10 --lr-warmup-samples 5 => lr_warmup_samples 5 … train_iters … lr_warmup_iters
1 --train-samples 10 --lr-decay-iters 5 => lr_decay_iters 5 … train_samples … lr_decay_samples
1 --min-lr 0.1 => min_lr 0.1 is above lr 0.001 … at most 0.001
1 --lr-decay-style constant --min-lr 1e-4 => min_lr 0.0001 has no effect with lr_decay_style constant … cosine
1 --lr-decay-style constant --lr-decay-iters 100 => lr_decay_iters 100 … lr_decay_style constant … cosine
1 --lr-warmup-iters 5 --lr-warmup-fraction 0.1 => lr_warmup_iters 5 and lr_warmup_fraction 0.1
1 --lr-warmup-init 0.1 --lr-warmup-iters 5 => lr_warmup_init 0.1 is above lr 0.001 … 0
1 --lr-warmup-init 1e-5 => lr_warmup_init 1e-05 has no effect without a warm-up … --lr-warmup-iters 100
1 --lr-warmup-iters 10 --train-iters 10 => lr_warmup_iters 10 … the decay of 10 iters … at most 9
1 --lr-wsd-decay-iters 10 => lr_wsd_decay_iters 10 has no effect with lr_decay_style cosine … --lr-decay-style WSD
1 --lr-wsd-decay-style linear => lr_wsd_decay_style linear … lr_decay_style cosine … --lr-decay-style WSD
1 --lr-decay-style WSD --train-iters 100
    => lr_decay_style WSD needs the length of its final decay … lr-wsd-decay-iters 10
1 --lr-decay-style WSD --train-iters 100 --lr-wsd-decay-iters 200
    => lr_wsd_decay_iters 200 … the decay of 100 iters … at most 100
1 --start-weight-decay 0.1 => start_weight_decay 0.1 … weight_decay_incr_style constant … linear or cosine
1 --weight-decay-incr-style linear --start-weight-decay 0.0
    => weight_decay_incr_style linear needs end_weight_decay … end-weight-decay 0.01
1 --weight-decay-incr-style cosine --start-weight-decay 0.0 --end-weight-decay 0.1 --weight-decay 0.1
    => weight_decay 0.1 … weight_decay_incr_style cosine
1 --loss-scale 1024 => loss_scale 1024 has no effect with precision fp32 … --fp16
1 --bf16 --hysteresis 2 => hysteresis 2 has no effect with precision bf16 … --fp16
1 --fp16 --loss-scale 1024 --loss-scale-window 500 => loss_scale_window 500 … a fixed loss_scale 1024
1 --fp16 --min-loss-scale 100000 => min_loss_scale 100000 is above initial_loss_scale 65536 … at most 65536
1 --data-path a --mock-data --vocab-size 8 => data_path a and mock_data are two sources of tokens
1 --data-path a --train-data-path b => data_path a and train_data_path b are two sources of tokens
1 --valid-data-path a => valid_data_path a needs train_data_path … it, or use data_path with split
1 --train-data-path a --eval-interval 10 => eval_interval 10 needs data to evaluate on … --valid-data-path
1 --mock-data => mock_data needs the range of its tokens … --vocab-size, e.g. 1024
1 --vocab-file a => vocab_file a needs merge_file … --merge-file
1 --tokenizer-model t.model --vocab-file a --merge-file b => tokenizer_model t.model and vocab_file a are two tokenizers
1 --save-interval 10 => save_interval 10 has nowhere to save … --save checkpoints or --run-dir runs/1
1 --exit-interval 10 => exit_interval 10 has nowhere to save … --save checkpoints or --run-dir runs/1
1 --async-save => async_save has no effect in a run that saves nothing … --save-interval 100
1 --save s --save-interval 10 --keep-every 100 => keep_every 100 … keep_latest … --keep-latest 2
1 --save s --save-interval 30 --keep-latest 2 --keep-every 100
    => keep_every 100 … save_interval 30 … e.g. --keep-every 120
1 --ckpt-step 10 => ckpt_step 10 has no effect without load … --load FOLDER
1 --load hf:models/llama --ckpt-step 10 => ckpt_step 10 does not go with load hf:models/llama … --load the folder of a run's checkpoints
1 --load hf:models/llama --fresh-if-missing => fresh_if_missing does not go with load hf:models/llama … remove it
1 --run-dir r --save-hf-interval 10 => save_hf_interval 10 has no name for its folders … --export-hf models/mine
1 --export-hf models/mine => export_hf models/mine has nowhere to save … --save checkpoints or --run-dir runs/1
1 --fresh-if-missing => fresh_if_missing has no effect without load … --load FOLDER
1 --mock-data --vocab-size 8 --reset-attention-mask => reset_attention_mask … mock_data … data_path
1 --data-path a --tokenizer-model t --reset-position-ids --position-embedding-type none
    => reset_position_ids … position_embedding_type none … rope or learned_absolute
1 --data-path a --vocab-size 64 --reset-attention-mask
    => reset_attention_mask needs the token that ends a document … the tokenizer that made a (--tokenizer-model FILE)
1 --train-data-path a --test-data-path b c => test_data_path b c … eval_interval … --eval-interval 100
1 --mock-data --vocab-size 64 --packing best-fit => packing best-fit has no effect with mock_data … data_path
1 --data-path a --packing best-fit --data-order megatron
    => packing best-fit … data_order megatron … packing stream or data_order megalite
1 --data-path a --packing best-fit --reset-attention-mask => reset_attention_mask … packing best-fit … packing stream
1 --kernels rmsnorm => kernels … 'rmsnorm' is neither OPERATION=BACKEND … rmsnorm=triton … apex, triton, onednn, torch
1 --kernels apex,triton => kernels … backend of all operations is given twice, as apex and triton … keep one of them
1 --tf32 --bf16 => tf32 has no effect with precision bf16 … nothing multiplies in fp32 … --precision fp32
1 --tf32 --fp64 => tf32 has no effect with precision fp64
1 --deterministic --compile => deterministic and compile do not go together … keep one of them
1 --deterministic --attention-backend cudnn => deterministic and attention_backend cudnn … use flash or auto
1 --kernels rmsnrom=triton => kernels rmsnrom=triton … did you mean rmsnorm?
1 --kernels rmsnorm=triton adam=apx => kernels adam=apx … did you mean apex?
1 --kernels adam=apex,adam=torch => kernels … adam is given twice, as apex and torch
# Batch schedules, another learning rate, rotary channels.
1 --step-batch-size-schedule 1:8 => step_batch_size_schedule '1:8' must start from 0 tokens and rise … 0:384 200B:768
1 --step-batch-size-schedule 0:8,x => step_batch_size_schedule has x in it … 0:384 200B:768
1 --step-batch-size-schedule 0:8,2K:16 --global-batch-size 8 => global_batch_size 8 is not the last size … use 16
1 --step-batch-size-schedule 0:8,200:16 --seq-length 256
    => step_batch_size_schedule 0:8,200:16 has two sizes within one sequence of seq_length 256
2 --step-batch-size-schedule 0:3,2K:16 => step_batch_size_schedule has the size 3 … micro_batch_size·dp = 1·2 = 2 … 2 or 4
1 --step-batch-size-schedule 0:8,2K:16 --rampup-batch-size 8 8 100
    => rampup_batch_size 8,8,100 and step_batch_size_schedule 0:8,2K:16 both say
1 --decoupled-min-lr 1e-5 => decoupled_min_lr 1e-05 has no effect without decoupled_lr … --decoupled-lr
1 --decoupled-lr 1e-4 --min-lr 1e-3 => decoupled_lr 0.0001 is below what it decays to … --decoupled-min-lr 0
1 --decoupled-lr 1e-4 --optimizer lamb => decoupled_lr 0.0001 does not go with optimizer lamb … --optimizer adam
2 --log-params-norm --dp-strategy gossip --sync-warmup-steps 1
    => log_params_norm does not go with dp_strategy gossip … --dp-strategy all-reduce
1 --log-gradient-noise-scale => log_gradient_noise_scale compares … has dp 1; start more ranks
4 --log-gradient-noise-scale --cp 2 => log_gradient_noise_scale does not go with cp 2 … use --cp 1
2 --log-gradient-noise-scale --num-experts 4 --ep 2
    => log_gradient_noise_scale does not go with ep 2 and etp 1: … other samples than the rest; use --ep 1
2 --log-gradient-noise-scale --dp-strategy fully-sharded
    => log_gradient_noise_scale does not go with dp_strategy fully-sharded … use --dp-strategy all-reduce
2 --log-gradient-noise-scale --dp-strategy zero2
    => log_gradient_noise_scale does not go with shard_gradients … use --no-shard-gradients
2 --log-gradient-noise-scale --grad-compression uint8
    => log_gradient_noise_scale does not go with grad_compression uint8 … use --grad-compression none
2 --log-gradient-noise-scale --optimizer onebit-adam
    => log_gradient_noise_scale does not go with optimizer onebit-adam … use --optimizer adam
1 --position-embedding-type rope --kv-channels 6 --rotary-percent 0.5
    => rotary_percent 0.5 of a head size of 6 is 3 channels … use 1 or 0.5
1 --rotary-interleaved => rotary_interleaved has no effect with position_embedding_type learned_absolute … rope
# Messages between stages.
1 --pipeline-compression uint8 => pipeline_compression uint8 has no effect with pp 1 … pp 2 or more
2 --pp 2 --pipeline-compression topk => pipeline_compression is 'topk' … e.g. topk:0.25
2 --pp 2 --bf16 --pipeline-compression topk:0.4
    => pipeline_compression topk:0.4 sends no fewer bytes than the whole in precision bf16 … share below 0.33
2 --pp 2 --bf16 --pipeline-compression bf16
    => pipeline_compression bf16 sends no fewer bytes than the whole in precision bf16; use uint8
# Elastic runs.
1 --elastic-cluster dgx-h100 => elastic_cluster dgx-h100 has no effect without elastic … --elastic
2 --elastic --run-dir r --save-interval 5 --load r/checkpoints
    => elastic needs global_batch_size … e.g. --global-batch-size 512
2 --elastic --global-batch-size 8 --run-dir r --save-interval 5 => elastic needs load … save-interval 100
2 --elastic --global-batch-size 8 --load r/checkpoints => elastic needs save_interval … save-interval 100
2 --elastic --global-batch-size 8 --run-dir r --save-interval 5 --load s
    => elastic continues from what it saves, but the run has load s and saves to r/checkpoints … load r/checkpoints
2 ELASTIC --finetune => elastic and finetune contradict
2 ELASTIC --ckpt-step 5 => elastic and ckpt_step 5 contradict
2 ELASTIC --dp-strategy gossip
    => elastic and dp_strategy gossip contradict … all-reduce or distributed-optimizer or fully-sharded
2 ELASTIC --pp 2 --pipeline-compression uint8 => elastic and pipeline_compression uint8 contradict … none
2 ELASTIC --grad-compression uint8 => elastic and grad_compression uint8 contradict … none
2 ELASTIC --optimizer onebit-adam --freeze-step 16
    => elastic and optimizer onebit-adam contradict … adam or sgd or lamb or muon
2 ELASTIC --pp 2 --pipeline-schedule-file s.csv => elastic and pipeline_schedule_file s.csv contradict
2 ELASTIC --pp 2 --pipeline-schedule auto => elastic and pipeline_schedule auto contradict … pipeline-schedule 1f1b
"""


def parts_of(table: str) -> list[tuple[str, list[str]]]:
    """(what is asked, parts of the message in order), from lines ASKED => PART … PART, which may be broken before the =>."""
    lines = [line for line in table.replace("\n    =>", " =>").splitlines() if line and not line.startswith("#")]
    return [(asked, message.split(" … ")) for asked, _, message in (line.partition(" => ") for line in lines)]


def says(message: str, parts: list[str]) -> bool:
    """The message has the parts in their order."""
    found = re.search(".*".join(re.escape(part.replace("\\n", "\n")) for part in parts), message, re.DOTALL)
    return found is not None


def rows() -> list[tuple[int, str, list[str]]]:
    """(world size, command line, parts of the message), from lines WORLD FLAGS => PART … PART."""
    found = []
    for asked, parts in parts_of(_TABLE.replace("ELASTIC", ELASTIC).replace("TOP1", TOP1)):
        world_size, _, flags = asked.partition(" ")
        found.append((int(world_size), flags, parts))
    return found
