"""The command line: spellings, precedence, provenance and every way to be wrong."""

from pathlib import Path

import pytest

from megalite.config.data import DATASETS
from megalite.config.describe import Setting, replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.megatron import DERIVED, FROM_VALUE, SHORTHANDS, WORDS
from megalite.config.megatron_flags import REFUSED, known_flags
from megalite.config.run import RunConfig
from megalite.config.strategies import ALIASES
from tests.config.illegal import parts_of, says
from tests.support.plugins import registered

EXAMPLES = {int: "3", float: "0.25", str: "x"}


def changed(flags: str) -> dict[str, object]:
    """The settings that differ from the defaults."""
    default = values_of(RunConfig())
    return {k: v for k, v in values_of(parse_arguments(flags.split()).config).items() if v != default[k]}


def test_every_setting_by_every_spelling() -> None:
    with registered(DATASETS, EXAMPLES[str], lambda split, config, tokenizer: None):
        for name, setting in settings().items():
            every_spelling(setting, "json" if name == "imports" else EXAMPLES.get(setting.type, ""))


def every_spelling(setting: Setting, example: str) -> None:
    name = setting.name
    for flag in setting.flags:
        if setting.type is bool:
            assert changed(flag if not setting.default else "--no-" + flag[2:]) == {name: not setting.default}
            continue
        others = [choice for choice in setting.choices if choice != setting.default]
        word = others[0] if others else setting.default if setting.choices else example
        expected = word if setting.type is str else setting.type(word)
        invocation = parse_arguments([flag, word])
        assert values_of(invocation.config)[name] == ([expected] if setting.is_list else expected), name
        assert invocation.provenance[name] == f"flag {flag}"
        assert invocation.explicit == {name}
        assert parse_arguments([f"{flag}={word}"]).config == invocation.config, name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--tensor_model_parallel_size 2", {"tp": 2}),
        ("--tp 2 --tensor-model-parallel-size 2", {"tp": 2}),
        ("--train-samples 1e6 --lr 1e-4", {"train_samples": 1_000_000, "lr": 1e-4}),
        ("--pipeline-layers 3,1", {"pipeline_layers": [3, 1]}),
        ("--pipeline-layers 3 1", {"pipeline_layers": [3, 1]}),
        ("--rampup-batch-size 16 16 1000 --tp 2", {"rampup_batch_size": [16, 16, 1000], "tp": 2}),
        ("--data-path 0.3 a 0.7 b", {"data_path": ["0.3", "a", "0.7", "b"]}),
        ("--min-lr -1", {"min_lr": -1.0}),
        ("--min-lr -.5", {"min_lr": -0.5}),
        ("--bf16 --precision bf16", {"precision": "bf16"}),
        ("--data-parallel-sharding-strategy no_shard", {}),
        ("--data-parallel-sharding-strategy optim", {"dp_strategy": "distributed-optimizer"}),
        (
            "--data-parallel-sharding-strategy=optim_grads --grad-reduce-in-bf16",
            {"dp_strategy": "distributed-optimizer", "shard_gradients": True, "wire_dtype": "bf16"},
        ),
        ("--data_parallel_sharding_strategy optim_grads_params", {"dp_strategy": "fully-sharded"}),
        ("--use-torch-fsdp2", {"dp_strategy": "fully-sharded"}),
        ("--dp-strategy zero1 --use-distributed-optimizer", {"dp_strategy": "distributed-optimizer"}),
        ("--num-distributed-optimizer-instances 2", {"dp_instances": 2}),
        ("--check-weight-hash-across-dp-replicas-interval 7", {"check_replicas_interval": 7}),
        ("--optimizer dist_muon", {"optimizer": "muon", "dp_strategy": "distributed-optimizer"}),
        ("--optimizer muon --muon-num-ns-steps 6", {"optimizer": "muon", "muon_steps": 6}),
        (
            "--optimizer muon --muon-no-split-qkv --muon-extra-scale-factor 1",
            {"optimizer": "muon", "muon_split_qkv": False, "muon_scale": 1.0},
        ),
        ("--recompute-modules moe_act layernorm", {"recompute_modules": ["mlp_act", "layernorm"]}),
        ("--attention-backend fused", {"attention_backend": "cudnn"}),
        ("--attention-backend unfused", {"attention_backend": "math"}),
        ("--attention-backend local", {"attention_backend": "math"}),
        ("--no-overlap-grad-reduce", {"overlap_grad_reduce": False}),
        ("--no-check-for-nan-in-loss-and-grad", {"check_for_nan_in_loss_and_grad": False}),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--save-retain-interval 500", {"keep_latest": 1, "keep_every": 500}),
        ("--window-size 127,0", {"sliding_window": 128}),
        ("--window-size (127,0)", {"sliding_window": 128}),
        ("--window-size=-1,0", {}),
        ("--window-size 127,0 --window-attn-skip-freq 4", {"sliding_window": 128, "window_attn_skip_freq": [4]}),
        (
            "--window-size 7,0 --window-attn-skip-freq ([1]*2+[0]*1)*1 --num-layers 3",
            {"sliding_window": 8, "window_attn_skip_freq": [1, 1, 0], "num_layers": 3},
        ),
        (
            "--no-rope-freq 1,0 --position-embedding-type rope",
            {"no_rope_freq": [1, 0], "position_embedding_type": "rope"},
        ),
        (
            "--rotary-scaling-factor 40 --mscale 0.7 --mscale-all-dim 0.9",
            {
                "rope_scaling": "yarn",
                "rope_scaling_factor": 40.0,
                "rope_original_max_positions": 4096,
                "rope_mscale": 0.7,
                "rope_mscale_all_dim": 0.9,
            },
        ),
        ("--rotary-scaling-factor 1.0 --rope-type yarn", {}),
        ("--rotary-seq-len-interpolation-factor 4", {"rope_scaling": "linear", "rope_scaling_factor": 4.0}),
        ("--timing-log-level 2", {}),
        ("--cp 2 --cp-comm-type all_gather", {"cp": 2, "cp_comm_type": "allgather"}),
        (
            "--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            {"cp": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]},
        ),
        ("--tokenizer-type Llama2Tokenizer", {"tokenizer_type": "SentencePieceTokenizer"}),
        ("--squared-relu --no-pad-vocab-size", {"activation": "squared_relu", "make_vocab_size_divisible_by": 1}),
        ("--use-distributed-optimizer", {"dp_strategy": "distributed-optimizer"}),
        ("--use-distributed-optimizer --use-torch-fsdp2", {"dp_strategy": "fully-sharded"}),
        ("--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16", {"fp8": True}),
        ("--fp8-format hybrid --disable-fp8-wgrad", {"fp8": True, "fp8_wgrad": False}),
        ("--moe-router-load-balancing-type none", {}),
        ("--moe-router-load-balancing-type global_aux_loss", {}),
        ("--num-layers 8 --moe-layer-freq ([0]*3+[1]*5)", {"num_layers": 8, "moe_first_dense_layers": 3}),
        (
            "--num-layers 6 --moe-layer-freq=([0]+[1,0])*2",
            {"num_layers": 6, "moe_first_dense_layers": 1, "moe_layer_freq": 3},
        ),
        (
            "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --micro-batch-size 4",
            {"moe_aux_loss_coeff": 0.01, "micro_batch_size": 4, "moe_aux_loss_sequences": 4},
        ),
        ("--moe-router-load-balancing-type aux_loss --micro-batch-size 4", {"micro_batch_size": 4}),
        ("--step-batch-size-schedule 0:16 2.4B:320", {"step_batch_size_schedule": "0:16 2.4B:320"}),
        (
            "--no-load-optim --use-checkpoint-opt_param-scheduler",
            {"load_optimizer": False, "require_same_schedule": True},
        ),
        (
            "--num-layers 6 --pp 4 --vpp 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            {"num_layers": 6, "pp": 4, "vpp": 2, "pipeline_layers": [0, 1, 1, 1, 1, 1, 1, 0]},
        ),
        ("--num-layers 12 --pp 2 --num-layers-per-virtual-pipeline-stage 3", {"num_layers": 12, "pp": 2, "vpp": 2}),
        ("--num-layers 12 --pp 2 --num-layers-per-virtual-pipeline-stage 6", {"num_layers": 12, "pp": 2}),
        (
            "--num-layers 12 --pp 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
            {"num_layers": 12, "pp": 4, "pipeline_layers": [2, 4, 4, 2]},
        ),
        (
            "--num-layers 10 --pp 2 --vpp 2 --decoder-last-pipeline-num-layers 4",
            {"num_layers": 10, "pp": 2, "vpp": 2, "pipeline_layers": [3, 2, 3, 2]},
        ),
    ],
)
def test_values(flags: str, expected: dict[str, object]) -> None:
    assert changed(flags) == expected


