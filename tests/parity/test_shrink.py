"""Any preset in any layout comes down to a laptop's size, and keeps what it is."""

import random

import pytest

from megalite.config.describe import values_of
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.presets import preset_names
from megalite.models.shapes import parameter_count
from megalite.parity.draw import draw
from megalite.parity.shrink import Shrunk, shrink

LAYOUTS = [
    "",
    "--tp 2 --pp 2 --vpp 2 --sequence-parallel",
    "--cp 4",
    "--tp 2 --cp 2 --cp-comm-type a2a",
    "--pp 4 --dp 2 --global-batch-size 512",
]
KEPT = [
    *("normalization", "activation", "position_embedding_type", "tie_embeddings", "add_bias_linear"),
    *("add_qkv_bias", "qk_norm", "scale_embeddings", "norm_zero_centered", "rope_scaling", "rotary_base"),
    *("moe_router_pre_softmax", "moe_aux_loss_coeff", "hidden_dropout", "tp", "pp", "vpp", "cp", "ep"),
    *("sequence_parallel", "cp_comm_type", "dp_strategy", "recompute_granularity", "weight_decay"),
]


def shrunk(line: str) -> Shrunk:
    invocation = parse_arguments(["--dry-run", *line.split()])
    return shrink(invocation.config, world_size=invocation.world_size, explicit=invocation.explicit)


@pytest.mark.parametrize("preset", preset_names())
def test_presets_come_down_and_keep_their_family(preset: str) -> None:
    for layout in LAYOUTS:
        line = f"--preset {preset} {layout}"
        before = values_of(parse_arguments(line.split()).config)
        found = shrunk(line)
        after = values_of(found.config)
        assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}
        assert parameter_count(found.config.model) < 2_000_000
        assert found.world_size <= 8
        assert before["num_experts"] is None or found.config.model.is_moe_layer(after["num_layers"] - 1)
        assert (before["sliding_window"] is None) == (after["sliding_window"] is None)
        assert shrink(found.config).config == found.config, "what is small stays"


def test_what_is_shared_stays_shared() -> None:
    model = shrunk("--preset llama3-70b --tp 4").config.model
    assert (model.num_attention_heads, model.num_query_groups) == (8, 4)
    model = shrunk("--preset gemma-7b").config.model
    assert model.head_size * model.num_attention_heads > model.hidden_size
    found = shrunk("--preset mistral-7b --seq-length 8192")
    assert found.config.model.sliding_window == found.config.training.seq_length // 2
    found = shrunk("--preset gpt2-124m --num-layers 24 --pp 2 --pipeline-layers 11 13")
    assert found.config.parallel.pipeline_layers == [1, 2]
    found = shrunk("--preset gpt2-124m --num-layers 31 --pp 2")
    assert found.config.model.num_layers == 5, "uneven as it was"


def test_data_parallel_size() -> None:
    assert shrunk("--tp 2").world_size == 4
    assert shrunk("--tp 2 --num-layers 4 --pp 4").world_size == 8
    assert shrunk("--dp 64").config.parallel.dp == 8
    assert shrunk("--dp 1").world_size == 1
    assert shrunk("--tp 2 --world-size 6").config.parallel.dp == 3
    assert shrunk("--num-experts 8 --ep 4").config.parallel.dp == 4, "the experts need four ranks"


def test_no_more_than_the_batch_that_the_schedule_takes() -> None:
    grouped = "--pp 2 --vpp 2 --microbatch-group-size 2"
    for layout, count in (("--pp 4", 5), ("--pp 2 --vpp 2", 3), (grouped, 4), ("", 2)):
        config = shrunk(f"--num-layers 4 --dp 1 {layout}").config
        assert config.training.global_batch_size == count
    assert shrunk("--dp 2 --global-batch-size 12").config.training.global_batch_size == 12


def test_the_users_own_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads 12 is not divisible by tp 8"):
        shrunk("--preset gpt2-124m --tp 8")


def test_drawn_configs_are_legal_small_and_repeatable() -> None:
    first, again = ([draw(random.Random(f"5 {index}")) for index in range(40)] for _ in range(2))
    assert [arguments for arguments, _ in first] == [arguments for arguments, _ in again]
    for arguments, found in first:
        invocation = parse_arguments(["--dry-run", *arguments])
        keep = frozenset({"eod_mask_loss"} & invocation.explicit)
        assert shrink(invocation.config, keep=keep, explicit=invocation.explicit).config == found.config
        assert 1 < found.world_size <= 8
        assert found.config.training.seed == invocation.config.training.seed
        assert not {"num_layers", "hidden_size", "seq_length", "num_attention_heads"} & set(found.changes)
    drawn = [found.config for _, found in first]
    assert {config.parallel.cp for config in drawn} >= {1, 2, 4}
    assert any(config.model.num_experts for config in drawn)
    assert any(config.parallel.pipeline_layers for config in drawn)
