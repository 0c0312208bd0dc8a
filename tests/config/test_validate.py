"""Every rule of `validate`, by the exact message a user gets; and what validation fills in."""

import pytest

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace, settings
from megalite.config.errors import ConfigError
from megalite.config.files import dump, level_from_text
from megalite.config.flags import parse_arguments
from megalite.config.merge import merge
from megalite.config.presets import preset_names
from megalite.config.rules.ranges import BOUNDS
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable, validate

# (world size, command line, message)
RULES = [
    (1, "--num-layers 0", "num_layers is 0; it must be at least 1, e.g. 1"),
    (1, "--seed -1", "seed is -1; it must be at least 0, e.g. 1234"),
    (1, "--lr 0", "lr is 0; it must be above 0, e.g. 0.001"),
    (1, "--hidden-dropout 1", "hidden_dropout is 1; it must be below 1, e.g. 0.1"),
    (1, "--adam-beta2 1", "adam_beta2 is 1; it must be below 1, e.g. 0.999"),
    (1, "--clip-grad -0.5", "clip_grad is -0.5; it must be at least 0, e.g. 1"),
    (1, "--pipeline-layers 2,-1 --pp 2", "pipeline_layers has -1 in it; each must be at least 0, e.g. 1"),
    (1, "--lr-warmup-fraction 1", "lr_warmup_fraction is 1; it must be below 1, e.g. 0.01"),
    (1, "--eval-interval 0", "eval_interval is 0; it must be at least 1, e.g. 1"),
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
    (
        8,
        "--tp 2 --pp 2 --dp 3",
        "dp 3 does not fit: world size 8 / (tp·pp·cp = 4) is 2; use --dp 2 or start 12 ranks",
    ),
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
        "--pp 2 --vpp 2 --num-layers 4 --pipeline-schedule gpipe --microbatch-group-size 4",
        "microbatch_group_size_per_virtual_pipeline_stage 4 has no effect with gpipe: only the interleaved schedule has groups; use --pipeline-schedule auto, or remove it",
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
    (2, "--ep 2", "ep 2 has no effect without experts; add --num-experts 4 or use ep 1"),
    (1, "--etp 1", "etp 1 has no effect without experts; add --num-experts 8 or remove it"),
    (
        1,
        "--moe-router-topk 1",
        "moe_router_topk 1 has no effect without experts; add --num-experts 8 or remove it",
    ),
    (1, "--num-experts 2 --moe-router-topk 3", "moe_router_topk 3 is more than num_experts 2; use at most 2"),
    (3, "--num-experts 8 --ep 3", "num_experts 8 is not divisible by ep 3; use ep 1, 2, 4, 8"),
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
        4,
        "--tp 4 --num-experts 4 --ffn-hidden-size 90 --etp 4",
        "ffn_hidden_size 90 is not divisible by etp 4; use etp 1, 2",
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
    (1, "--norm-epsilon 0", "norm_epsilon is 0; it must be above 0, e.g. 1e-05"),
    (1, "--pp 0", "pp is 0; it must be at least 1, e.g. 1"),
    (1, "--peak-tflops 0", "peak_tflops is 0; it must be above 0, e.g. 312"),
    (1, "--log-interval 0", "log_interval is 0; it must be at least 1, e.g. 1"),
    (1, "--micro-batch-size 0", "micro_batch_size is 0; it must be at least 1, e.g. 1"),
    (1, "--adam-eps 0", "adam_eps is 0; it must be above 0, e.g. 1e-08"),
    (1, "--vocab-size 0", "vocab_size is 0; it must be at least 1, e.g. 1"),
    (1, "--attention-dropout 1.5", "attention_dropout is 1.5; it must be below 1, e.g. 0.1"),
    (1, "--hidden-dropout -0.1", "hidden_dropout is -0.1; it must be at least 0, e.g. 0.1"),
    (
        4,
        "--cp 2 --etp 2 --num-experts 4 --ep 4",
        "the tp·cp·dp = 4 ranks of a pipeline stage are not a multiple of etp·ep = 2·4 = 8; choose etp·ep among 1, 2, 4",
    ),
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
    (
        2,
        "--pp 2 --num-layers 4 --pipeline-layers 0,4",
        "pipeline_layers 0,4 leaves stage 0 without a layer; only the last, which has the head, can do without: use 2,2",
    ),
    (
        2,
        "--micro-batch-size 2 --global-batch-size 10",
        "global_batch_size 10 is not a multiple of micro_batch_size·dp = 2·2 = 4; use 8 or 12",
    ),
    (
        2,
        "--global-batch-size 1",
        "global_batch_size 1 is not a multiple of micro_batch_size·dp = 1·2 = 2; use 2",
    ),
    (
        1,
        "--train-iters 10 --train-samples 100",
        "train_iters 10 and train_samples 100 both set the length of the run; keep one of them",
    ),
    (
        1,
        "--train-samples 10 --global-batch-size 16",
        "train_samples 10 is less than one batch of 16; use at least 16",
    ),
    (
        1,
        "--rampup-batch-size 16 16 --global-batch-size 32",
        "rampup_batch_size takes three numbers, START INCREMENT SAMPLES, got 2; e.g. 16 16 100000",
    ),
    (
        1,
        "--rampup-batch-size 0 16 100 --global-batch-size 32",
        "rampup_batch_size START is 0; it must be at least 1, e.g. 16 16 100000",
    ),
    (
        1,
        "--rampup-batch-size 16 0 100 --global-batch-size 32",
        "rampup_batch_size INCREMENT is 0; it must be at least 1, e.g. 16 16 100000",
    ),
    (
        1,
        "--rampup-batch-size 16 16 -1 --global-batch-size 32",
        "rampup_batch_size SAMPLES is -1; it must be at least 0, e.g. 16 16 100000",
    ),
    (
        1,
        "--rampup-batch-size 16 16 100",
        "rampup_batch_size needs the batch size to grow to; add --global-batch-size, e.g. 32",
    ),
    (
        1,
        "--rampup-batch-size 64 16 100 --global-batch-size 32",
        "rampup_batch_size starts at 64, above global_batch_size 32; start at a multiple of 1 up to 32",
    ),
    (
        1,
        "--rampup-batch-size 16 12 100 --global-batch-size 32",
        "rampup_batch_size cannot go from 16 to global_batch_size 32 in increments of 12; use an increment of 1 or global_batch_size 28 or 40",
    ),
    (
        4,
        "--rampup-batch-size 2 2 100 --global-batch-size 32",
        "rampup_batch_size START 2 is not a multiple of micro_batch_size·dp = 1·4 = 4; use 4",
    ),
    (
        4,
        "--rampup-batch-size 4 2 100 --global-batch-size 32",
        "rampup_batch_size INCREMENT 2 is not a multiple of micro_batch_size·dp = 1·4 = 4; use 4",
    ),
    (
        1,
        "--lr-decay-iters 5 --lr-decay-samples 5",
        "lr_decay_iters 5 and lr_decay_samples 5 say the same thing twice; keep one of them",
    ),
    (
        1,
        "--train-iters 10 --lr-warmup-samples 5",
        "lr_warmup_samples 5 does not go with train_iters, in which the length of this run is given; use lr_warmup_iters",
    ),
    (
        1,
        "--train-samples 10 --lr-decay-iters 5",
        "lr_decay_iters 5 does not go with train_samples, in which the length of this run is given; use lr_decay_samples",
    ),
    (1, "--min-lr 0.1", "min_lr 0.1 is above lr 0.001; use min_lr 0.0001"),
    (
        1,
        "--lr-decay-style constant --min-lr 1e-4",
        "min_lr 0.0001 has no effect with lr_decay_style constant; use cosine or remove it",
    ),
    (
        1,
        "--lr-decay-style constant --lr-decay-iters 100",
        "lr_decay_iters 100 has no effect with lr_decay_style constant; use cosine or remove it",
    ),
    (
        1,
        "--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
        "lr_warmup_iters 5 and lr_warmup_fraction 0.1 both set the length of the warm-up; keep one of them",
    ),
    (1, "--lr-warmup-init 0.1 --lr-warmup-iters 5", "lr_warmup_init 0.1 is above lr 0.001; use 0"),
    (
        1,
        "--lr-warmup-init 1e-5",
        "lr_warmup_init 1e-05 has no effect without a warm-up; add --lr-warmup-iters 100 or remove it",
    ),
    (
        1,
        "--lr-warmup-iters 10 --train-iters 10",
        "lr_warmup_iters 10 is not shorter than the decay of 10 iters; use at most 9",
    ),
    (
        1,
        "--lr-warmup-samples 10 --train-samples 10",
        "lr_warmup_samples 10 is not shorter than the decay of 10 samples; use at most 9",
    ),
    (
        1,
        "--lr-wsd-decay-iters 10",
        "lr_wsd_decay_iters 10 has no effect with lr_decay_style cosine; use --lr-decay-style WSD or remove it",
    ),
    (
        1,
        "--lr-wsd-decay-style linear",
        "lr_wsd_decay_style linear has no effect with lr_decay_style cosine; use --lr-decay-style WSD or remove it",
    ),
    (
        1,
        "--lr-decay-style WSD --train-iters 100",
        "lr_decay_style WSD needs the length of its final decay; add --lr-wsd-decay-iters 10",
    ),
    (
        1,
        "--lr-decay-style WSD --train-iters 100 --lr-wsd-decay-iters 200",
        "lr_wsd_decay_iters 200 is longer than the decay of 100 iters; use at most 100",
    ),
    (
        1,
        "--start-weight-decay 0.1",
        "start_weight_decay 0.1 has no effect with weight_decay_incr_style constant; use linear or cosine, or remove it",
    ),
    (
        1,
        "--end-weight-decay 0.1",
        "end_weight_decay 0.1 has no effect with weight_decay_incr_style constant; use linear or cosine, or remove it",
    ),
    (
        1,
        "--weight-decay-incr-style linear --start-weight-decay 0.0",
        "weight_decay_incr_style linear needs end_weight_decay; add --end-weight-decay 0.01",
    ),
    (
        1,
        "--weight-decay-incr-style cosine --start-weight-decay 0.0 --end-weight-decay 0.1 --weight-decay 0.1",
        "weight_decay 0.1 has no effect with weight_decay_incr_style cosine, which moves from start_weight_decay to end_weight_decay; remove it",
    ),
    (1, "--loss-scale 1024", "loss_scale 1024 has no effect with precision fp32; use --fp16 or remove it"),
    (1, "--bf16 --hysteresis 2", "hysteresis 2 has no effect with precision bf16; use --fp16 or remove it"),
    (
        1,
        "--fp16 --loss-scale 1024 --loss-scale-window 500",
        "loss_scale_window 500 has no effect with a fixed loss_scale of 1024; remove one of them",
    ),
    (
        1,
        "--fp16 --min-loss-scale 100000",
        "min_loss_scale 100000 is above initial_loss_scale 65536; use at most 65536",
    ),
    (
        1,
        "--data-path a --mock-data --vocab-size 8",
        "data_path a and mock_data are two sources of tokens; keep one of them",
    ),
    (
        1,
        "--data-path a --train-data-path b",
        "data_path a and train_data_path b are two sources of tokens; keep one of them",
    ),
    (1, "--valid-data-path a", "valid_data_path needs train_data_path; add it, or use data_path with split"),
    (1, "--split 9,1,0", "split 9,1,0 has no effect without data_path; use data_path or remove it"),
    (
        1,
        "--train-data-path a --split 9,1,0",
        "split 9,1,0 has no effect with train_data_path; use data_path or remove it",
    ),
    (
        1,
        "--mock-data --vocab-size 8 --split 9,1,0",
        "split 9,1,0 has no effect with mock_data; use data_path or remove it",
    ),
    (
        1,
        "--train-data-path a --eval-interval 10",
        "eval_interval 10 needs data to evaluate on; add --valid-data-path or remove it",
    ),
    (1, "--mock-data", "mock_data needs the range of its tokens; add --vocab-size, e.g. 1024"),
    (1, "--vocab-file a", "vocab_file a needs merge_file; add --merge-file"),
    (1, "--merge-file a", "merge_file a needs vocab_file; add --vocab-file"),
    (
        1,
        "--tokenizer-model t.model --vocab-file a --merge-file b",
        "tokenizer_model t.model and vocab_file a are two tokenizers; keep one of them",
    ),
    (
        1,
        "--save-interval 10",
        "save_interval 10 has nowhere to save; add --save checkpoints or --run-dir runs/1",
    ),
    (
        1,
        "--exit-interval 10",
        "exit_interval 10 would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1",
    ),
    (1, "--ckpt-step 10", "ckpt_step 10 has no effect without load; add --load FOLDER or remove it"),
    (1, "--finetune", "finetune has no effect without load; add --load FOLDER or remove it"),
    (1, "--fresh-if-missing", "fresh_if_missing has no effect without load; add --load FOLDER or remove it"),
    (
        1,
        "--eval-iters 10",
        "eval_iters 10 has no effect without eval_interval; add --eval-interval 100 or remove it",
    ),
]