def test_shorthands() -> None:
    for flag, sets in SHORTHANDS.items():
        values = values_of(parse_arguments([flag]).config)
        assert {name: values[name] for name in sets} == sets


def test_none_unsets() -> None:
    config = parse_arguments(["--preset", "gpt2-124m", "--vocab-size", "none"]).config
    assert config.model.vocab_size is None
    assert config.model.num_layers == 12


def test_each_flag_of_the_table_is_accepted_or_refused() -> None:
    """With as many words as it takes: notes for all that are accepted, one answer for all that are not."""
    for flag, known in known_flags().items():
        example = "" if known.values is None else "7" if known.values in ("*", ".*") else known.values.split("|")[0]
        words = [flag, *([example.replace("0?\\.0*", "0.0").replace("0?\\.0050*", "0.005")] if example else [])]
        if known.kind == REFUSED:
            with pytest.raises(ConfigError, match=f"^{flag}.* is refused: "):
                parse_arguments(words)
        else:
            (note,) = parse_arguments(words).notes
            assert (note.kind, note.why) == (known.kind, known.why)
            assert parse_arguments(words).config == RunConfig()


def test_one_line_names_all_that_is_accepted() -> None:
    flags = "--use-mcore-models --no-rope-fusion --num-workers 2 --transformer-impl local --moe-router-topk 4 --fp8-amax-history-len 16"
    assert parse_arguments(flags.split()).remarks == [
        "already so: --use-mcore-models --transformer-impl; no effect here: --no-rope-fusion --num-workers --moe-router-topk "
        "(docs/from_megatron.md says why)",
        "--fp8-amax-history-len 16: fp8 here scales by what is multiplied itself, without a history; first and last layer, "
        "experts and head are in bf16",
    ]
    assert parse_arguments(["--tp", "1"]).remarks == []


