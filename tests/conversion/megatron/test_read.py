"""Reading Megatron-LM's `torch` format: files built as its versions save them give the original weights."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.open import open_megatron
from megalite.conversion.weights import ConversionError
from tests.conversion.megatron import builder
from tests.conversion.megatron.builder import assert_same
from tests.conversion.samples import EXPERTS, GPT, LLAMA, SINKS, MadeUp

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"activation": "gelu_tanh", "num_layers": 4},
    "llama": LLAMA | {"num_layers": 4},
    "qwen": LLAMA | {"num_layers": 4, "add_qkv_bias": True, "qk_norm": True, "tie_embeddings": True},
    "experts": EXPERTS | {"num_layers": 4, "moe_first_dense_layers": 2},
    "gpt-oss": SINKS | {"num_layers": 4},
}
Content = dict[str, Any]


@pytest.mark.parametrize(
    ("kind", "tp", "stages"), [*((kind, 2, (1, 3)) for kind in MODELS), ("llama", 1, (4,)), ("gpt", 4, (2, 2))]
)
def test_read_torch_format(tmp_path: Path, kind: str, tp: int, stages: tuple[int, ...]) -> None:
    weights = MadeUp(tmp_path, MODELS[kind])
    found = open_megatron(builder.save(tmp_path / "saved", weights, tp=tp, stages=stages))
    assert found.format == "megatron"
    assert found.path == tmp_path / "saved" / "iter_0000003"
    assert found.seq_length == weights.seq_length
    assert_same(found, weights)


def fused(content: Content) -> Content:
    extra = {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
    extra |= {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(7, dtype=torch.uint8)}
    return content | {"model": builder.fuse(content["model"]) | extra}


def older(content: Content) -> Content:
    """Nested dicts and names from before megatron.core, with training state and weights."""
    nested: Content = {"language_model": {"embedding": {}, "encoder": {}}}
    parts = nested["language_model"]
    for name, tensor in content["model"].items():
        if name == "embedding.word_embeddings.weight":
            parts["embedding"]["word_embeddings"] = {"weight": tensor}
        elif name == "embedding.position_embeddings.weight":
            parts["embedding"]["position_embeddings"] = {"weight": tensor}
        elif name == "output_layer.weight" and content["args"].untie_embeddings_and_output_weights:
            parts["output_layer"] = {"weight": tensor}
        elif name == "output_layer.weight":
            nested["word_embeddings_for_head"] = {"weight": tensor}
        else:
            parts["encoder"][older_name(name)] = tensor
    if not parts["embedding"]:
        del parts["embedding"]
    args = Namespace(**vars(content["args"]))
    for name in ("norm_epsilon", "kv_channels", "position_embedding_type", "padded_vocab_size", "qk_layernorm"):
        delattr(args, name)
    args.layernorm_epsilon = 1e-5
    args.use_rotary_position_embeddings = args.normalization == "RMSNorm"
    state = {"step": 3, "exp_avg": torch.zeros(1000)}
    return content | {"args": args, "model": nested, "optimizer": {"state": {0: state}, "param_groups": [{}]}}


def older_name(name: str) -> str:
    for new, old in (
        ("decoder.", ""),
        ("self_attention.linear_qkv", "self_attention.query_key_value"),
        ("self_attention.linear_proj", "self_attention.dense"),
        ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
        ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    ):
        name = name.replace(new, old)
    return name


def oldest(content: Content) -> Content:
    """`transformer` and `attention`, as in the first releases."""
    made = older(content)
    language = made["model"]["language_model"]
    encoder = language.pop("encoder")
    language["transformer"] = {
        name.replace("self_attention.", "attention."): tensor for name, tensor in encoder.items()
    }
    return made


def in_a_buffer(content: Content) -> Content:
    """Make all weights views of one contiguous buffer, as the distributed optimizer does."""
    buffer = torch.cat([tensor.reshape(-1) for tensor in content["model"].values()])
    views, done = {}, 0
    for name, tensor in content["model"].items():
        views[name] = buffer[done : done + tensor.numel()].view(tensor.shape)
        done += tensor.numel()
    return content | {"model": views}


@pytest.mark.parametrize("change", [fused, older, oldest, in_a_buffer], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_names_of_other_versions(tmp_path: Path, kind: str, change: Callable[[Content], Content]) -> None:
    weights = MadeUp(tmp_path, MODELS[kind])
    assert_same(open_megatron(builder.save(tmp_path / "saved", weights, tp=2, stages=(2, 2), change=change)), weights)


def grouped(content: Content) -> Content:
    """Transformer Engine's grouped experts: weight0, weight1, ..."""
    model = {}
    for name, tensor in content["model"].items():
        before, _, after = name.partition("local_experts.")
        if after:
            number, layer, _ = after.split(".")
            name = f"{before}{layer}.weight{number}"
        model[name] = tensor
    return content | {"model": model}