@pytest.mark.parametrize(
    ("world_size", "flags", "message"), RULES, ids=[f"{row[0]}: {row[1]}" for row in RULES]
)
def test_rule(world_size: int, flags: str, message: str) -> None:
    invocation = parse_arguments(flags.split())
    with pytest.raises(ConfigError) as error:
        validate(invocation.config, world_size, invocation.explicit)
    assert str(error.value) == message


# (world size, command line): just inside a rule above
LEGAL = [
    (1, ""),
    (8, "--tp 2 --pp 2 --dp 2"),
    (4, "--tp 2 --sequence-parallel"),
    (4, "--pp 2 --vpp 2 --num-layers 4 --microbatch-group-size 2 --global-batch-size 4"),
    (2, "--overlap-param-gather --use-distributed-optimizer"),
    (2, "--no-overlap-param-gather"),
    (4, "--num-experts 8 --ep 4 --etp 1 --moe-router-topk 1"),
    (1, "--position-embedding-type rope --rotary-base 500000"),
    (1, "--seq-length 256 --max-position-embeddings 256"),
    (
        3,
        "--tp 3 --num-attention-heads 3 --hidden-size 96 --vocab-size 1000 --make-vocab-size-divisible-by 384",
    ),
    (2, "--cp 2 --seq-length 100"),
    (2, "--pp 2 --num-layers 5 --pipeline-layers 1,4"),
    (1, "--rampup-batch-size 32 7 100 --global-batch-size 32"),
    (1, "--rampup-batch-size 16 16 5859375 --global-batch-size 1536"),
    (4, "--rampup-batch-size 4 4 100 --global-batch-size 32"),
    (1, "--lr-warmup-iters 9 --train-iters 10"),
    (1, "--lr-warmup-iters 0 --train-iters 1"),
    (1, "--lr-decay-style WSD --train-iters 100 --lr-wsd-decay-iters 100 --lr-wsd-decay-style linear"),
    (1, "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1"),
    (1, "--fp16 --hysteresis 3"),
    (1, "--fp16 --loss-scale 1024"),
    (1, "--train-data-path a --valid-data-path b --eval-interval 10 --eval-iters 2"),
    (1, "--data-path a --split 9,1,0"),
    (1, "--vocab-file a --merge-file b"),
    (1, "--save-interval 10 --run-dir r"),
    (1, "--load a --ckpt-step 10 --finetune --fresh-if-missing"),
]


