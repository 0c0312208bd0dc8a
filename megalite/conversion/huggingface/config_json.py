"""Read config.json and other JSON files of an untrusted folder: reject links out of it and values of the wrong type."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import unique_keys
from megalite.config.describe import replace, settings
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.conversion.weights import ConversionError

MAX_JSON = 256 << 20  # maximum bytes of a JSON file; the largest tokenizers need a tenth of it

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")


def find_file(folder: Path, name: str) -> Path | None:
    """Return the resolved path of a file in `folder`, or None if it does not exist. Links must stay inside the folder.
    In Hugging Face's cache, `.../snapshots/REVISION/`, files may also be links to `.../blobs/`."""
    if not _NAME.fullmatch(name):
        raise ConversionError(f"{folder}: {name[:200]!r} is not the name of a file in this folder")
    path = folder / name
    if not path.is_symlink() and not path.exists():
        return None
    try:
        root, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConversionError(f"{path}: broken link: {error}") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ConversionError(f"{path} is a link to {target}, outside of the folder; put the file itself there")
    if not target.is_file():
        raise ConversionError(f"{path}: not a plain file")
    return target


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    path = find_file(folder, name)
    if path is None:
        return None
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ConversionError(f"{folder / name}: {size} bytes; more than {MAX_JSON} are not read")
        content = path.read_bytes()
    except OSError as error:
        raise ConversionError(f"{folder / name}: {error.strerror}") from None
    return parse_json(content, folder / name)


def parse_json(content: bytes, where: Path | str) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{where}: not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{where}: not a JSON object")
    return value


def refuse_code(values: Mapping[str, Any], where: Path | str) -> None:
    """Reject a file that requires the folder's code, which is never run: without it the model may be another one."""
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if values.get(key):
            raise ConversionError(f"{where}: {key} names code in the folder, which is never run; remove {key}")


MAX_LAYERS = 1 << 16  # bounds the time of checks that loop over layers

Table = Sequence[tuple[Any, ...]]  # rows (our setting, their key, name of a method of `ModelFile`[, default])


def written(model: ModelConfig, table: Table) -> dict[str, Any]:
    """Return the config.json values of the model for the keys of a table."""
    return {theirs: getattr(model, ours) for ours, theirs, *_ in table}