def two_matrices(content: Content) -> Content:
    """megatron.core's GroupedMLP: [h, E·2f] from [E, h, 2f], and [E·f, h] from [E, f, h]."""
    model, stacks = {}, {}
    for name, tensor in content["model"].items():
        before, _, after = name.partition(".local_experts.")
        if after:
            key = f"{before}.weight{1 if 'linear_fc1' in after else 2}"
            stacks.setdefault(key, []).append(tensor.t())
        else:
            model[name] = tensor
    for name, experts in stacks.items():
        stack = torch.stack(experts)
        model[name] = stack.view(32, -1) if name.endswith("weight1") else stack.view(-1, 32)
    return content | {"model": model}


@pytest.mark.parametrize("change", [grouped, two_matrices], ids=lambda change: change.__name__)
def test_grouped_experts_are_read(tmp_path: Path, change: Callable[[Content], Content]) -> None:
    weights = MadeUp(tmp_path, MODELS["experts"])
    assert_same(open_megatron(builder.save(tmp_path / "saved", weights, tp=2, stages=(2, 2), change=change)), weights)


@pytest.mark.parametrize("pp", [1, 2])
def test_expert_parallel_files_are_read(tmp_path: Path, pp: int) -> None:
    """Each of two files has two of the four experts, and all other weights."""
    weights = MadeUp(tmp_path, MODELS["experts"])
    for stage in range(pp):
        held = range(4) if pp == 1 else range(2 * stage, 2 * stage + 2)
        model = builder.stage(weights, held, 1, 0, first=stage == 0, last=stage == pp - 1)
        for rank in range(2):
            mine = {}
            for name, tensor in model.items():
                before, _, after = name.partition("local_experts.")
                number = int(after.split(".")[0]) if after else -1
                if number // 2 == rank:
                    name = f"{before}local_experts.{number % 2}.{after.partition('.')[2]}"
                if number < 0 or number // 2 == rank:
                    mine[name] = tensor
            args = builder.arguments(weights, 1, pp, expert_model_parallel_size=2)
            name = "mp_rank_00" + (f"_{stage:03d}" if pp > 1 else "") + f"_{rank:03d}"
            builder.write(tmp_path / "saved", name, {"args": args, "checkpoint_version": 3.0, "model": mine})
    assert_same(open_megatron(tmp_path / "saved"), weights)


def test_virtual_pipeline_files_are_read(tmp_path: Path) -> None:
    """Two ranks with two chunks each: layers 0 and 2, 1 and 3."""
    weights = MadeUp(tmp_path, MODELS["gpt"])
    for rank in range(2):
        chunks = {
            f"model{chunk}": builder.stage(
                weights,
                range(2 * chunk + rank, 2 * chunk + rank + 1),
                1,
                0,
                first=rank == chunk == 0,
                last=rank == chunk == 1,
            )
            for chunk in range(2)
        }
        args = builder.arguments(weights, 1, 2, virtual_pipeline_model_parallel_size=2)
        content = {"args": args, "checkpoint_version": 3.0, **chunks}
        builder.write(tmp_path / "saved", f"mp_rank_00_{rank:03d}", content)
    assert_same(open_megatron(tmp_path / "saved"), weights)


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_old_qkv_orders_are_read(tmp_path: Path, version: float) -> None:
    """Version 0: [3, heads, d] within a rank; version 1: [heads, d, 3]."""
    weights = MadeUp(tmp_path, MODELS["gpt"])
    axes = {0: (1, 0, 2), 1.0: (0, 2, 1), 2.0: (0, 1, 2)}[version]

    def change(content: Content) -> Content:
        model = {}
        for name, tensor in content["model"].items():
            if ".linear_qkv." in name:
                rows = tensor.view(-1, 3, 8, *tensor.shape[1:])
                rest = range(3, rows.dim())
                tensor = rows.permute(*axes, *rest).reshape(tensor.shape)
            model[name.replace("linear_qkv", "query_key_value")] = tensor
        made = content | {"model": model, "checkpoint_version": version}
        if version == 0:
            del made["checkpoint_version"]
        return made

    assert_same(open_megatron(builder.save(tmp_path / "saved", weights, tp=2, change=change)), weights)