def test_files_take_the_same_flags(tmp_path: Path) -> None:
    """A switch that a file turns off asks for nothing."""
    file = tmp_path / "run.yaml"
    file.write_text("use_mcore_models: true\nno_rope_fusion: false\nattention-output-gate: null\nnum_workers: 4\n")
    assert [note.what for note in parse_arguments(["--config", str(file)]).notes] == [
        "--use-mcore-models",
        "--num-workers",
    ]
    file.write_text("attention_output_gate: true\ncuda_graph_scope: [a, b]\nfim_data: true\n")
    with pytest.raises(ConfigError) as error:
        parse_arguments(["--config", str(file)])
    assert [problem.split(" is refused")[0] for problem in error.value.problems] == [
        f"file {file}: attention_output_gate True".removesuffix(" True"),
        f"file {file}: fim_data",
    ]


def test_the_shape_of_a_checkpoint_counts() -> None:
    shape = {"num_layers": 8, "hidden_size": 64, "hidden_dropout": 0.5, "of_a_later_version": 1}
    flags = ["--load", "ckpt", "--use-checkpoint-args", "--num-layers", "4", "--hidden-size", "64"]
    invocation = parse_arguments(flags, shape=lambda folder, step: shape if (folder, step) == ("ckpt", None) else None)
    assert invocation.config.model.num_layers == 8 and invocation.config.model.hidden_dropout == 0.0
    assert invocation.remarks == ["num_layers: flag --num-layers says 4, the checkpoint 8, which counts"]
    without = parse_arguments(flags, shape=lambda folder, step: None)
    assert without.config.model.num_layers == 4
    assert [note.why for note in without.notes] == ["ckpt has no checkpoint: the settings count as given"]


