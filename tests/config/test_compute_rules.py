"""What section `compute` refuses, with the exact message, and what is just inside; Megatron-LM's words."""

import pytest

from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate

RULES = [
    (
        1,
        "--attention-backend flash --attention-dropout 0.1",
        "attention_backend flash has no effect with attention_dropout 0.1, for which the probabilities are kept in memory; "
        "set attention_dropout 0 or remove it",
    ),
    (
        1,
        "--attention-backend math --sliding-window 8",
        "attention_backend math cannot serve sliding_window 8, whose pieces are merged by what flash alone gives; use "
        "flash or auto",
    ),
    (
        2,
        "--attention-backend cudnn --cp 2",
        "attention_backend cudnn cannot serve cp 2 with cp_comm_type p2p, whose pieces are merged by what flash alone "
        "gives; use flash or auto",
    ),
    (
        1,
        "--attention-backend efficient --reset-attention-mask",
        "attention_backend efficient cannot serve reset_attention_mask, whose pieces are merged by what flash alone gives; "
        "use flash or auto",
    ),
    (
        1,
        "--tp-comm-overlap",
        "tp_comm_overlap has no effect without sequence parallelism; add --tp 2 --sequence-parallel or remove it",
    ),
    (
        2,
        "--tp-comm-overlap --tp 2",
        "tp_comm_overlap has no effect without sequence_parallel; add --sequence-parallel or remove it",
    ),
    (
        2,
        "--tp-comm-overlap --tp 2 --sequence-parallel --fp8 --bf16 --num-layers 3",
        "tp_comm_overlap and fp8 do not go together: a tensor that comes in pieces has no one scale; keep one of them",
    ),
    (1, "--fp8 --fp16 --num-layers 3", "fp8 needs precision bf16, not fp16; add --bf16"),
    (
        1,
        "--fp8 --bf16 --num-layers 2",
        "fp8 has no effect with num_layers 2, as the first and the last layer stay in bf16; use num_layers 3 or more, or "
        "remove it",
    ),
]


@pytest.mark.parametrize(("world_size", "flags", "message"), RULES, ids=[f"{row[0]}: {row[1]}" for row in RULES])
def test_rule(world_size: int, flags: str, message: str) -> None:
    invocation = parse_arguments(flags.split())
    with pytest.raises(ConfigError) as error:
        validate(invocation.config, world_size, invocation.explicit)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, "--attention-backend flash --sliding-window 8"),
        (2, "--attention-backend cudnn --cp 2 --cp-comm-type a2a --num-attention-heads 4"),
        (1, "--attention-backend auto --attention-dropout 0.1"),
        (2, "--tp-comm-overlap --tp 2 --sequence-parallel"),
        (1, "--fp8 --bf16 --num-layers 3 --compile"),
    ],
)
def test_legal(world_size: int, flags: str) -> None:
    invocation = parse_arguments(flags.split())
    validate(invocation.config, world_size, invocation.explicit)


@pytest.mark.parametrize(
    ("word", "ours"), [("flash", "flash"), ("fused", "cudnn"), ("unfused", "math"), ("local", "math"), ("auto", "auto")]
)
def test_megatrons_attention_backends(word: str, ours: str) -> None:
    assert parse_arguments(["--attention-backend", word]).config.compute.attention_backend == ours
