"""Profiles and clusters: reading, validation, and the synthetic profiles."""

from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.planner.chain.inputs import TWINS, find_profile, parse_profile, read_cluster, read_profile
from tests.e2e.programs import REPOSITORY

LAYER = {
    "name": "conv",
    "forward_ms": 1.0,
    "backward_ms": 2.0,
    "output_bytes": 100,
    "activation_bytes": 200,
    "parameter_bytes": 300,
}
PROFILE: dict[str, Any] = {"name": "mine", "batch_size": 4, "layers": [LAYER]}

BAD_PROFILES = [
    ({"layers": None}, "layers is missing; add `layers: .*forward_ms"),
    ({"layers": ["conv"]}, "layers.0. takes `key: value` lines, got 'conv'"),
    ({"layers": [LAYER, LAYER | {"forward_ms": -1}]}, "layers.1. \\(conv\\): forward_ms is -1; .* 0 or more"),
    ({"layers": [LAYER | {"paramter_bytes": 3}]}, "unknown key paramter_bytes: did you mean parameter_bytes"),
    ({"layers": [{"name": "conv", "forward_ms": 1}]}, "layers.0. \\(conv\\): backward_ms is missing"),
    ({"layers": [LAYER | {"repeat": 0}]}, "repeat is 0; it must be above 0"),
    ({"layers": [LAYER | {"repeat": 10**9}]}, "repeat is 1000000000; it is at most 512"),
    ({"layers": [LAYER | {"repeat": 300}] * 2}, "600 layers are too many; merge some, to have at most 512"),
    ({"layers": [LAYER | {"forward_ms": 0, "backward_ms": 0}]}, "every forward_ms and backward_ms is 0"),
    ({"smallest_batch": 8}, "smallest_batch 8 is above batch_size 4"),
    ({"smallest_batch": True}, "smallest_batch takes a whole number"),
]


@pytest.mark.parametrize(("change", "message"), BAD_PROFILES, ids=lambda value: str(value)[:40])
def test_bad_profiles_are_errors(change: dict[str, Any], message: str) -> None:
    tree = {key: value for key, value in (PROFILE | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        parse_profile(tree)


def test_read_profile() -> None:
    profile = parse_profile(PROFILE | {"layers": [LAYER | {"repeat": 2}, LAYER | {"name": "head"}]})
    assert [layer.name for layer in profile.layers] == ["conv.0", "conv.1", "head"]
    assert profile.smallest_batch == 4, "fewer samples were not profiled"
    # Seconds and bytes per sample of the layers before each cut.
    assert profile.forward.tolist() == pytest.approx([0.0, 0.25e-3, 0.5e-3, 0.75e-3])
    assert profile.backward[-1] == pytest.approx(1.5e-3)
    assert profile.activations.tolist() == [0.0, 50.0, 100.0, 150.0]
    assert profile.parameters.tolist() == [0.0, 300.0, 600.0, 900.0]
    assert profile.outputs.tolist() == [0.0, 25.0, 25.0, 0.0]
    assert [profile.slice_samples(20, replicas) for replicas in (1, 3, 8)] == [20, 7, 4]


def test_rates_of_clusters(tmp_path: Path) -> None:
    a = read_cluster("A")
    assert a == read_cluster("2x8") == read_cluster("2x8@25")
    assert (a.machines, a.gpus_per_machine, a.num_gpus, a.empty) == (2, 8, 16, (8, 8))
    assert read_cluster("B") == read_cluster("16x1")
    c = read_cluster("C")
    assert c == read_cluster("16x1@10")
    assert c.network_gb_per_s == 1.25
    # A message is never faster than the network.
    assert read_cluster("2x1@4").message_gb_per_s == 0.5
    path = tmp_path / "ours.yaml"
    fields = "name: ours\nmachines: 3\ngpus_per_machine: 4\nlink_gb_per_s: 200\nring_gb_per_s: 200\n"
    path.write_text(fields + "network_gb_per_s: 12.5\nmessage_gb_per_s: 12\nmemory_gb: 80\n")
    ours = read_cluster(str(path))
    assert (ours.num_gpus, ours.memory_gb, ours.latency_us) == (12, 80.0, 0.0)
    path.write_text(fields)
    with pytest.raises(ConfigError, match=r"ours\.yaml: network_gb_per_s is missing"):
        read_cluster(str(path))


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    for name, message in (
        ("D", "no cluster D"),
        ("0x8", "cluster 0x8 has a 0 in it"),
        ("2x8@0", "cluster 2x8@0 has a 0 in it"),
        ("300x8", "has 2400 devices; use at most 256"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_cluster(name)
    path = tmp_path / "mine.yaml"
    path.write_text("name: [")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not YAML"):
        read_profile(path)
    with pytest.raises(ConfigError, match=r"unknown chain profile bert-49: did you mean bert-48"):
        find_profile("bert-49")


# As published: millions of parameters, ms, GB on one V100, samples per microbatch.
PUBLISHED = {
    "vgg-19": (137, 144, 5.6, 32),
    "amoebanet-36": (933, 168, 20.0, 1),
    "bert-24": (335, 172, 6.0, 2),
    "xlnet-36": (500, 301, 12.0, 1),
    "bert-48": (637, 344, 11.4, 2),
    "gnmt-16": (291, 249, 3.9, 64),
    "resnet-50": (25, 100, 2.44, 32),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_have_the_published_totals(name: str) -> None:
    profile = find_profile(name)
    parameters, milliseconds, memory, batch = PUBLISHED[name]
    seconds = (profile.forward[-1] + profile.backward[-1]) * profile.batch_size
    held = profile.state_factor * profile.parameters[-1] + profile.activations[-1] * profile.batch_size
    assert profile.batch_size == batch
    assert profile.parameters[-1] / 4e6 == pytest.approx(parameters, rel=1e-6)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=1e-6)
    assert held / 1e9 == pytest.approx(memory, rel=1e-6)
    assert profile.provenance.startswith("synthetic")


def test_example_profile_equals_find_profile() -> None:
    assert read_profile(REPOSITORY / "examples" / "chain" / "bert-48.yaml") == find_profile("bert-48")
