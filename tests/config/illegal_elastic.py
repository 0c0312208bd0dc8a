"""Elastic runs that `validate` refuses, with the exact message."""

_ELASTIC = "--elastic --global-batch-size 8 --run-dir r --save-interval 5 --load r/checkpoints --fresh-if-missing --train-iters 100"

ELASTIC = [
    (
        1,
        "--elastic-cluster dgx-h100",
        "elastic_cluster dgx-h100 has no effect without elastic; add --elastic or remove it",
    ),
    (
        2,
        "--elastic --run-dir r --save-interval 5 --load r/checkpoints",
        "elastic needs global_batch_size: by default it is micro_batch_size·dp, which depends on the ranks; add e.g. "
        "--global-batch-size 512",
    ),
    (
        2,
        "--elastic --global-batch-size 8 --run-dir r --save-interval 5",
        "elastic needs load: a run whose ranks change goes on from its last checkpoint; add --save-interval 100 --load "
        "FOLDER --fresh-if-missing",
    ),
    (
        2,
        "--elastic --global-batch-size 8 --load r/checkpoints",
        "elastic needs save_interval: a run whose ranks change goes on from its last checkpoint; add --save-interval 100 "
        "--load FOLDER --fresh-if-missing",
    ),
    (
        2,
        "--elastic --global-batch-size 8 --run-dir r --save-interval 5 --load s",
        "elastic goes on from what it saves, but load is s and save r/checkpoints; use --load r/checkpoints",
    ),
    (
        2,
        f"{_ELASTIC} --finetune",
        "elastic and finetune contradict: each restart would begin there again; remove one of them",
    ),
    (
        2,
        f"{_ELASTIC} --ckpt-step 5",
        "elastic and ckpt_step 5 contradict: each restart would begin there again; remove one of them",
    ),
    (
        2,
        f"{_ELASTIC} --dp-strategy gossip",
        "elastic and dp_strategy gossip contradict: its numbers, or what a rank has of its own, depend on the number of "
        "ranks; use one of all-reduce, distributed-optimizer, fully-sharded, or leave out --elastic",
    ),
    (
        2,
        f"{_ELASTIC} --grad-compression uint8",
        "elastic and grad_compression uint8 contradict: its numbers, or what a rank has of its own, depend on the number of "
        "ranks; use none, or leave out --elastic",
    ),
    (
        2,
        f"{_ELASTIC} --optimizer onebit-adam --freeze-step 16",
        "elastic and optimizer onebit-adam contradict: its numbers, or what a rank has of its own, depend on the number of "
        "ranks; use adam, or leave out --elastic",
    ),
    (
        2,
        f"{_ELASTIC} --pp 2 --pipeline-schedule-file s.csv",
        "elastic and pipeline_schedule_file s.csv contradict: that is for one layout; remove one of them",
    ),
    (
        2,
        f"{_ELASTIC} --pp 2 --pipeline-schedule auto",
        "elastic and pipeline_schedule auto contradict: that is built for one layout; use --pipeline-schedule 1f1b, or "
        "leave it out",
    ),
]
"""(world size, command line, message)."""