class ModelFile:
    """Checked access to the values of a config.json. Every method raises ConversionError for a wrong value."""

    def __init__(self, values: Mapping[str, Any], where: Path | str) -> None:
        self.values = values
        self.where = where

    def _checked(self, name: str, value: Any, ok: bool, what: str) -> Any:
        if not ok:
            raise self.fault(f"{name} is {str(value)[:60]!r}; it must be {what}")
        return value

    def integer(self, name: str, default: int | None = None, *, limit: int = (1 << 31) - 1) -> int:
        """Return a whole number of at least 1. Without a default the key must exist."""
        value = self.optional_integer(name, default, limit=limit)
        if value is None:
            raise self.fault(f"{name} is {'null' if name in self.values else 'missing'}; it must be a number")
        return value

    def optional_integer(self, name: str, default: int | None = None, *, limit: int = (1 << 31) - 1) -> int | None:
        value = self.values.get(name, default)
        ok = value is None or (type(value) is int and 1 <= value <= limit)
        return self._checked(name, value, ok, f"a whole number from 1 to {limit}")

    def layers(self, name: str) -> int:
        return self.integer(name, limit=MAX_LAYERS)

    def settings(self, table: Table) -> dict[str, Any]:
        return {ours: getattr(self, kind)(theirs, *default) for ours, theirs, kind, *default in table}

    def number(self, name: str, default: float) -> float:
        return self.finite(name, self.values.get(name, default))

    def epsilon(self, name: str, default: float) -> float:
        """Return the epsilon of a norm, at most 1; a larger one would dominate the variance."""
        value = self.number(name, default)
        if value > 1.0:
            raise self.fault(f"{name} is {value:g}; it must be at most 1, such as 1e-05")
        return value

    def finite(self, name: str, value: Any) -> float:
        """Return `value`, the value of `name`, as a finite number."""
        ok = type(value) in (int, float) and -1e30 < value < 1e30  # False for NaN
        return float(self._checked(name, value, ok, "a number"))

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        return bool(self._checked(name, value, type(value) is bool, "true or false"))

    def require(self, only: Mapping[str, Any]) -> None:
        """Raise if a key has another value than the only supported one; null is false."""
        for name, value in only.items():
            found = self.values.get(name, value)
            if found != value and (found or value):
                raise self.fault(f"{name} is {json.dumps(found)[:60]}; only {json.dumps(value)} is supported")

    def activation(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """Return our name of the activation. `choices`: their name -> ours."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            known = ", ".join(choices)
            raise self.fault(f"{name} is {str(value)[:60]!r}; supported: {known}")
        return choices[value]

    def fault(self, text: str) -> ConversionError:
        return ConversionError(f"{self.where}: {text}")

    def model(self, *, seq_length: int, **settings: Any) -> ModelConfig:
        """Return the validated model config with these settings."""
        try:
            return resolved(replace(RunConfig(), **settings).model, seq_length)
        except ConfigError as error:
            raise self.fault(str(error)) from None


def resolved(model: ModelConfig, seq_length: int) -> ModelConfig:
    """Return the model config with derived sizes filled in and settings without effect at their defaults."""
    return validate(replace(RunConfig(model=model), seq_length=seq_length), 1).model


SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic")
"""Supported values of rope_type."""


def read_rope(
    file: ModelFile,
    default_base: float,
    max_positions: int,
    *,
    kinds: Sequence[str] = SCALINGS,
    partial: float | None = None,
) -> dict[str, Any]:
    """Read RoPE settings from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (older).
    `kinds`: values of rope_type that the family supports. `partial`: the family's default of partial_rotary_factor;
    None: RoPE must rotate whole heads."""
    values = _rope_values(file)
    base = file.finite("rope_theta", values.get("rope_theta", default_base))
    rotated = values.get("partial_rotary_factor", partial)
    share = 1.0 if rotated is None else file.finite("partial_rotary_factor", rotated)
    if partial is None and share != 1.0:
        raise file.fault(f"partial_rotary_factor is {rotated}; RoPE can only rotate whole heads (1.0)")
    settings: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": share}
    if "factor" in values and "rope_type" not in values:
        raise file.fault(f"RoPE has factor {str(values['factor'])[:60]} without rope_type, such as linear")
    kind = values.get("rope_type", "default")
    if kind == "default":
        return settings
    if kind not in kinds:
        raise file.fault(f"rope_type is {str(kind)[:60]!r}; supported: {', '.join(kinds)}")

    def needed(name: str) -> float:
        if name not in values:
            raise file.fault(f"rope_type {kind} needs {name}, which is missing")
        return file.finite(name, values[name])

    settings["rope_scaling"] = kind
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = file.finite(name, values.get(name, max_positions))
        if original < 1 or not original.is_integer():
            raise file.fault(f"{name} is {original}; it must be a whole number of at least 1")
        settings["rope_original_max_positions"] = int(original)
        if kind == "yarn":
            growth = max_positions / original if values.get("factor") is None else needed("factor")
            return settings | {"rope_scaling_factor": growth} | _read_yarn(file, values)
    settings["rope_scaling_factor"] = needed("factor")
    if kind == "dynamic":  # transformers always uses max_position_embeddings here
        settings["rope_original_max_positions"] = max_positions
    if kind == "llama3":
        settings |= {
            "rope_low_freq_factor": needed("low_freq_factor"),
            "rope_high_freq_factor": needed("high_freq_factor"),
        }
    return settings


_YARN = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")


def _read_yarn(file: ModelFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read YaRN's settings. Missing values and 0 mean the default. mscale or mscale_all_dim alone has no effect."""
    present = {name: values[name] for name in _YARN if values.get(name) not in (None, 0) or values.get(name) is False}
    found = {f"rope_{name}": file.finite(name, value) for name, value in present.items() if name != "truncate"}
    if "truncate" in present:
        if type(present["truncate"]) is not bool:
            raise file.fault(f"truncate is {str(present['truncate'])[:60]!r}; it must be true or false")
        found["rope_truncate"] = present["truncate"]
    if not {"rope_mscale", "rope_mscale_all_dim"} <= found.keys() or "rope_attention_factor" in found:
        found = {name: value for name, value in found.items() if not name.startswith("rope_mscale")}
    return found


LAYER_KINDS = ("full_attention", "sliding_attention")


def split_rope(file: ModelFile) -> tuple[ModelFile, Any]:
    """Return the file with only the RoPE of full-attention layers, and `rope_theta` of layers with the window, or None
    if `rope_parameters` does not give it."""
    rope = file.values.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope.keys() & LAYER_KINDS:
        return file, None
    full, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    if rope.keys() - LAYER_KINDS or not isinstance(local, Mapping):
        raise file.fault("rope_parameters must have only full_attention and sliding_attention, both objects")
    if local.get("rope_type", "default") != "default":
        raise file.fault(f"rope_type of sliding_attention is {str(local['rope_type'])[:60]!r}; it must be default")
    return ModelFile({**file.values, "rope_parameters": full}, file.where), local.get("rope_theta")


def _rope_values(file: ModelFile) -> dict[str, Any]:
    """Merge the RoPE settings of all places where config.json may have them. Raise if they contradict each other."""
    merged: dict[str, Any] = {}

    def add(values: Mapping[str, Any], place: str) -> None:
        for name, value in values.items():
            key = "rope_type" if name == "type" else name
            if isinstance(value, Mapping):
                raise file.fault(f"{place} has a separate RoPE for {name!r}; all layers must have the same RoPE")
            if merged.setdefault(key, value) != value:
                raise file.fault(f"{key} is {merged[key]} in one place and {value} in {place}; keep one of the two")

    for place in ("rope_parameters", "rope_scaling"):
        values = file.values.get(place)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise file.fault(f"{place} must be an object, not {str(values)[:60]!r}")
        add(values, place)
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    add({name: file.values[name] for name in names if file.values.get(name) is not None}, "the file")
    return merged


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return RoPE's settings under the names that every version of transformers reads."""
    scaling: dict[str, Any] | None = None
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if scaling is not None and model.rope_scaling == "yarn":
        scaling["original_max_position_embeddings"] = model.rope_original_max_positions
        values = {name: getattr(model, f"rope_{name}") for name in _YARN}
        scaling |= {name: value for name, value in values.items() if value != settings()[f"rope_{name}"].default}
    if scaling is not None and model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_positions,
        }
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}
