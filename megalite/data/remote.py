"""Files at addresses (s3://, gs://, https://...) as files here: fetched once into a cache, and checked.

http and https need nothing; other addresses go through fsspec and the package of their store (s3fs for s3://), and whole
datasets of Hugging Face through its package datasets.
"""

import contextlib
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from megalite.checkpoint.digests import RunningDigest
from megalite.checkpoint.folders import LATEST_NAME, step_name, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, listed_files
from megalite.config.data import HUB, PATH_SETTINGS, TEXT_SUFFIXES, is_address, names_text
from megalite.config.describe import redact_text, replace, value_of
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.data.token_files import mask_prefix, read_side_file, side_digests

BESIDE_TOKENIZER = ("tokenizer_config.json", "chat_template.jinja")
_SETTINGS = (*PATH_SETTINGS, "tokenizer_model", "vocab_file", "merge_file", "load")
_BLOCK = 1 << 20
_ATTEMPTS, _TIMEOUT = 4, 30.0
_NAME_CHARACTERS = 16


class _Missing(Exception):
    """There is nothing at the address."""


@dataclass(frozen=True)
class _State:
    """What is at an address now."""

    size: int
    tag: str  # another one once the content is another


def shown(address: str) -> str:
    """An address for messages: without credentials and without its query, which may be a signature."""
    parts = urlsplit(address)
    return redact_text(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))


