"""Read objects of web servers, and read and write objects of stores (s3://, gs://), by address.

http and https need no package; other addresses use fsspec and the package of their store (s3fs for s3://)."""

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from megalite.checkpoint.files import replace_durably
from megalite.checkpoint.folders import step_name, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME
from megalite.config.describe import redact_text
from megalite.config.errors import ConfigError

_BLOCK = 1 << 20
_ATTEMPTS, _TIMEOUT = 4, 30.0
_PAUSES = (1.0, 4.0, 15.0)
"""Seconds between attempts after a store has failed."""
_T = TypeVar("_T")


class Missing(Exception):
    """Raised if nothing exists at the address."""


class Broken(Exception):
    """Raised for a lost connection; a new one may work."""


@dataclass(frozen=True)
class State:
    size: int
    tag: str  # changes with the content


def redacted(address: str) -> str:
    """Format an address for messages: without credentials and without the query, which may be a signature."""
    parts = urlsplit(address)
    return redact_text(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))


def with_suffix(address: str, suffix: str) -> str:
    """Append a suffix to the path of an address."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=parts.path + suffix))


def open_store(address: str) -> "WebObject | StoreObject":
    """Open an address. Raises ConfigError if the package of its store is missing."""
    return WebObject(address) if urlsplit(address).scheme in ("http", "https") else StoreObject(address)


class WebObject:
    def __init__(self, address: str) -> None:
        self._address = address

    def state(self) -> State:
        with self._open("HEAD") as answer:
            headers = answer.headers
        if not (headers.get("Content-Length") or "").isdecimal():
            raise ConfigError(f"{redacted(self._address)}: the server sends no Content-Length; copy the file here")
        return State(int(headers["Content-Length"]), headers.get("ETag") or headers.get("Last-Modified") or "")

    def read(self, start: int, state: State) -> Generator[bytes, None, None]:
        with self._open("GET", {"Range": f"bytes={start}-"} if start else {}) as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            if tag != state.tag or (start and answer.status != http.client.PARTIAL_CONTENT):
                raise ConfigError(
                    f"{redacted(self._address)} has changed while it was read, or cannot be resumed; start again"
                )
            try:
                while block := answer.read(_BLOCK):
                    yield block
            except (OSError, http.client.HTTPException) as error:
                raise Broken(str(error) or type(error).__name__) from None

    def content(self) -> bytes | None:
        """Return the whole content, or None if nothing exists."""
        try:
            with self._open("GET") as answer:
                return bytes(answer.read())
        except Missing:
            return None
        except (OSError, http.client.HTTPException) as error:
            raise self._refused(error) from None

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
                    raise Missing from None
                if error.code < http.client.INTERNAL_SERVER_ERROR or not left:
                    raise self._refused(f"{error.code} {error.reason}") from None
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise self._refused(getattr(error, "reason", None) or error) from None
        raise AssertionError

    def _refused(self, reason: object) -> ConfigError:
        return ConfigError(
            f"{redacted(self._address)} cannot be read: {reason}; check that the server runs and that you have access"
        )


class StoreObject:
    """An object, or a folder of objects, of a store that fsspec supports. Methods raise ConfigError if the store
    fails."""

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
        self._progress = fsspec.callbacks.Callback

    def below(self, name: str) -> "StoreObject":
        return StoreObject(with_suffix(self._address, f"/{name}"))

    def state(self) -> State:
        try:
            self._files.invalidate_cache()  # cached listings may be out of date
            facts = self._files.info(self._path)
        except FileNotFoundError:
            raise Missing from None
        except Exception as error:  # each store has its own exceptions
            raise self._fault(error) from None
        tags = [str(facts[name]) for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified") if facts.get(name)]
        return State(int(facts.get("size") or 0), tags[0] if tags else "")

    def read(self, start: int, state: State) -> Generator[bytes, None, None]:
        try:
            with self._files.open(self._path, "rb") as file:
                file.seek(start)
                while block := file.read(_BLOCK):
                    yield block
        except Exception as error:
            raise Broken(redact_text(str(error))[:200] or type(error).__name__) from None

    def content(self) -> bytes | None:
        """Return the whole content, or None if nothing exists."""

        def read() -> bytes | None:
            self._files.invalidate_cache()
            try:
                return bytes(self._files.cat_file(self._path))
            except FileNotFoundError:
                return None

        return self._patiently(read, "read", _PAUSES)

    def entries(self) -> dict[str, int]:
        """Return the names directly in the folder and the bytes of each; empty if the folder does not exist."""

        def listed() -> dict[str, int]:
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}
            return {PurePosixPath(facts["name"]).name: int(facts.get("size") or 0) for facts in found}

        return self._patiently(listed, "listed", _PAUSES)

    def steps(self) -> Iterator[int]:
        """Yield the steps of the complete checkpoints in the folder of a run, newest first: those with a manifest."""
        steps = {step for name in self.entries() if (step := step_of(name)) is not None}
        for step in sorted(steps, reverse=True):
            try:
                self.below(f"{step_name(step)}/{MANIFEST_NAME}").state()
            except Missing:
                continue
            yield step

    def write(self, content: bytes | Path, *, beat: Callable[[], None] = lambda: None, patient: bool = True) -> None:
        """Create or replace the object, atomically if `content` is bytes. `beat` is called during the upload of a file;
        `patient`: retry if the store fails."""

        def sent() -> None:
            if self._path.startswith("/"):  # never create a bucket: its name may be a typing error
                self._files.makedirs(str(PurePosixPath(self._path).parent), exist_ok=True)
            if isinstance(content, bytes) and getattr(self._files, "local_file", False):
                replace_durably(Path(self._path), content)
            elif isinstance(content, bytes):
                self._files.pipe_file(self._path, content)
            else:
                callback = self._progress(hooks={"beat": lambda *_, **__: beat()})
                self._files.put_file(str(content), self._path, callback=callback)

        self._patiently(sent, "written", _PAUSES if patient else ())

    def remove(self) -> None:
        """Remove the object, or the folder with its contents, if it exists."""

        def gone() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._path, recursive=True)

        self._patiently(gone, "removed", _PAUSES)

    def _patiently(self, work: Callable[[], _T], done: str, pauses: Sequence[float]) -> _T:
        for pause in (*pauses, None):
            try:
                return work()
            except Exception as error:  # each store has its own exceptions
                if pause is None or isinstance(error, (FileNotFoundError, PermissionError)):
                    raise self._fault(error, done) from None
                time.sleep(pause)
        raise AssertionError

    def _fault(self, reason: object, done: str = "read") -> ConfigError:
        text = redact_text(str(reason))[:200] or type(reason).__name__
        return ConfigError(f"{redacted(self._address)} cannot be {done}: {text}")
