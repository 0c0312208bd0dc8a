"""config.json of a folder that someone else has made: no file leads out of the folder, and every value has its type."""

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

MAX_JSON = 256 << 20  # bytes of a JSON file that is read: the largest tokenizers take a tenth of it

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")


def find_file(folder: Path, name: str) -> Path | None:
    """Where the content of a file of `folder` is; None if there is none of that name. A link may stay inside the
    folder. In Hugging Face's cache, `.../snapshots/REVISION/`, files are links to `.../blobs/`: those are followed too,
    and no others."""
    if not _NAME.fullmatch(name):
        raise ConversionError(f"{folder}: {name[:200]!r} is not the name of a file in this folder")
    path = folder / name
    if not path.is_symlink() and not path.exists():
        return None
    try:
        root, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConversionError(f"{path}: a link that leads nowhere: {error}") from None
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
    """Nothing from a folder is ever run, so a file that asks for it describes something else than is read here."""
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if values.get(key):
            raise ConversionError(f"{where}: {key} names code of the folder's own, which is never run; remove {key}")


MAX_LAYERS = 1 << 16  # more than any network has: what is checked layer by layer must end

Table = Sequence[tuple[Any, ...]]  # of (our setting, their key, a method of `ModelFile`[, default])


def written(model: ModelConfig, table: Table) -> dict[str, Any]:
    """What a table's keys say of the network."""
    return {theirs: getattr(model, ours) for ours, theirs, *_ in table}


