"""Data-parallel strategies, optimizers and number formats that `validate` refuses, with the exact message."""

STRATEGIES = [
    (
        2,
        "--sync-interval 8",
        "sync_interval 8 has no effect with dp_strategy all-reduce; use --dp-strategy local-sgd or remove it",
    ),
    (
        2,
        "--dp-strategy local-sgd --outer-lr 0.5",
        "outer_lr 0.5 has no effect with dp_strategy local-sgd; use --dp-strategy diloco or remove it",
    ),
    (
        2,
        "--dp-strategy fully-sharded --grad-compression topk",
        "grad_compression topk has no effect with dp_strategy fully-sharded; use --dp-strategy all-reduce or remove it",
    ),
    (
        2,
        "--dp-strategy parameter-server --shard-gradients",
        "shard_gradients has no effect with dp_strategy parameter-server; use --dp-strategy distributed-optimizer or remove it",
    ),
    (
        4,
        "--dp-strategy gossip --cp 2",
        "cp 2 does not go with dp_strategy gossip: its ranks take steps of their own, and those of a cp group would have to take them together; use --cp 1, or --dp-strategy all-reduce",
    ),
    (
        2,
        "--dp-strategy async-parameter-server --ep 2 --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax",
        "ep 2 does not go with dp_strategy async-parameter-server: its ranks take steps of their own, and those of a ep group would have to take them together; use --ep 1, or --dp-strategy all-reduce",
    ),
    (
        4,
        "--dp-strategy fully-sharded --pp 2 --num-layers 4",
        "pp 2 does not go with dp_strategy fully-sharded, which gathers every layer for every microbatch; use --pp 1, or --dp-strategy distributed-optimizer",
    ),
    (
        2,
        "--dp-strategy async-parameter-server --precision fp16",
        "precision fp16 does not go with dp_strategy async-parameter-server: its ranks never agree on a loss scale; use --precision bf16",
    ),
    (
        5,
        "--dp-strategy gossip --gossip-graph one-peer",
        "gossip_graph one-peer pairs up the data-parallel ranks, but dp is 5; use --gossip-graph ring, or dp 4 or 6",
    ),
    (
        2,
        "--dp-strategy diloco --sync-interval 10 --sync-fragments 4",
        "sync_interval 10 is not divisible by sync_fragments 4; use fragments 1, 2, 5, 10",
    ),
    (
        2,
        "--dp-strategy diloco --sync-interval 10 --sync-fragments 5 --sync-delay 2 --num-layers 6",
        "sync_delay 2 is not below sync_interval / sync_fragments = 10/5 = 2: the next exchange would start before this one is used; use --sync-delay 1 or less",
    ),
    (
        2,
        "--dp-strategy gossip --check-replicas-interval 5",
        "check_replicas_interval 5 has no effect with dp_strategy gossip, where each rank has weights of its own; remove it",
    ),
    (
        2,
        "--dp-strategy fully-sharded --check-replicas-interval 5",
        "check_replicas_interval 5 has no effect with dp_strategy fully-sharded, where no weight is on two ranks; remove it",
    ),
    (
        2,
        "--optimizer zero-one-adam --check-replicas-interval 5",
        "check_replicas_interval 5 does not go with optimizer zero-one-adam, whose ranks take local steps; remove it",
    ),
    (
        2,
        "--compression-warmup-steps 10",
        "compression_warmup_steps 10 has no effect with grad_compression none; use --grad-compression onebit, or remove it",
    ),
    (
        2,
        "--grad-compression uint8 --powersgd-rank 2",
        "powersgd_rank 2 has no effect with grad_compression uint8; use --grad-compression powersgd, or remove it",
    ),
    (
        2,
        "--grad-compression onebit --compression-warmup-steps 60 --train-iters 60",
        "compression_warmup_steps 60 is not below train_iters 60: nothing would ever be compressed; use --compression-warmup-steps 10",
    ),
    (
        2,
        "--freeze-step 10",
        "freeze_step 10 has no effect with optimizer adam; use --optimizer onebit-adam or remove it",
    ),
    (
        2,
        "--optimizer onebit-lamb --dp-strategy distributed-optimizer",
        "optimizer onebit-lamb does not go with dp_strategy distributed-optimizer: every rank needs the whole second moment to read what others send; use --dp-strategy all-reduce, or --optimizer lamb",
    ),
    (
        2,
        "--optimizer zero-one-adam --dp-strategy gossip",
        "optimizer zero-one-adam does not go with dp_strategy gossip: both say what ranks exchange; use --dp-strategy all-reduce, or --optimizer adam",
    ),
    (
        2,
        "--optimizer onebit-adam --grad-compression topk",
        "grad_compression topk does not go with optimizer onebit-adam, which exchanges no gradients once it is frozen; use --grad-compression none",
    ),
    (
        2,
        "--optimizer onebit-adam --freeze-step 600 --train-iters 600",
        "freeze_step 600 is not below train_iters 600: nothing would ever be compressed; use --freeze-step 100",
    ),
    (
        2,
        "--optimizer muon --dp-strategy async-parameter-server",
        "optimizer muon does not go with dp_strategy async-parameter-server: it needs whole tensors, of which servers hold parts that change at different times; use --optimizer adam",
    ),
    (
        2,
        "--optimizer lamb --dp-strategy gossip",
        "optimizer lamb does not go with dp_strategy gossip: its trust ratios are of weights that all ranks share; use --optimizer adam, or --dp-strategy all-reduce",
    ),
    (
        2,
        "--dp-strategy gossip --gossip-algorithm decentlam",
        "gossip_algorithm decentlam corrects the momentum of SGD, but optimizer is adam; use --optimizer sgd, or --gossip-algorithm d-psgd",
    ),
    (
        2,
        "--main-params split",
        "main_params split keeps the 16 bits that bf16 parameters lack, but precision is fp32; use --precision bf16 or remove it",
    ),
    (
        2,
        "--main-params split --precision bf16 --dp-strategy diloco",
        "main_params split does not go with dp_strategy diloco; use --dp-strategy distributed-optimizer, or --main-params fp32",
    ),
    (
        2,
        "--precision fp64 --exp-avg-dtype bf16",
        "bf16 moments (exp_avg_dtype, exp_avg_sq_dtype) do not go with precision fp64; use --precision fp32",
    ),
    (
        2,
        "--stochastic-rounding",
        "stochastic_rounding has no effect with exp_avg_dtype fp32 and exp_avg_sq_dtype fp32; use --exp-avg-dtype bf16 or remove it",
    ),
    (
        4,
        "--dp-strategy gossip --gossip-graph one-peer --gossip-algorithm decentlam --optimizer sgd",
        "gossip_algorithm decentlam does not go with gossip_graph one-peer: its correction grows without bound from 6 ranks on; use --gossip-graph ring",
    ),
    (
        4,
        "--dp-strategy gossip --gossip-algorithm decentlam --optimizer sgd --sgd-nesterov",
        "sgd_nesterov does not go with gossip_algorithm decentlam, which corrects plain momentum; use --no-sgd-nesterov",
    ),
    (
        2,
        "--dp-strategy diloco --sync-interval 12 --sync-fragments 6 --num-layers 4",
        "sync_fragments 6 is more than num_layers 4: some would be empty; use --sync-fragments 4 or less",
    ),
    (
        4,
        "--dp-strategy diloco --tp 2 --etp 1 --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax",
        "etp 1 does not go with dp_strategy diloco and tp 2: experts would have other replicas than the rest; use --etp 2",
    ),
    (
        2,
        "--main-params split --precision bf16 --optimizer zero-one-adam",
        "main_params split does not go with optimizer zero-one-adam, which keeps parameters of its own; use --main-params fp32",
    ),
    (
        2,
        "--exp-avg-sq-dtype bf16",
        "exp_avg_sq_dtype bf16 with adam_beta2 0.999 stands still when rounded to the nearest, since a step changes less than bf16 resolves; add --stochastic-rounding, or use --adam-beta2 0.99",
    ),
    (
        2,
        "--optimizer zero-one-adam --cp 2",
        "cp 2 does not go with optimizer zero-one-adam, whose ranks take steps of their own; use --cp 1, or --optimizer onebit-adam",
    ),
    (2, "--topk-density 1.5", "topk_density is 1.5; it must be at most 1, e.g. 0.01"),
]
