"""Presets of different architectures in realistic layouts of up to 16,384 ranks: both corners of the first and the
last pipeline rank.

Layers of a stage are equal, and so are microbatches, so few are enough; their number divides as the preset's does."""

import pytest

from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.partition.pipeline import layout_of
from megalite.rehearsal.communication import asymmetries, covered, mismatches
from megalite.rehearsal.run import corners, rehearse
from megalite.training.replica import Programs

ZERO = "--dp-strategy distributed-optimizer"
SP = "--sequence-parallel"
RUNS = {
    "gpt2-124m": (8, ""),
    "gpt3-175b": (1024, f"--tp 8 --pp 8 --vpp 2 {SP} {ZERO}"),
    "llama2-7b": (64, "--dp-strategy fully-sharded"),
    "llama3.2-1b": (32, f"--tp 2 --cp 4 {SP} {ZERO}"),
    "llama3-405b": (16384, f"--tp 8 --pp 16 {SP} {ZERO}"),
    "qwen3-8b": (64, f"--tp 4 --cp 2 {SP} {ZERO}"),
    "olmo2-7b": (64, f"--tp 4 {SP} {ZERO}"),
    "olmo3-7b": (64, f"--tp 2 --pp 2 --cp 2 {SP} {ZERO}"),
    "mixtral-8x7b": (64, f"--tp 2 --pp 4 --ep 8 --etp 1 {SP} {ZERO}"),
    "deepseek-v3": (2048, f"--pp 16 --ep 64 {ZERO}"),
    "deepseek-v3.2": (2048, f"--pp 16 --ep 64 --tp 2 {SP} {ZERO} --seq-length 512"),
    "gpt-oss-20b": (32, f"--tp 2 --cp 8 --ep 8 --etp 1 {SP} {ZERO}"),
}


@pytest.mark.parametrize("name", RUNS)
def test_preset_in_a_realistic_layout(name: str) -> None:
    world, layout_words = RUNS[name]
    flags = (
        f"--preset {name} {layout_words} --vocab-size 128256 --bf16 --mock-data --micro-batch-size 1 --train-iters 10"
    )
    whole = parse_arguments([*flags.split(), "--global-batch-size", str(world)], world_size=world).config
    p, layers = whole.parallel, whole.model.num_layers
    stages = p.pp * p.vpp
    layers = min(layers, layers % stages + stages * (3 if stages < 8 else 1))
    batch = world // (p.tp * p.pp * p.cp) * max(2, min(p.pp, 4))
    sizes = ["--num-layers", str(layers), "--global-batch-size", str(batch)]
    invocation = parse_arguments([*flags.split(), *sizes], world_size=world)
    config = validate(invocation.config, world, invocation.explicit)
    layout, programs = layout_of(config), Programs(config)
    places = corners(layout)
    found = {rank: rehearse(config, rank, programs) for place in {places[0], places[-1]} for rank in place}
    journals = {rank: each.journal for rank, each in found.items()}
    for first, *others in (places[0], places[-1]):
        for other in others:
            assert list(asymmetries((first, journals[first]), (other, journals[other]))) == []
    assert list(mismatches(journals)) == []
    for each in found.values():
        assert 0 < each.built_bytes <= each.peak_bytes
        lost = covered(each.journal, each.second_step)
        assert not [pair for pair in lost if "all_reduce sum over dp-cp" in pair.waited], lost