def test_tables_of_flags_do_not_overlap() -> None:
    own = {flag for setting in settings().values() for flag in setting.flags}
    negative = {"--no-" + flag[2:] for setting in settings().values() if setting.type is bool for flag in setting.flags}
    tables = [own, negative, set(SHORTHANDS), set(WORDS), set(FROM_VALUE), set(known_flags())]
    tables.append(set(DERIVED) - {"--moe-layer-freq"})  # a setting, but for its lists
    assert len(set().union(*tables)) == sum(map(len, tables))


ERRORS = """
--tp 2 --tensor-model-parallel-size 4 => tp is given twice: 2 by flag --tp and 4 by flag … keep one of them
--bf16 --fp16 => precision is given twice: 'bf16' by flag --bf16 and 'fp16' by flag --fp16; keep one of them
--swiglu --activation gelu => activation is given twice: 'swiglu' by flag --swiglu and 'gelu' by flag … keep one of them
--sequence-parallel --no-sequence-parallel => sequence_parallel is given twice: True by flag … keep one of them
--tensor-model-paralel-size 2 => unknown flag --tensor-model-paralel-size: did you mean --tensor-model-parallel-size?
--num-layer 2 => unknown flag --num-layer: did you mean --num-layers? (--help-all lists all)
-x => unknown flag -x (--help-all lists all)
run.yaml => unexpected argument run.yaml; settings are flags such as --num-layers 4
--sequence-parallel true => --sequence-parallel takes no value, got true … to say the opposite write
--bf16 yes => --bf16 takes no value but true, got 'yes'; remove it
--tp => --tp needs a value (int)
--data-path --bf16 => --data-path needs a value (list of str)
--tp 2 3 => --tp takes one value, got 2: 2 3
--tp 1.5 => --tp: tp takes a whole number such as 4, got '1.5'
--tp two => --tp: tp takes a whole number such as 4, got 'two'
--tp none => --tp: tp takes a whole number such as 4, got 'none'
--lr fast => --lr: lr takes a number such as 0.1, got 'fast'
--lr nan => --lr: lr takes a number such as 0.1, got 'nan'
--precision b16 => --precision: precision cannot be 'b16': did you mean bf16? (one of fp32, bf16, fp16, fp64)
--moe-layer-recompute => --moe-layer-recompute is refused: use --recompute-granularity selective --recompute-modules moe
--optimizer dist_muon --dp-strategy all-reduce
    => dp_strategy is given twice: 'distributed-optimizer' by flag --optimizer and 'all-reduce'
--data-parallel-sharding-strategy optim_grad
    => --data-parallel-sharding-strategy cannot be optim_grad: did you mean optim_grads? (one of no_shard, optim,
--data-parallel-sharding-strategy => --data-parallel-sharding-strategy takes one value, got none
--data-parallel-sharding-strategy optim --dp-strategy fully-sharded
    => dp_strategy is given twice: 'distributed-optimizer' by flag --data-parallel-sharding-strategy … keep one of them
--use-megatron-fsdp yes => --use-megatron-fsdp takes no value, got yes; remove it
--num-workers => --num-workers takes one value, got none
--num-workers 1 2 => --num-workers takes one value, got 1 2
--transformer-impl mine => --transformer-impl mine is refused: there is one implementation of the model, … leave it out
--attention-output-gate --init-method-xavier-uniform => there are 2 problems:\n- --attention-output-gate is … use --init-method-std for
--window-size 4095,1 => --window-size cannot be 4095,1: attention is causal; use e.g. 127,0, or -1,0 for no window
--window-size 9 => --window-size takes two numbers such as 127,0, got 9
--rotary-scaling-factor 0.5 => --rotary-scaling-factor takes a number of at least 1, such as 40, got 0.5
--rotary-seq-len-interpolation-factor 1.5 => --rotary-seq-len-interpolation-factor takes a whole number of at least
--num-layers 4 --moe-layer-freq [1,1,0] => flag --moe-layer-freq [1,1,0] must have 0 or 1 for each of num_layers 4 … such as
--num-layers 3 --moe-layer-freq [1,1,0] => flag --moe-layer-freq [1,1,0] must have 0 or 1 for each of num_layers 3, 1 for every
--num-layers 2 --moe-layer-freq [0]*2 => flag --moe-layer-freq [0]*2 must have
--num-layers 2 --moe-layer-freq [x] => flag --moe-layer-freq takes a number, or 0 or 1 for each layer
--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss
    => flag --moe-router-load-balancing-type global_aux_loss is refused: there is no such loss; use aux_loss, seq_aux_loss
--no-position-embedding => flag --no-position-embedding contradicts position_embedding_type … use rope or none
--moe-router-load-balancing-type sinkhorn => flag --moe-router-load-balancing-type sinkhorn … use aux_loss, seq_aux_loss
--global-batch-size 8 --eval-global-batch-size 16 => flag --eval-global-batch-size 16 is … leave it out, and scale
--fp8-format e4m3 => --fp8-format cannot be e4m3 (one of hybrid)
--fp8-recipe blockwise => --fp8-recipe: fp8_recipe cannot be 'blockwise'
--use-checkpoint-args => --use-checkpoint-args takes the model from a checkpoint; add --load FOLDER or remove it
--use-checkpoint-args --load x => --use-checkpoint-args reads no checkpoint here … use --config with the
--dp-strategy fully-sharded --use-distributed-optimizer => dp_strategy is given twice: … keep one of them
--load= => --load: load is empty; leave it out or give it a value
--config => --config takes one FILE, got none
--config nowhere/run.yaml => config file nowhere/run.yaml does not exist: there is no folder nowhere
--preset gpt3-175 => --preset: unknown preset gpt3-175: did you mean gpt3-175b? (there are deepseek-moe-16b,
--window-attn-skip-freq [1]*x => --window-attn-skip-freq takes a number, or 0 or 1 for each layer such as 1,1,0 or
--preset gpt2-124m --preset llama3-8b => --preset is given twice: gpt2-124m and llama3-8b; keep one of them
--json => --json has no effect without --dry-run; add --dry-run or remove it
--world-size 8 => --world-size has no effect without --dry-run; add --dry-run or remove it
--dry-run --world-size 0 => --world-size takes a whole number of at least 1, such as 4, got 0
--group-query-attention => flag --group-query-attention says nothing without the number … add --num-query-groups, e.g. 8
--num-layers-per-virtual-pipeline-stage 2 => flag --num-layers-per-virtual-pipeline-stage 2 … add --pp 2 or remove it
--num-layers 12 --pp 2 --num-layers-per-virtual-pipeline-stage 4
    => flag --num-layers-per-virtual-pipeline-stage 4 does not divide num_layers / pp = 12 / 2; use one of 1, 2, 3, 6
--num-layers 7 --pp 2 --num-layers-per-virtual-pipeline-stage 2
    => flag --num-layers-per-virtual-pipeline-stage 2 does not divide num_layers / … use --vpp, with --pipeline-layers
--num-layers 12 --pp 2 --vpp 3 --num-layers-per-virtual-pipeline-stage 3
    => vpp is given twice: 3 by flag --vpp and 2 by flag --num-layers-per-virtual-pipeline-stage; keep one of them
--num-layers 12 --pp 3 --decoder-first-pipeline-num-layers 3
    => flag --decoder-first-pipeline-num-layers 3 leaves 9 of 12 layers for 2 … say the layers of all 3 stages with
--decoder-last-pipeline-num-layers 1 => flag --decoder-last-pipeline-num-layers 1 needs pp > … add --pp 2 or remove it
"""


