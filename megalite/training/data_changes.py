"""What a resumed run reads that the run it goes on from would not have read."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from megalite.config.data import DataConfig
from megalite.config.run import RunConfig
from megalite.config.split import DEFAULT_SPLIT
from megalite.config.training import TrainingConfig
from megalite.data.run_samples import megatron_lengths

_ORDER = {"training": ("seed", "seq_length"), "data": ("split", "packing", "data_order")}
"""Settings that the order of samples is a function of, by section."""

_SOURCES = ("data_path", "train_data_path", "mock_data")


def data_changes(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """A line for each difference between the training samples of a checkpoint's run and of this one from here on.

    Args:
        saved: the config in the checkpoint's manifest.
        config: of the run that goes on.
    """
    # A setting that came after the checkpoint was written had its default's meaning.
    before = {
        "training": asdict(TrainingConfig()) | _section(saved, "training"),
        "data": asdict(DataConfig()) | _section(saved, "data"),
    }
    now = {"training": asdict(config.training), "data": asdict(config.data)}
    for sections in (before, now):
        sections["data"]["split"] = sections["data"]["split"] or DEFAULT_SPLIT
    lines = [
        f"the order of samples is another from here on: {name} {before[section][name]} -> {now[section][name]}"
        for section, names in _ORDER.items()
        for name in names
        if before[section][name] != now[section][name]
    ]
    lines += [
        f"the samples are others from here on, unless these hold the same: {name} {_shown(before['data'][name])} -> "
        f"{_shown(now['data'][name])}"
        for name in _SOURCES
        if before["data"][name] != now["data"][name]
    ]
    if before["data"]["data_order"] == now["data"]["data_order"] == "megatron":
        lines += _length_changes(before["training"], config)
    return lines


def _length_changes(training: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Megatron's order is made for the length of the run."""
    known = {name: training[name] for name in asdict(config.training)}
    try:
        before = megatron_lengths(replace(config, training=TrainingConfig(**known)))
        told = all(isinstance(length, int) for length in before.values())
    except (AssertionError, ArithmeticError, TypeError, ValueError):
        told = False
    if not told:
        return [
            "the checkpoint does not say how long its run was: with data_order megatron samples may repeat"
        ]
    now = megatron_lengths(config)
    differ = [
        f"{split} {before[split]} -> {now[split]}"
        for split in now
        if before.get(split, now[split]) != now[split]
    ]
    if not differ:
        return []
    return [
        "the order of samples is another from here on: with data_order megatron a run of another length has another "
        f"order, and samples may repeat: {', '.join(differ)} samples"
    ]


def _section(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = saved.get(name)
    return section if isinstance(section, dict) else {}


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