def test_different_copies_are_an_error(tmp_path: Path) -> None:
    """A tied head on the same and on another stage, and a norm of two tensor ranks."""

    def changed(name: str, rank: int) -> Callable[[Content], Content]:
        ranks = iter(range(4))

        def change(content: Content) -> Content:
            if next(ranks) == rank:
                tensor = content["model"].get(name, content["model"].get("embedding.word_embeddings.weight"))
                tensor = tensor.clone()
                tensor[0] += 1
                return content | {"model": content["model"] | {name: tensor}}
            return content

        return change

    tied = MadeUp(tmp_path, MODELS["qwen"])
    norm = "decoder.layers.0.input_layernorm.weight"
    for name, theirs, ours, files, options in (
        ("one", "output_layer.weight", "embedding.word.weight", ("00", "00"), {}),
        ("two", "output_layer.weight", "embedding.word.weight", ("00_000", "00_001"), {"stages": (2, 2)}),
        ("norm", norm, "layers.0.attention_norm.weight", ("00", "01"), {"tp": 2}),
    ):
        change = changed(theirs, 0 if name == "one" else 1)
        found = open_megatron(builder.save(tmp_path / name, tied, change=change, **options))
        with pytest.raises(
            ConversionError, match=rf"mp_rank_{files[0]}/.* and {theirs} of .*mp_rank_{files[1]}/.* differ"
        ):
            found.read(ours)


def test_selected_iteration(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    folder = builder.save(tmp_path / "saved", weights)
    assert open_megatron(folder, iteration=3).path == folder / "iter_0000003"
    assert open_megatron(folder / "iter_0000003").path == folder / "iter_0000003"
    with pytest.raises(ConversionError, match="no iteration 4; it has iter_0000003"):
        open_megatron(folder, iteration=4)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ConversionError, match=r"names iter_0000007, which does not exist; .* iter_0000003"):
        open_megatron(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(ConversionError, match="must be a number or release"):
        open_megatron(folder)
    with pytest.raises(ConversionError, match="is not a Megatron-LM checkpoint"):
        open_megatron(tmp_path / "nothing")


def test_unexpected_tensors_are_errors(tmp_path: Path) -> None:
    def surplus(content: Content) -> Content:
        return content | {"model": content["model"] | {"decoder.layers.0.mlp.gate.weight": torch.zeros(2)}}

    def twice(content: Content) -> Content:
        norm = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
        return content | {"model": content["model"] | {norm: torch.zeros(32)}}

    def whole_numbers(content: Content) -> Content:
        return content | {"model": {name: tensor.long() for name, tensor in content["model"].items()}}

    name = "decoder.layers.0.self_attention.linear_proj.weight"

    def turned(content: Content) -> Content:
        return content | {"model": content["model"] | {name: content["model"][name].t()}}

    def eight_bits(content: Content) -> Content:
        return content | {"model": content["model"] | {name: content["model"][name].to(torch.float8_e4m3fn)}}

    def endless(content: Content) -> Content:
        content["model"]["decoder"] = content["model"]
        return content

    def deep(content: Content) -> Content:
        for _ in range(16):
            content["model"] = {"module": content["model"]}
        return content

    weights = MadeUp(tmp_path, LLAMA)
    for change, message in (
        (endless, "one dict twice, or in itself: decoder"),
        (deep, "dicts nested more than 16 deep"),
        (surplus, "tensors that its args do not describe: decoder.layers.0.mlp.gate.weight"),
        (twice, "exists twice"),
        (whole_numbers, "torch.int64, which is not floating-point"),
        (eight_bits, f"{name} has the quantized dtype torch.float8_e4m3fn, which is not read"),
    ):
        with pytest.raises(ConversionError, match=message):
            open_megatron(builder.save(tmp_path / change.__name__, weights, change=change))
    # Two ranks with 24 rows each, of 49.
    odd = builder.save(tmp_path / "odd", MadeUp(tmp_path, EXPERTS), tp=2, moe_ffn_hidden_size=49)
    with pytest.raises(ConversionError, match=r"slices of layers.0.moe.experts.up.weight have \d+ of \d+ elements"):
        open_megatron(odd)
    found = open_megatron(builder.save(tmp_path / "turned", weights, change=turned))
    with pytest.raises(ConversionError, match="of strides"):
        found.read("layers.0.attention.out.weight")


def test_disagreeing_ranks_are_an_error(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    folder = builder.save(tmp_path / "saved", weights, tp=2, stages=(1, 1))
    path = folder / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt"
    model = builder.stage(weights, range(1, 2), 2, 1, first=False, last=True)
    args = builder.arguments(weights, 2, 2, norm_epsilon=1e-6, rotary_base=500)
    torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, path)
    with pytest.raises(ConversionError, match=r"mp_rank_01_001.*rotary_base 10000 and 500; norm_epsilon 1e-05"):
        open_megatron(folder)
    args = builder.arguments(weights, 2, 2)
    half = {name: tensor.half() for name, tensor in model.items()}
    torch.save({"args": args, "checkpoint_version": 3.0, "model": half}, path)
    with pytest.raises(ConversionError, match=r"the slices of .* have the types"):
        open_megatron(folder)
    path.unlink()
    with pytest.raises(ConversionError, match=r"mp_rank_01_001.model_optim_rng.pt is missing"):
        open_megatron(folder)
    path.parent.rmdir()
    with pytest.raises(ConversionError, match=r"mp_rank_01_001.model_optim_rng.pt is missing; .* 2 x 2 x 1 ranks"):
        open_megatron(folder)