def with_suffix(address: str, suffix: str) -> str:
    """An address with something behind its path."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=parts.path + suffix))


def fetch_all(config: RunConfig, *, say: Callable[[str], None], stopped: Callable[[], bool]) -> dict[str, str]:
    """Address -> path here, of all that the settings name, fetched where it is not here yet.

    Raises ConfigError: it cannot be read, or is not what its checksum says."""
    cache = _Cache(Path(config.data.data_cache_path or Path.home() / ".cache" / "megalite"), say, stopped)
    found: dict[str, str] = {}
    for name in _SETTINGS:
        for word in filter(is_address, _words(value_of(config, name))):
            if name == "load":
                found[word] = cache.checkpoint(word, config.checkpoint.ckpt_step)
            elif word.startswith(HUB) and not urlsplit(word).path.lower().endswith(TEXT_SUFFIXES):
                found[word] = str(cache.dataset(word))
            elif name in PATH_SETTINGS and not names_text(urlsplit(word).path):
                found[word] = cache.token_files(word, sft=config.data.sft)
            else:
                found[word] = str(cache.file(word))
                for other in BESIDE_TOKENIZER if found[word].endswith("tokenizer.json") else ():
                    parts = urlsplit(word)
                    beside = urlunsplit(parts._replace(path=str(PurePosixPath(parts.path).with_name(other))))
                    cache.file(beside, optional=True, place=Path(found[word]).with_name(other))
    return found


def with_places(config: RunConfig, places: dict[str, str]) -> RunConfig:
    """The config with paths in the place of addresses."""
    changes: dict[str, Any] = {}
    for name in _SETTINGS:
        value = value_of(config, name)
        if isinstance(value, list):
            changes[name] = [places.get(word, word) for word in value]
        elif value in places:
            changes[name] = places[value]
    return replace(config, **changes)


def _words(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


class _Cache:
    def __init__(self, folder: Path, say: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        self._folder, self._say, self._stopped = folder, say, stopped

    def _place(self, address: str) -> Path:
        """A folder for each address, so that files keep their names."""
        key = hashlib.sha256(shown(address).encode()).hexdigest()[:_NAME_CHARACTERS]
        return self._folder / key / PurePosixPath(urlsplit(address).path).name

    def file(
        self,
        address: str,
        *,
        place: Path | None = None,
        optional: bool = False,
        sha256: str | None = None,
        block: int = 0,
    ) -> Path | None:
        """The file of an address; None if it is optional and there is none. `sha256`: what its content must have; with
        `block`, as in a `FileEntry`."""
        place = place or self._place(address)
        note = place.with_name(f"{place.name}.origin")
        try:
            state = _store(address).state()
        except _Missing:
            if optional:
                place.unlink(missing_ok=True)
                return None
            raise ConfigError(f"{shown(address)} does not exist; give the address of a file that does") from None
        origin = [state.size, state.tag, sha256]
        if place.exists() and place.stat().st_size == state.size and _read_note(note) == origin:
            return place
        with self._kept(shown(address), place) as part:
            digest = self._download(address, state, part, RunningDigest(block) if block else hashlib.sha256())
            if sha256 is not None and digest != sha256:
                raise ConfigError(f"{shown(address)} is damaged: its sha256 is {digest}, not {sha256}; write it again")
            note.unlink(missing_ok=True)
        note.write_text(json.dumps(origin))
        self._say(f"fetched {shown(address)} ({state.size:,} bytes) to {place}")
        return place

    @contextlib.contextmanager
    def _kept(self, name: str, place: Path) -> Iterator[Path]:
        """Where a file is written that is in its place at the end of the block."""
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
                f"{name} cannot be kept in {place.parent}: {error.strerror}; name another folder with --data-cache-path"
            ) from None

    def _download(self, address: str, state: _State, part: Path, digest: Any) -> str:
        """Its hash. A connection that breaks is made again from there."""
        store, fault = _store(address), "it ends early"
        with part.open("wb") as file:
            for _ in range(_ATTEMPTS):
                try:
                    with contextlib.closing(store.read(file.tell(), state)) as blocks:
                        for block in blocks:
                            file.write(block)
                            digest.update(block)
                            if self._stopped():
                                raise ConfigError(f"stopped while {shown(address)} was fetched")
                except (_Broken, _Missing) as error:
                    fault = str(error) or "it is gone"
                if file.tell() >= state.size:
                    break
            if file.tell() != state.size:
                raise ConfigError(
                    f"{shown(address)} cannot be read: {fault}, after {file.tell():,} of {state.size:,} bytes; start again "
                    "once the server answers"
                )
        return str(digest.hexdigest())

    def dataset(self, address: str) -> Path:
        """The rows of a dataset of Hugging Face, as .jsonl: `hf://ORGANISATION/NAME?split=train&name=CONFIG&revision=R`, or
        `hf:///FOLDER` of one on disk. `split`, as the package datasets has it, is train unless it is given."""
        parts = urlsplit(address)
        name, asked = parts.netloc + parts.path, {"split": "train", **dict(parse_qsl(parts.query))}
        unknown = asked.keys() - {"split", "name", "revision"}
        if unknown:
            raise ConfigError(f"{address}: there is no {min(unknown)}; split, name and revision can be given")
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"{address} needs the package datasets: pip install datasets") from None
        try:
            rows = datasets.load_dataset(name, **asked)
        except Exception as error:  # of many kinds: the hub's, the file system's, the data's
            raise ConfigError(f"{address} cannot be read: {redact_text(' '.join(str(error).split()))[:300]}") from None
        key = hashlib.sha256(f"{address} {rows._fingerprint}".encode()).hexdigest()[:_NAME_CHARACTERS]
        place = self._folder / key / f"{PurePosixPath(name).name}.jsonl"
        if not place.exists():
            with self._kept(address, place) as part:
                rows.to_json(part)
            self._say(f"fetched {address} ({len(rows):,} rows) to {place}")
        return place

    def token_files(self, prefix: str, *, sft: bool) -> str:
        """The prefix here. Raises ConfigError: as `file`; or the .bin or .idx is not what the .json says."""
        parts = urlsplit(prefix)
        prefixes = [prefix, urlunsplit(parts._replace(path=mask_prefix(parts.path)))] if sft else [prefix]
        here = self._place(prefix)
        for one in prefixes:
            place = here.with_name(PurePosixPath(urlsplit(one).path).name)
            side = self.file(with_suffix(one, ".json"), place=Path(f"{place}.json"), optional=True)
            digests = side_digests((read_side_file(place) or {}) if side else {})
            for suffix in (".idx", ".bin"):
                self.file(with_suffix(one, suffix), place=Path(f"{place}{suffix}"), sha256=digests.get(suffix))
        return str(here)

    def checkpoint(self, folder: str, step: int | None) -> str:
        """A folder here with the checkpoint of a step, or the one that `latest` names; each file as its manifest says."""
        name = None if step is None else step_name(step)
        here = self._place(folder.rstrip("/"))
        if name is None:
            latest = self.file(
                with_suffix(folder.rstrip("/"), f"/{LATEST_NAME}"), place=here / LATEST_NAME, optional=True
            )
            if latest is None:
                return str(here / "none")
            name = latest.read_text().strip()
            if step_of(name) is None:
                raise CheckpointError(f"{shown(folder)}/{LATEST_NAME} names no checkpoint: {name[:40]!r}")
        base, place = with_suffix(folder.rstrip("/"), f"/{name}"), here / f"of-{name}" / name
        manifest = self.file(with_suffix(base, f"/{MANIFEST_NAME}"), place=place / MANIFEST_NAME)
        assert manifest is not None
        for file, entry in listed_files(manifest.read_text(), source=f"{shown(base)}/{MANIFEST_NAME}").items():
            self.file(with_suffix(base, f"/{file}"), place=place / file, sha256=entry.sha256, block=entry.block)
        return str(place.parent)


def _read_note(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


class _Broken(Exception):
    """The connection is gone; another may work."""


class _Http:
    """An object of a web server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def state(self) -> _State:
        with self._open("HEAD") as answer:
            headers = answer.headers
        if not (headers.get("Content-Length") or "").isdecimal():
            raise ConfigError(f"{shown(self._address)}: the server does not say how long it is; copy the file here")
        return _State(int(headers["Content-Length"]), headers.get("ETag") or headers.get("Last-Modified") or "")

    def read(self, start: int, state: _State) -> Generator[bytes, None, None]:
        with self._open("GET", {"Range": f"bytes={start}-"} if start else {}) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            if tag != state.tag or (start and answer.status != http.client.PARTIAL_CONTENT):
                raise ConfigError(
                    f"{shown(self._address)} has changed while it was read, or cannot be resumed; start again"
                )
            try:
                while block := answer.read(_BLOCK):
                    yield block
            except (OSError, http.client.HTTPException) as error:
                raise _Broken(str(error) or type(error).__name__) from None

    def _open(self, method: str, headers: dict[str, str] | None = None) -> Any:
        parts = urlsplit(self._address)
        request = urllib.request.Request(
            urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])), method=method, headers=headers or {}
        )
        if "@" in parts.netloc:
            credentials = unquote(parts.netloc.rpartition("@")[0]).encode()
            request.add_header("Authorization", f"Basic {b64encode(credentials).decode('ascii')}")
        for left in reversed(range(_ATTEMPTS)):
            try:
                return urllib.request.urlopen(request, timeout=_TIMEOUT)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (http.client.NOT_FOUND, http.client.GONE):
                    raise _Missing from None
                if error.code < http.client.INTERNAL_SERVER_ERROR or not left:
                    raise self._refused(f"{error.code} {error.reason}") from None
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise self._refused(getattr(error, "reason", None) or error) from None
        raise AssertionError

    def _refused(self, reason: object) -> ConfigError:
        return ConfigError(
            f"{shown(self._address)} cannot be read: {reason}; see that the server runs and that you may read there"
        )


class _FileSystem:
    """An object of a store that fsspec knows."""

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            import fsspec
        except ImportError:
            raise self._fault("the package fsspec is not installed: pip install fsspec") from None
        try:
            self._files, self._path = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise self._fault(error) from None

    def state(self) -> _State:
        try:
            facts = self._files.info(self._path)
        except FileNotFoundError:
            raise _Missing from None
        except Exception as error:  # each store has its own
            raise self._fault(error) from None
        tags = [str(facts[name]) for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified") if facts.get(name)]
        return _State(int(facts.get("size") or 0), tags[0] if tags else "")

    def read(self, start: int, state: _State) -> Generator[bytes, None, None]:
        try:
            with self._files.open(self._path, "rb") as file:
                file.seek(start)
                while block := file.read(_BLOCK):
                    yield block
        except Exception as error:
            raise _Broken(redact_text(str(error))[:200] or type(error).__name__) from None

    def _fault(self, reason: object) -> ConfigError:
        return ConfigError(f"{shown(self._address)} cannot be read: {redact_text(str(reason))[:200]}")


def _store(address: str) -> _Http | _FileSystem:
    return _Http(address) if urlsplit(address).scheme in ("http", "https") else _FileSystem(address)
