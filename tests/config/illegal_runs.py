"""Settings of batch, schedules, data and checkpoints that `validate` refuses, with the exact message."""

from megalite.config.compute import OPERATIONS

RUNS = [
    (1, "--seed -1", "seed is -1; it must be at least 0, e.g. 1234"),
    (1, "--lr 0", "lr is 0; it must be above 0, e.g. 0.001"),
    (1, "--adam-beta2 1", "adam_beta2 is 1; it must be below 1, e.g. 0.999"),
    (1, "--clip-grad -0.5", "clip_grad is -0.5; it must be at least 0, e.g. 1"),
    (1, "--lr-warmup-fraction 1", "lr_warmup_fraction is 1; it must be below 1, e.g. 0.01"),
    (1, "--eval-interval 0", "eval_interval is 0; it must be at least 1, e.g. 1"),
    (1, "--peak-tflops 0", "peak_tflops is 0; it must be above 0, e.g. 312"),
    (1, "--timing-log-level 2", "timing_log_level is 2; it must be at most 1, e.g. 1"),
    (1, "--straggler-threshold 1", "straggler_threshold is 1; it must be above 1, e.g. 1.2"),
    (
        1,
        "--timing-log-level 0 --straggler-threshold 1.5",
        "straggler_threshold 1.5 has no effect with timing_log_level 0; use --timing-log-level 1 or remove it",
    ),
    (1, "--metrics cvs --run-dir r", "metrics has 'cvs' in it: did you mean csv?; each is one of csv, wandb"),
    (1, "--metrics csv", "metrics csv has no folder to write to; add --run-dir runs/mine"),
    (
        1,
        "--wandb-project tiny",
        "wandb_project tiny has no effect without metrics wandb; add --metrics wandb or remove it",
    ),
    (1, "--metrics wandb", "metrics wandb needs a project to write to; add --wandb-project NAME"),
    (
        1,
        "--metrics wandb --wandb-project tiny",
        "metrics wandb needs a name for the run; add --wandb-exp-name NAME or --run-dir runs/NAME",
    ),
    (1, "--profile", "profile has no folder to write to; add --run-dir runs/mine"),
    (1, "--profile-step-end 20", "profile_step_end 20 has no effect without profile; add --profile or remove it"),
    (
        1,
        "--profile --run-dir r --profile-step-start 12",
        "profile_step_start 12 and profile_step_end 12 leave no step to profile; use --profile-step-end 14",
    ),
    (
        1,
        "--profile --run-dir r --train-iters 5",
        "profile_step_end 12 is beyond the last step: train_iters is 5; use --profile-step-start 5 --profile-step-end 6",
    ),
    (
        2,
        "--profile --run-dir r --profile-ranks 0 2",
        "profile_ranks has 2 in it, but ranks go from 0 to 1; use --profile-ranks 0",
    ),
    (
        1,
        "--record-memory-history --device cpu --run-dir r",
        "record_memory_history has no effect with device cpu; use --device cuda or remove it",
    ),
    (1, "--record-memory-history", "record_memory_history has no folder to write to; add --run-dir runs/mine"),
    (1, "--log-interval 0", "log_interval is 0; it must be at least 1, e.g. 1"),
    (1, "--micro-batch-size 0", "micro_batch_size is 0; it must be at least 1, e.g. 1"),
    (1, "--adam-eps 0", "adam_eps is 0; it must be above 0, e.g. 1e-08"),
    (1, "--exit-duration-in-mins 0", "exit_duration_in_mins is 0; it must be above 0, e.g. 230"),
    (1, "--loss-spike-window 4", "loss_spike_window is 4; it must be at least 8, e.g. 100"),
    (
        1,
        "--exit-duration-in-mins 30",
        "exit_duration_in_mins 30 would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1",
    ),
    (
        1,
        "--exit-file stop",
        "exit_file stop would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1",
    ),
    (
        1,
        "--exit-signals SIGTERM SIGUSR3",
        "exit_signals cannot have SIGUSR3: did you mean SIGUSR1? (any of SIGTERM, SIGUSR1, SIGHUP; Ctrl-C, SIGINT, "
        "always stops a run)",
    ),
    (
        1,
        "--max-consecutive-skips 5",
        "max_consecutive_skips 5 has no effect with on_non_finite stop; use --on-non-finite skip or remove it",
    ),
    (
        1,
        "--on-non-finite skip --no-check-for-nan-in-loss-and-grad",
        "on_non_finite skip does not go with check_for_nan_in_loss_and_grad false, which lets such steps pass; keep one of "
        "them",
    ),
    (
        2,
        "--on-non-finite skip --dp-strategy async-parameter-server",
        "on_non_finite skip does not go with dp_strategy async-parameter-server, where the server waits for a push in every "
        "step; use --on-non-finite stop",
    ),
    (
        1,
        "--loss-spike-threshold 0 --loss-spike-window 50",
        "loss_spike_window 50 has no effect with loss_spike_threshold 0; use --loss-spike-threshold 10 or remove it",
    ),
    (
        1,
        "--max-failures-at-step 5",
        "max_failures_at_step 5 has no effect in a run that saves nothing; add --save-interval 100 or remove it",
    ),
    (
        2,
        "--micro-batch-size 2 --global-batch-size 10",
        "global_batch_size 10 is not a multiple of micro_batch_size·dp = 2·2 = 4; use 8 or 12",
    ),
    (2, "--global-batch-size 1", "global_batch_size 1 is not a multiple of micro_batch_size·dp = 1·2 = 2; use 2"),
    (
        1,
        "--train-iters 10 --train-samples 100",
        "train_iters 10 and train_samples 100 both set the length of the run; keep one of them",
    ),
    (1, "--train-samples 10 --global-batch-size 16", "train_samples 10 is less than one batch of 16; use at least 16"),
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
        "--rampup-batch-size 2 4 100 --global-batch-size 32",
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
    (1, "--fp16 --min-loss-scale 100000", "min_loss_scale 100000 is above initial_loss_scale 65536; use at most 65536"),
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
    (1, "--save-interval 10", "save_interval 10 has nowhere to save; add --save checkpoints or --run-dir runs/1"),
    (
        1,
        "--exit-interval 10",
        "exit_interval 10 would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1",
    ),
    (1, "--async-save", "async_save has no effect in a run that saves nothing; add --save-interval 100 or remove it"),
    (
        1,
        "--keep-latest 2",
        "keep_latest 2 has no effect in a run that saves nothing; add --save-interval 100 or remove it",
    ),
    (
        1,
        "--save s --save-interval 10 --keep-every 100",
        "keep_every 100 has no effect without keep_latest: all checkpoints are kept; add --keep-latest 2 or remove it",
    ),
    (
        1,
        "--save s --save-interval 30 --keep-latest 2 --keep-every 100",
        "keep_every 100 is not a multiple of save_interval 30, so that few or none of its steps are ever saved; "
        "use e.g. --keep-every 120",
    ),
    (1, "--ckpt-step 10", "ckpt_step 10 has no effect without load; add --load FOLDER or remove it"),
    (1, "--finetune", "finetune has no effect without load; add --load FOLDER or remove it"),
    (1, "--fresh-if-missing", "fresh_if_missing has no effect without load; add --load FOLDER or remove it"),
    (1, "--eval-iters 10", "eval_iters 10 has no effect without eval_interval; add --eval-interval 100 or remove it"),
    (
        1,
        "--mock-data --vocab-size 8 --reset-attention-mask",
        "reset_attention_mask has no effect with mock_data, which has no documents; use data_path or remove it",
    ),
    (
        1,
        "--mock-data --vocab-size 8 --reset-position-ids",
        "reset_position_ids has no effect with mock_data, which has no documents; use data_path or remove it",
    ),
    (
        1,
        "--data-path a --tokenizer-model t --reset-position-ids --position-embedding-type none",
        "reset_position_ids has no effect with position_embedding_type none; use rope or learned_absolute, or remove it",
    ),
    (
        1,
        "--data-path a --vocab-size 64 --reset-attention-mask",
        "reset_attention_mask needs the token that ends a document; add the tokenizer that made a (--tokenizer-model FILE), or remove it",
    ),
    (
        1,
        "--mock-data --vocab-size 64 --eod-mask-loss",
        "eod_mask_loss has no effect with mock_data, which has no documents; use data_path or remove it",
    ),
    (
        1,
        "--train-data-path a --test-data-path b c",
        "test_data_path b c has no effect without eval_interval: the test split is evaluated at the end of a run that also validates; add --eval-interval 100 or remove it",
    ),
    (
        1,
        "--mock-data --vocab-size 64 --packing best-fit",
        "packing best-fit has no effect with mock_data, which has no documents; use data_path or remove it",
    ),
    (
        1,
        "--mock-data --vocab-size 64 --data-order megatron",
        "data_order megatron has no effect with mock_data, which has no documents; use data_path or remove it",
    ),
    (
        1,
        "--mock-data --vocab-size 64 --data-cache-path c",
        "data_cache_path c has no effect with mock_data, which has no documents; use data_path or remove it",
    ),
    (
        1,
        "--data-path a --packing best-fit --data-order megatron",
        "packing best-fit does not go with data_order megatron, which cuts samples from one stream of documents; use packing stream or data_order megalite",
    ),
    (
        1,
        "--data-path a --packing best-fit --data-cache-path c",
        "data_cache_path c has no effect with packing best-fit, whose index is made at the start of each epoch; use packing stream or remove it",
    ),
    (
        1,
        "--data-path a --packing best-fit --reset-attention-mask",
        "reset_attention_mask has no effect with packing best-fit, where documents never see each other; use packing stream or remove it",
    ),
    (
        1,
        "--data-path a --packing best-fit --reset-position-ids",
        "reset_position_ids has no effect with packing best-fit, where positions start from 0 in each document; use packing stream or remove it",
    ),
    (
        1,
        "--data-path a --packing best-fit --eod-mask-loss",
        "eod_mask_loss has no effect with packing best-fit, where the last token of a document predicts nothing; use packing stream or remove it",
    ),
    (
        1,
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --tiktoken-pattern x+",
        "tiktoken_pattern x+ has no effect with tokenizer_type HuggingFaceTokenizer; use TikTokenizer or remove it",
    ),
    (
        1,
        "--tiktoken-pattern x+",
        "tiktoken_pattern x+ has no effect without a tiktoken file; add --tokenizer-model FILE or remove it",
    ),
    (1, "--kernels rmsnorm", "kernels: 'rmsnorm' is not OPERATION=BACKEND, such as rmsnorm=triton"),
    (
        1,
        "--kernels rmsnrom=triton",
        f"kernels: no operation rmsnrom: did you mean rmsnorm? (one of {', '.join(OPERATIONS)})",
    ),
    (
        1,
        "--kernels rmsnorm=triton adam=apx",
        "kernels: no backend apx for adam: did you mean apex? (one of apex, triton, onednn, torch)",
    ),
    (1, "--kernels adam=apex,adam=torch", "kernels: adam is given twice, as apex and torch; keep one of them"),
]
"""(world size, command line, message)."""
