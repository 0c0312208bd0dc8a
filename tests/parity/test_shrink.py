"""Each preset in any layout shrinks to a laptop's size and keeps its features."""

import random
from itertools import cycle, pairwise

import pytest

from megalite.config.batch import batch_size
from megalite.config.describe import values_of
from megalite.config.errors import ConfigError
from megalite.config.files import preset_names
from megalite.config.flags import parse_arguments
from megalite.models.shapes import parameter_count
from megalite.parity.fuzz import draw
from megalite.parity.shrink import EXACT_STRATEGIES, Shrunk, shrink
from megalite.parity.trajectory import plain

LAYOUTS = [
    "--tp 2 --pp 2 --vpp 2 --sequence-parallel",
    "--tp 2 --cp 2 --cp-comm-type a2a",
    "--pp 4 --dp 2 --global-batch-size 512",
]
KEPT = [
    *("normalization", "activation", "position_embedding_type", "tie_embeddings", "add_bias_linear"),
    *("add_qkv_bias", "qk_norm", "scale_embeddings", "norm_zero_centered", "rope_scaling", "rotary_base"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("moe_router_pre_softmax", "moe_aux_loss_coeff", "hidden_dropout", "tp", "pp", "vpp", "cp", "ep"),
    *("sequence_parallel", "cp_comm_type", "dp_strategy", "recompute_granularity", "weight_decay"),
]


def shrunk(line: str) -> Shrunk:
    invocation = parse_arguments(["--dry-run", *line.split()])
    return shrink(invocation.config, world_size=invocation.world_size, explicit=invocation.explicit)


@pytest.mark.parametrize(("preset", "layout"), list(zip(preset_names(), cycle(LAYOUTS), strict=False)))
def test_presets_shrink_and_keep_their_family(preset: str, layout: str) -> None:
    line = f"--preset {preset} {layout}"
    before = values_of(parse_arguments(line.split()).config)
    found = shrunk(line)
    after = values_of(found.config)
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}
    assert parameter_count(found.config.model) < 2_000_000
    assert found.world_size <= 8
    assert before["num_experts"] is None or any(map(found.config.model.is_moe_layer, range(after["num_layers"])))
    assert (before["sliding_window"] is None) == (after["sliding_window"] is None)
    assert shrink(found.config).config == found.config, "small sizes are kept"


def test_ratios_of_sizes_are_kept() -> None:
    model = shrunk("--preset llama3-70b --tp 4").config.model
    assert (model.num_attention_heads, model.num_query_groups) == (8, 4)
    model = shrunk("--preset gemma-7b").config.model
    assert model.head_size * model.num_attention_heads > model.hidden_size
    found = shrunk("--preset mistral-7b --seq-length 8192")
    assert found.config.model.sliding_window == found.config.training.seq_length // 2
    found = shrunk("--preset gpt2-124m --num-layers 24 --pp 2 --pipeline-layers 11 13")
    assert found.config.parallel.pipeline_layers == [1, 2]
    found = shrunk("--preset gpt2-124m --num-layers 31 --pp 2")
    assert found.config.model.num_layers == 5, "still uneven"


def test_data_parallel_size() -> None:
    assert shrunk("--tp 2").world_size == 4
    assert shrunk("--tp 2 --num-layers 4 --pp 4").world_size == 8
    assert shrunk("--dp 64").config.parallel.dp == 8
    assert shrunk("--dp 1").world_size == 1
    assert shrunk("--tp 2 --world-size 6").config.parallel.dp == 3
    assert shrunk("--num-experts 8 --ep 4").config.parallel.dp == 4, "the experts need four ranks"


def test_batch_is_the_smallest_that_the_schedule_allows() -> None:
    grouped = "--pp 2 --vpp 2 --microbatch-group-size 2"
    for layout, count in (("--pp 4", 5), ("--pp 2 --vpp 2", 3), (grouped, 4), ("", 2)):
        config = shrunk(f"--num-layers 4 --dp 1 {layout}").config
        assert config.training.global_batch_size == count
    assert shrunk("--dp 2 --global-batch-size 12").config.training.global_batch_size == 12


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("--dp 2 --global-batch-size 512 --rampup-batch-size 64 64 100000", [4, 6, 6]),
        ("--dp 1 --pp 2 --num-layers 4 --global-batch-size 6 --rampup-batch-size 2 2 1000", [3, 4, 4]),
        ("--dp 1 --pp 2 --vpp 2 --num-layers 4 --global-batch-size 8 --rampup-batch-size 2 2 16", [2, 2, 2]),
    ],
)
def test_batch_size_ramp_up_is_kept(line: str, sizes: list[int]) -> None:
    found = shrunk(line)
    consumed = [0]
    for _ in sizes:
        consumed.append(consumed[-1] + batch_size(found.config, consumed[-1]))
    assert [after - before for before, after in pairwise(consumed)] == sizes
    assert shrink(found.config).config == found.config
    changed = found.config.training.rampup_batch_size != parse_arguments(line.split()).config.training.rampup_batch_size
    assert ("rampup_batch_size" in found.changes) == changed
    assert plain(found.config).training.rampup_batch_size == found.config.training.rampup_batch_size


