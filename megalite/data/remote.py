"""Fetch files from addresses (s3://, gs://, https://...) into a local cache, once, and verify them.

Whole Hugging Face datasets are loaded with the package `datasets`."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from megalite.checkpoint.files import RunningDigest
from megalite.checkpoint.folders import LATEST_NAME, step_name, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing, Manifest
from megalite.config.data import HUB, PATH_SETTINGS, TEXT_SUFFIXES, is_address, names_text
from megalite.config.describe import redact_text, replace, value_of
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.registry import optional
from megalite.config.run import RunConfig
from megalite.data.stores import Broken, Missing, State, StoreObject, open_store, redacted, with_suffix
from megalite.data.token_files import mask_prefix, read_side_file, side_digests
from megalite.tokenizers.base import SETTINGS_NAME, TEMPLATE_NAME, TOKENIZER_NAME

_SETTINGS = ("tokenizer_model", "vocab_file", "merge_file", "load", *PATH_SETTINGS)
"""Settings with addresses, in fetch order: `Accept` needs the tokenizer, and data comes last because it is large."""
_ATTEMPTS = 4
_NAME_CHARACTERS = 16


class _Unusable(ConfigError):
    """Raised for a file that is missing or does not match its checksum."""


Accept = Callable[[str, Manifest, RunConfig], None]
"""Raises ConfigError if a run cannot continue from the checkpoint with this name and manifest. The tokenizer in the
config is already a local path."""


def fetch_all(
    config: RunConfig,
    *,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    accept: Accept = lambda name, manifest, config: None,
) -> dict[str, str]:
    """Fetch all addresses in the settings that are not in the cache yet. Return address -> local path.

    Raises ConfigError if an address cannot be read or does not match its checksum."""
    cache = _Cache(_cache_folder(config), say, stopped)
    found: dict[str, str] = {}
    for name in _SETTINGS:
        for word in filter(is_address, _words(value_of(config, name))):
            if name == "load":
                own = word.rstrip("/") == (config.checkpoint.save or "").rstrip("/")
                found[word] = cache.checkpoint(word, with_places(config, found), own=own, accept=accept)
            elif (
                name in PATH_SETTINGS
                and word.startswith(HUB)
                and not urlsplit(word).path.lower().endswith(TEXT_SUFFIXES)
            ):
                found[word] = str(cache.dataset(word))
            elif name in PATH_SETTINGS and not names_text(urlsplit(word).path):
                found[word] = cache.token_files(word, sft=config.data.sft)
            else:
                found[word] = str(cache.file(word))
                for other in (SETTINGS_NAME, TEMPLATE_NAME) if found[word].endswith(TOKENIZER_NAME) else ():
                    parts = urlsplit(word)
                    beside = urlunsplit(parts._replace(path=str(PurePosixPath(parts.path).with_name(other))))
                    cache.file(beside, optional=True, place=Path(found[word]).with_name(other))
    return found


def with_places(config: RunConfig, places: dict[str, str]) -> RunConfig:
    """Return the config with addresses replaced by paths."""
    changes: dict[str, Any] = {}
    for name in _SETTINGS:
        value = value_of(config, name)
        if isinstance(value, list):
            changes[name] = [places.get(word, word) for word in value]
        elif value in places:
            changes[name] = places[value]
    return replace(config, **changes)


def fetch_checkpoint(address: str, step: int | None, *, say: Callable[[str], None]) -> Path:
    """Fetch the checkpoint of a step, or the newest one, from an address. Return its local folder."""
    config = replace(RunConfig(), load=address, ckpt_step=step)
    return Path(fetch_all(config, say=say, stopped=lambda: False)[address])


def waiting_folder(config: RunConfig) -> Path:
    """Return the local folder of checkpoints that wait for their upload to the address in `save`."""
    return _place_in(_cache_folder(config), str(config.checkpoint.save).rstrip("/")) / platform.node()


def is_fetched(load: str, config: RunConfig) -> bool:
    """Return whether the path is where `fetch_all` stores checkpoints from the address in `save`."""
    return waiting_folder(config).parent == Path(load).parent


def _cache_folder(config: RunConfig) -> Path:
    return Path(config.data.data_cache_path or Path.home() / ".cache" / "megalite")


def _place_in(folder: Path, address: str) -> Path:
    """Return a local path with the address's file name, in a folder of its address."""
    key = hashlib.sha256(redacted(address).encode()).hexdigest()[:_NAME_CHARACTERS]
    return folder / key / PurePosixPath(urlsplit(address).path).name