@pytest.mark.parametrize(("flags", "parts"), parts_of(ERRORS))
def test_error(flags: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(flags.split())
    assert says(str(error.value), parts)


def test_precedence_and_provenance(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: {num_layers: 5, hidden_size: 96}\nlr: 0.5\nseed: 7\n")
    second.write_text("hidden_size: 192\nseed: 1234\n")
    flags = f"--preset gpt2-124m --config {first} --config {second} --lr 0.25"
    invocation = parse_arguments(flags.split())
    values = values_of(invocation.config)
    names = ("num_attention_heads", "num_layers", "hidden_size", "lr", "seed", "tp")
    assert [values[name] for name in names] == [12, 5, 192, 0.25, 1234, 1]
    assert [invocation.provenance[name] for name in names] == [
        "preset gpt2-124m",
        f"file {first}",
        f"file {second}",
        "flag --lr",
        f"file {second}",
        "default",
    ]
    # The later file restates the default seed; a preset asks for nothing.
    assert invocation.explicit == {"num_layers", "hidden_size", "lr"}


def test_derived_flag_sees_other_levels_and_is_overridden_by_later_ones(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("num_layers_per_virtual_pipeline_stage: 3\npp: 2\n")
    assert parse_arguments(["--preset", "gpt2-124m", "--config", str(file)]).config.parallel.vpp == 2
    assert parse_arguments(["--preset", "gpt2-124m", "--config", str(file), "--vpp", "1"]).config.parallel.vpp == 1


def test_run_options() -> None:
    invocation = parse_arguments(["--dry-run", "--json", "--world-size", "16"])
    assert (invocation.dry_run, invocation.json, invocation.world_size) == (True, True, 16)
    assert invocation.config == RunConfig()
    found = [parse_arguments([flag]).help for flag in ("--help", "-h", "--help-all")]
    assert found == ["basic", "basic", "all"]
    assert parse_arguments(["--nonsense", "--help"]).help == "basic"
    assert parse_arguments(["--version"]).version


@pytest.mark.parametrize(
    ("flags", "vpp"),
    [
        ("--pp 2", 1),
        ("--pp 2 --pipeline-schedule zb-v", 2),
        ("--pp 2 --pipeline-schedule dualpipe-v --vpp 1", 1),
        ("--pp 2 --pipeline-schedule zb-h1", 1),
        ("--pp 2 --pipeline-model-parallel-layout Et|t|t|tL", 2),
        ("--pp 2 --pipeline-layout Et|t|t|tL --vpp 4", 4),
        ("--pp 2 --pipeline-layout Et|t|tL", 1),
        ("--pp 2 --pipeline-layout Et|tL --pipeline-schedule zb-v", 1),
        ("--pipeline-schedule zb-v", 1),
    ],
)
def test_vpp_where_nobody_gives_it(flags: str, vpp: int) -> None:
    assert parse_arguments(flags.split()).config.parallel.vpp == vpp


def test_vpp_follows_the_schedule_that_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("parallel: {pp: 4, pipeline_schedule: zb-v}\n")
    assert parse_arguments(["--config", str(path)]).config.parallel.vpp == 2
    other = parse_arguments(["--config", str(path), "--pipeline-schedule", "1f1b"])
    assert other.config.parallel.vpp == 1 and "vpp" not in other.explicit


@pytest.mark.parametrize("alias", ALIASES)
def test_a_strategy_by_the_name_it_has_elsewhere(alias: str, tmp_path: Path) -> None:
    """In flags and in files; a line says what it stands for."""
    file = tmp_path / "run.yaml"
    file.write_text(f"parallel: {{dp_strategy: {alias}}}\n")
    meant = ALIASES[alias]
    said = ", ".join(f"{setting} {value}" for setting, value in meant.items())
    for words in (["--dp-strategy", alias], ["--config", str(file)]):
        found = parse_arguments(words)
        assert found.config == replace(RunConfig(), **meant)
        assert found.remarks == [f"dp_strategy {alias}: {said} here"]
    again = parse_arguments(["--config", str(file), "--dp-strategy", "gossip"])
    assert again.config.parallel.dp_strategy == "gossip"


def test_an_alias_and_a_setting_that_it_gives() -> None:
    with pytest.raises(ConfigError, match="shard_gradients is given twice"):
        parse_arguments(["--dp-strategy", "zero2", "--no-shard-gradients"])