def test_changed_settings_are_reported() -> None:
    invocation = parse_arguments(
        ["--dp", "2", "--fp16", "--initial-loss-scale", "4096", "--lr", "1e-4", "--adam-eps", "1e-8"]
    )
    found = shrink(invocation.config, keep=frozenset({"precision"}), explicit=invocation.explicit)
    shown = {name: found.changes.get(name) for name in ("initial_loss_scale", "lr")}
    assert shown == {"initial_loss_scale": (4096.0, 1024.0), "lr": (1e-4, 1e-2)}
    wide = shrink(invocation.config, explicit=invocation.explicit)
    assert wide.changes["initial_loss_scale"] == (4096.0, 65536.0), "fp64 has no scale, and refuses one"
    invocation = parse_arguments(["--dp", "2", "--fp16", "--initial-loss-scale", "8192", "--min-loss-scale", "2048"])
    found = shrink(invocation.config, keep=frozenset({"precision"}), explicit=invocation.explicit)
    assert found.changes["initial_loss_scale"] == (8192.0, 2048.0)
    invocation = parse_arguments(["--dp", "2", "--fp16", "--loss-scale", "65536"])
    found = shrink(invocation.config, keep=frozenset({"precision"}), explicit=invocation.explicit)
    assert found.config.training.loss_scale == 65536.0 and "initial_loss_scale" not in found.changes


def test_sizes_given_by_the_user_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads 12 is not divisible by tp 8"):
        shrunk("--preset gpt2-124m --tp 8")


OPTIMIZERS = [
    "--optimizer sgd --sgd-momentum 0.5 --sgd-nesterov",
    "--optimizer lamb --lamb-min-coeff 0.2 --lamb-max-coeff 3",
    "--optimizer muon --muon-momentum 0.8 --muon-steps 4 --muon-scale 0.1",
    "--optimizer soap --soap-frequency 3",
    "--adam-beta1 0.7 --adam-beta2 0.8 --clip-grad 0.3 --weight-decay 0.2",
]
STRATEGIES = [
    "--dp-strategy fused-all-reduce --fusion-threshold-mb 0.2",
    "--dp-strategy distributed-optimizer --shard-gradients --no-overlap-param-gather",
    "--dp-strategy fully-sharded --reduction-order rank",
    "--dp-strategy sharded-parameter-server --server-chunk-mb 0.5",
]
FORMATS = "--main-params split --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --stochastic-rounding"


@pytest.mark.parametrize("line", [*OPTIMIZERS, *STRATEGIES])
def test_optimizer_and_strategy_settings_are_kept(line: str) -> None:
    invocation = parse_arguments(["--preset", "gpt2-124m", *line.split()])
    before = values_of(invocation.config)
    config = shrink(invocation.config, explicit=invocation.explicit).config
    assert config.optimizer.optimizer == before["optimizer"]
    wanted = invocation.explicit - {"preset"}
    # A plain run has another strategy, without this one's settings.
    of_strategy = {"dp_strategy", "fusion_threshold_mb", "shard_gradients", "server_chunk_mb"}
    for settings, least in ((values_of(config), wanted), (values_of(plain(config)), wanted - of_strategy)):
        assert {name for name in least if settings[name] != before[name]} == set()


def test_optimizer_dtypes_follow_the_precision() -> None:
    invocation = parse_arguments(["--preset", "gpt2-124m", "--bf16", *FORMATS.split()])
    narrow = shrink(invocation.config, keep=frozenset({"precision"}), explicit=invocation.explicit)
    assert narrow.config.optimizer.main_params == "split" and narrow.config.optimizer.stochastic_rounding
    assert not {"main_params", "exp_avg_dtype", "stochastic_rounding"} & set(narrow.changes)
    wide = shrink(invocation.config, explicit=invocation.explicit)
    assert wide.config.optimizer.exp_avg_dtype == "fp32"
    assert wide.changes["main_params"] == ("split", "fp32")


def test_random_configs_are_valid_small_and_reproducible() -> None:
    first, again = ([draw(random.Random(f"5 {index}")) for index in range(count)] for count in (40, 3))
    assert [arguments for arguments, _ in first[:3]] == [arguments for arguments, _ in again]
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
    assert {config.parallel.dp_strategy for config in drawn} == set(EXACT_STRATEGIES)
    assert {config.optimizer.optimizer for config in drawn} == {
        *("adam", "sgd", "lamb", "muon", "soap", "one-sided-soap", "schedule-free-adamw")
    }
    assert any(config.parallel.pipeline_layers for config in drawn)
    assert any(config.training.rampup_batch_size for config in drawn)