def _words(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


class _Cache:
    def __init__(self, folder: Path, say: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        self._folder, self._log, self._stopped = folder, say, stopped

    def file(
        self,
        address: str,
        *,
        place: Path | None = None,
        optional: bool = False,
        sha256: str | None = None,
        block: int = 0,
    ) -> Path | None:
        """Fetch a file; return None if it is optional and missing. `sha256`: expected digest, computed as in a
        `FileEntry` if `block` is set."""
        place = place or _place_in(self._folder, address)
        note = place.with_name(f"{place.name}.origin")
        try:
            state = open_store(address).state()
        except Missing:
            if optional:
                place.unlink(missing_ok=True)
                return None
            raise _Unusable(f"{redacted(address)} does not exist; give the address of a file that does") from None
        origin = [state.size, state.tag, sha256]
        if place.exists() and place.stat().st_size == state.size and _read_note(note) == origin:
            return place
        with self._stored(redacted(address), place) as part:
            digest = self._download(address, state, part, RunningDigest(block) if block else hashlib.sha256())
            if sha256 is not None and digest != sha256:
                raise _Unusable(f"{redacted(address)} is damaged: its sha256 is {digest}, not {sha256}; write it again")
            note.unlink(missing_ok=True)
        note.write_text(json.dumps(origin))
        self._log(f"fetched {redacted(address)} ({state.size:,} bytes) to {place}")
        return place

    @contextlib.contextmanager
    def _stored(self, name: str, place: Path) -> Iterator[Path]:
        """Provide a temporary path for writing a file; it is renamed to `place` at the end of the context."""
        part = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield part
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{name} cannot be stored in {place.parent}: {error.strerror}; use another folder with --data-cache-path"
            ) from None

    def _download(self, address: str, state: State, part: Path, digest: Any) -> str:
        """Download a file and return its digest. A broken connection is resumed."""
        store, fault = open_store(address), "it ends early"
        with part.open("wb") as file:
            for _ in range(_ATTEMPTS):
                try:
                    with contextlib.closing(store.read(file.tell(), state)) as blocks:
                        for block in blocks:
                            file.write(block)
                            digest.update(block)
                            if self._stopped():
                                raise ConfigError(f"stopped while {redacted(address)} was fetched")
                except (Broken, Missing) as error:
                    fault = str(error) or "it is gone"
                if file.tell() >= state.size:
                    break
            if file.tell() != state.size:
                raise ConfigError(
                    f"{redacted(address)} cannot be read: {fault}, after {file.tell():,} of {state.size:,} bytes; start "
                    "again when the server responds"
                )
        return str(digest.hexdigest())

    def dataset(self, address: str) -> Path:
        """Store the rows of a Hugging Face dataset as .jsonl:
        `hf://ORGANISATION/NAME?split=train&name=CONFIG&revision=R`, or `hf:///FOLDER` for a local one. `split` (syntax
        of the package `datasets`) defaults to train."""
        parts = urlsplit(address)
        name, options = parts.netloc + parts.path, {"split": "train", **dict(parse_qsl(parts.query))}
        unknown = options.keys() - {"split", "name", "revision"}
        if unknown:
            raise ConfigError(f"{address}: {min(unknown)} is unknown; use split, name and revision")
        datasets = optional("datasets", f"{address} needs the package datasets: pip install datasets")
        try:
            rows = datasets.load_dataset(name, **options)
        except Exception as error:  # of the hub, the file system or the data, each with its own types
            raise ConfigError(f"{address} cannot be read: {redact_text(' '.join(str(error).split()))[:300]}") from None
        key = hashlib.sha256(f"{address} {rows._fingerprint}".encode()).hexdigest()[:_NAME_CHARACTERS]
        place = self._folder / key / f"{PurePosixPath(name).name}.jsonl"
        if not place.exists():
            with self._stored(address, place) as part:
                rows.to_json(part)
            self._log(f"fetched {address} ({len(rows):,} rows) to {place}")
        return place

    def token_files(self, prefix: str, *, sft: bool) -> str:
        """Fetch token files and return their local prefix. Raises ConfigError if .bin or .idx does not match its
        .json."""
        parts = urlsplit(prefix)
        prefixes = [prefix, urlunsplit(parts._replace(path=mask_prefix(parts.path)))] if sft else [prefix]
        here = _place_in(self._folder, prefix)
        for one in prefixes:
            place = here.with_name(PurePosixPath(urlsplit(one).path).name)
            side = self.file(with_suffix(one, ".json"), place=Path(f"{place}.json"), optional=True)
            digests = side_digests((read_side_file(place) or {}) if side else {})
            for suffix in (".idx", ".bin"):
                self.file(with_suffix(one, suffix), place=Path(f"{place}{suffix}"), sha256=digests.get(suffix))
        return str(here)

    def checkpoint(self, folder: str, config: RunConfig, *, own: bool, accept: Accept) -> str:
        """Fetch the checkpoint of `ckpt_step`, or the newest complete one that matches its manifest. Return its local
        folder.

        `own`: the checkpoint is of this run, so earlier fetched steps are removed."""
        folder = folder.rstrip("/")
        local, unusable = _place_in(self._folder, folder), list[ConfigError]()
        for name in _candidates(folder, config.checkpoint.ckpt_step):
            base, place, manifest = with_suffix(folder, f"/{name}"), local / f"of-{name}" / name, None
            try:
                text = self.file(with_suffix(base, f"/{MANIFEST_NAME}"), place=place / MANIFEST_NAME)
                assert text is not None
                manifest = Manifest.from_json(text.read_text(), source=f"{redacted(base)}/{MANIFEST_NAME}")
                accept(redacted(base), manifest, config)
                for file, entry in manifest.files.items():
                    self.file(with_suffix(base, f"/{file}"), place=place / file, sha256=entry.sha256, block=entry.block)
            except (_Unusable, CheckpointError) as error:
                if manifest is not None and not isinstance(error, _Unusable):
                    raise  # it is complete, but was not accepted
                unusable.append(error)
                self._log(f"checkpoint {redacted(base)} is passed over: {error}")
                continue
            for former in local.glob("of-*") if own else ():
                if former != place.parent:
                    shutil.rmtree(former, ignore_errors=True)
            return str(place.parent)
        if unusable:
            raise unusable[0]
        if not config.checkpoint.fresh_if_missing:
            raise CheckpointMissing(
                f"no complete checkpoint at {redacted(folder)}; use the address of the folder of steps, or start at "
                "step 0 with --fresh-if-missing"
            )
        self._log(f"no complete checkpoint at {redacted(folder)}")
        return str(local / "none")


def manifests_at(folder: str, step: int | None) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the manifest of a step, or of each complete checkpoint at an address, newest first."""
    folder = folder.rstrip("/")
    for name in _candidates(folder, step):
        address = with_suffix(folder, f"/{name}/{MANIFEST_NAME}")
        if (content := open_store(address).content()) is not None:
            yield redacted(address), content.decode(errors="replace")


def _candidates(folder: str, step: int | None) -> Iterable[str]:
    """Return the checkpoint of the step, or the complete ones, newest first; if the store cannot list (such as a web
    server), the one in `latest`."""
    if step is not None:
        return [step_name(step)]
    store, listed = open_store(folder), dict[str, int]()
    with contextlib.suppress(ConfigError):  # permission to read objects does not imply permission to list them
        listed = store.entries() if isinstance(store, StoreObject) else {}
    if isinstance(store, StoreObject) and listed:
        return map(step_name, store.steps())
    latest = open_store(with_suffix(folder, f"/{LATEST_NAME}")).content()
    if latest is None:
        return []
    name = latest.decode(errors="replace").strip()
    if step_of(name) is None:
        raise CheckpointError(f"{redacted(folder)}/{LATEST_NAME} names no checkpoint: {name[:40]!r}")
    return [name]


def _read_note(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