class ModelFile:
    def __init__(self, values: Mapping[str, Any], where: Path | str) -> None:
        self.values = values
        self.where = where

    def _checked(self, name: str, value: Any, ok: bool, what: str) -> Any:
        if not ok:
            raise self.fault(f"{name} is {str(value)[:60]!r}; it must be {what}")
        return value

    def integer(self, name: str, default: int | None = None, *, limit: int = (1 << 31) - 1) -> int:
        """A whole number of at least 1; without default it must be there."""
        value = self.optional_integer(name, default, limit=limit)
        if value is None:
            raise self.fault(f"{name} is {'null' if name in self.values else 'missing'}; it must be a number")
        return value

    def optional_integer(self, name: str, default: int | None = None, *, limit: int = (1 << 31) - 1) -> int | None:
        value = self.values.get(name, default)
        ok = value is None or (type(value) is int and 1 <= value <= limit)
        found: int | None = self._checked(name, value, ok, f"a whole number from 1 to {limit}")
        return found

    def layers(self, name: str) -> int:
        return self.integer(name, limit=MAX_LAYERS)

    def settings(self, table: Table) -> dict[str, Any]:
        return {ours: getattr(self, kind)(theirs, *default) for ours, theirs, kind, *default in table}

    def number(self, name: str, default: float) -> float:
        return self.finite(name, self.values.get(name, default))

    def epsilon(self, name: str, default: float) -> float:
        """What a norm adds to a variance: no more than 1, or it would not normalise."""
        value = self.number(name, default)
        if value > 1.0:
            raise self.fault(f"{name} is {value:g}; it must be at most 1, such as 1e-05")
        return value

    def finite(self, name: str, value: Any) -> float:
        """`value`, which stands under `name`, as a finite number."""
        ok = type(value) in (int, float) and -1e30 < value < 1e30  # NaN is not
        return float(self._checked(name, value, ok, "a number"))

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        return bool(self._checked(name, value, type(value) is bool, "true or false"))

    def activation(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """The activation in our words, from one of `choices` (their word -> ours)."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            known = ", ".join(choices)
            raise self.fault(f"{name} is {str(value)[:60]!r}; what can be expressed is {known}")
        return choices[value]

    def fault(self, text: str) -> ConversionError:
        return ConversionError(f"{self.where}: {text}")

    def model(self, *, seq_length: int, **settings: Any) -> ModelConfig:
        """The network with these settings, checked, what they leave open filled in."""
        try:
            return resolved(replace(RunConfig(), **settings).model, seq_length)
        except ConfigError as error:
            raise self.fault(str(error)) from None


def resolved(model: ModelConfig, seq_length: int) -> ModelConfig:
    """The network with its derived sizes filled in, and settings that have no effect at their defaults."""
    return validate(replace(RunConfig(model=model), seq_length=seq_length), 1).model


SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic")
"""Every rope_type that can be expressed."""


def read_rope(
    file: ModelFile,
    default_base: float,
    max_positions: int,
    *,
    kinds: Sequence[str] = SCALINGS,
    partial: float | None = None,
) -> dict[str, Any]:
    """Settings of RoPE, from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before).

    `kinds`: the values of rope_type that the family has; `partial`: its default of partial_rotary_factor, if it has one.
    """
    values = _rope_values(file)
    base = file.finite("rope_theta", values.get("rope_theta", default_base))
    turned = values.get("partial_rotary_factor", partial)
    share = 1.0 if turned is None else file.finite("partial_rotary_factor", turned)
    if partial is None and share != 1.0:
        raise file.fault(f"partial_rotary_factor is {turned}; RoPE can only turn whole heads (1.0)")
    settings: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": share}
    if "factor" in values and "rope_type" not in values:
        raise file.fault(f"RoPE has a factor, {str(values['factor'])[:60]}, and no rope_type, such as linear")
    kind = values.get("rope_type", "default")
    if kind == "default":
        return settings
    if kind not in kinds:
        raise file.fault(f"rope_type is {str(kind)[:60]!r}; what can be expressed is {', '.join(kinds)}")

    def needed(name: str) -> float:
        if name not in values:
            raise file.fault(f"rope_type {kind} needs {name}, which is missing")
        return file.finite(name, values[name])

    settings["rope_scaling"] = kind
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = file.finite(name, values.get(name, max_positions))
        if original < 1 or not original.is_integer():
            raise file.fault(f"{name} is {original}; it must be a whole number from 1 on")
        settings["rope_original_max_positions"] = int(original)
        if kind == "yarn":
            growth = max_positions / original if values.get("factor") is None else needed("factor")
            return settings | {"rope_scaling_factor": growth} | _read_yarn(file, values)
    settings["rope_scaling_factor"] = needed("factor")
    if kind == "dynamic":  # transformers goes by max_position_embeddings, whatever else stands there
        settings["rope_original_max_positions"] = max_positions
    if kind == "llama3":
        settings |= {
            "rope_low_freq_factor": needed("low_freq_factor"),
            "rope_high_freq_factor": needed("high_freq_factor"),
        }
    return settings


_YARN = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")


def _read_yarn(file: ModelFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """What does not stand there, or is 0, is the default; of mscale and mscale_all_dim one alone says nothing."""
    given = {name: values[name] for name in _YARN if values.get(name) not in (None, 0) or values.get(name) is False}
    found = {f"rope_{name}": file.finite(name, value) for name, value in given.items() if name != "truncate"}
    if "truncate" in given:
        if type(given["truncate"]) is not bool:
            raise file.fault(f"truncate is {str(given['truncate'])[:60]!r}; it must be true or false")
        found["rope_truncate"] = given["truncate"]
    if not {"rope_mscale", "rope_mscale_all_dim"} <= found.keys() or "rope_attention_factor" in found:
        found = {name: value for name, value in found.items() if not name.startswith("rope_mscale")}
    return found


def _rope_values(file: ModelFile) -> dict[str, Any]:
    """What the places that RoPE's settings may stand in say together."""
    merged: dict[str, Any] = {}

    def add(values: Mapping[str, Any], place: str) -> None:
        for name, value in values.items():
            key = "rope_type" if name == "type" else name
            if isinstance(value, Mapping):
                raise file.fault(f"{place} has a separate RoPE for {name!r}; all layers must have the same")
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
    """RoPE's settings under the names that every version of transformers reads."""
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