@pytest.mark.parametrize(("world_size", "flags"), LEGAL)
def test_legal_neighbour(world_size: int, flags: str) -> None:
    invocation = parse_arguments(flags.split())
    config = validate(invocation.config, world_size, invocation.explicit)
    assert config.parallel.dp is not None and config.training.global_batch_size is not None
    assert validate(config, world_size, invocation.explicit) == config


def test_fills_in_what_was_left_open() -> None:
    config = validate(replace(RunConfig(), tp=2, pp=2, micro_batch_size=3, activation="swiglu"), 16)
    assert config.parallel.dp == 4
    assert config.training.global_batch_size == 12
    assert config.model.max_position_embeddings == config.training.seq_length == 256
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.ffn_hidden_size) == (
        4,
        32,
        320,
    )
    assert config.parallel.etp is None
    assert validate(replace(config, num_experts=4), 16).parallel.etp == 2


def test_every_number_is_bounded() -> None:
    unbounded = {name for name, s in settings().items() if s.type in (int, float)} - set(BOUNDS)
    assert unbounded == {"rampup_batch_size"}  # checked by a rule of its own


def test_bad_choice_in_code() -> None:
    with pytest.raises(ConfigError, match="precision cannot be 'fp31': did you mean fp32"):
        validate(replace(RunConfig(), precision="fp31"), 1)


