"""Candidates checked before anything is launched: legal, startable, scheduled and small enough, or why not."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalite.config import files
from megalite.config.byte_size import format_bytes
from megalite.config.data import DataConfig
from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable, validate
from megalite.data.tokenizers.build import build_tokenizer
from megalite.sweep.candidates import Candidate
from megalite.sweep.predict import Machine, Predicted, predicted_memory, predicted_step

_KEY_LENGTH = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked configuration."""

    key: str
    """Digest of the config and the number of ranks: the same configuration in another sweep has the same."""
    source: str
    label: str
    """In a few words, for people."""
    settings: Mapping[str, Any]
    """What sets it apart: the settings that are not the same in all runs of the sweep."""
    config: RunConfig
    """Resolved, its vocabulary known, unless it is refused."""
    ranks: int
    refused: str | None = None
    """Why it cannot run."""
    predicted: Predicted | None = field(default=None, compare=False)

    @property
    def tokens_per_step(self) -> int:
        """Of the global batch."""
        t = self.config.training
        assert t.global_batch_size is not None, "validate() resolves it"
        return t.global_batch_size * t.seq_length


def check_all(
    candidates: Sequence[Candidate], *, memory_limit: float | None, machine: Machine | None
) -> tuple[Run, ...]:
    """Each candidate as a run, in the same order; of those that are the same configuration the first.

    Args:
        memory_limit: bytes; a run that is predicted to need more on a rank is refused.
        machine: predicts times.
    """
    vocabularies = _Vocabularies()
    apart = _names_apart(candidates)
    runs: dict[str, Run] = {}
    for candidate in candidates:
        run = _check(candidate, apart, memory_limit=memory_limit, machine=machine, vocabularies=vocabularies)
        runs.setdefault(run.key, run)
    return tuple(runs.values())


def _names_apart(candidates: Sequence[Candidate]) -> list[str]:
    """Settings that are not the same in all candidates, of those that one of them gives."""
    given = {name for candidate in candidates for name in candidate.settings}
    values = [values_of(candidate.config) for candidate in candidates]
    return [
        name for name in settings() if name in given and any(each[name] != values[0][name] for each in values)
    ]


def _label(candidate: Candidate, apart: Sequence[str]) -> str:
    """What it gives, and what its base gives where others differ."""
    values = values_of(candidate.config)
    shown = [
        f"{name} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for name in apart
        if (value := values[name]) != settings()[name].default or name in candidate.settings
    ]
    return ", ".join(shown) or "as the base"


def _check(
    candidate: Candidate,
    apart: list[str],
    *,
    memory_limit: float | None,
    machine: Machine | None,
    vocabularies: "_Vocabularies",
) -> Run:
    config, ranks = candidate.config, candidate.ranks
    refused, predicted = None, None
    try:
        config = validate(config, ranks, candidate.explicit)
        require_startable(config)
        # All sizes need the vocabulary's, which a tokenizer may have to tell.
        config = validate(replace(config, vocab_size=vocabularies.size(config)), ranks)
        predicted = predicted_memory(config)
        _refuse_large(predicted, memory_limit)
        predicted = predicted_step(predicted, config, machine)
    except ConfigError as error:
        refused = str(error)
    values = values_of(candidate.config)
    return Run(
        key=_key(config, ranks),
        source=candidate.source,
        label=_label(candidate, apart),
        settings={name: values[name] for name in apart},
        config=config,
        ranks=ranks,
        refused=refused,
        predicted=predicted,
    )


def _refuse_large(predicted: Predicted, limit: float | None) -> None:
    if limit is not None and predicted.memory_bytes > limit:
        raise ConfigError(
            f"needs {format_bytes(predicted.memory_bytes)} on the fullest rank, more than memory_limit "
            f"{format_bytes(limit)}"
        )


def _key(config: RunConfig, ranks: int) -> str:
    return hashlib.sha256(f"{ranks}\n{files.dump(config)}".encode()).hexdigest()[:_KEY_LENGTH]


class _Vocabularies:
    """Sizes of vocabularies; each tokenizer is read once."""

    def __init__(self) -> None:
        self._known: list[tuple[DataConfig, int | ConfigError]] = []

    def size(self, config: RunConfig) -> int:
        """As the config says, or as its tokenizer does."""
        if config.model.vocab_size is not None:
            return config.model.vocab_size
        found = next((found for data, found in self._known if data == config.data), None)
        if found is None:
            found = self._read(config)
            self._known.append((config.data, found))
        if isinstance(found, ConfigError):
            raise found
        return found

    @staticmethod
    def _read(config: RunConfig) -> int | ConfigError:
        try:
            tokenizer = build_tokenizer(config.data, None)
        except ConfigError as error:
            return error
        assert tokenizer is not None, "require_startable() asks for a tokenizer or a size"
        return tokenizer.vocab_size


def refusals(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each run that cannot be made."""
    return (f"{run.label}: {run.refused}" for run in runs if run.refused is not None)