@pytest.mark.parametrize("name", preset_names())
def test_resolved_config_reloads_and_validates_to_itself(name: str) -> None:
    invocation = parse_arguments(["--preset", name, "--train-iters", "10"])
    config = validate(invocation.config, 1, invocation.explicit)
    reloaded = merge([level_from_text(dump(config), "file resolved.yaml")])
    assert reloaded.config == config
    assert validate(reloaded.config, 1, reloaded.explicit) == config


def test_explicit_from_a_file_means_other_than_the_default() -> None:
    level = level_from_text("eval_iters: 10\nhysteresis: 3\n", "file a.yaml")
    merged = merge([level])
    assert merged.explicit == {"hysteresis"}
    with pytest.raises(ConfigError, match="hysteresis 3 has no effect with precision fp32"):
        validate(merged.config, 1, merged.explicit)


def test_microbatch_counts_with_ramp_up() -> None:
    flags = "--rampup-batch-size 4 4 100 --global-batch-size 16 --pp 2"
    config = validate(parse_arguments(flags.split()).config, 4)
    assert microbatch_counts(config) == (2, 4, 6, 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--mock-data --vocab-size 8",
            "the length of the run is not set; add --train-iters 1000 (or --train-samples)",
        ),
        (
            "--train-iters 1",
            "there is no data to train on; add --data-path PREFIX (or --mock-data --vocab-size 1024)",
        ),
        (
            "--train-iters 1 --data-path a",
            "the size of the vocabulary is not known; add --tokenizer-model FILE or --vocab-size 50257",
        ),
    ],
)
def test_what_training_needs(flags: str, message: str) -> None:
    config = validate(parse_arguments(flags.split()).config, 1)
    with pytest.raises(ConfigError) as error:
        require_startable(config)
    assert str(error.value) == message


def test_startable() -> None:
    flags = "--train-iters 1 --data-path a --tokenizer-model t"
    require_startable(validate(parse_arguments(flags.split()).config, 1))
