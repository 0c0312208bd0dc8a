"""A web server for the objects of a folder: ranges, tags, broken connections, and a password."""

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.s3 import LocalServer, Quiet, running


class Store(LocalServer):
    """Serves a folder and counts requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.folder = folder
        self.asked: list[str] = []
        self.breaks_after: int | None = None
        """Bytes of an answer after which the connection is closed, once."""
        self.password: str | None = None

    def address(self, name: str, *, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}/{name}"


class _Handler(Quiet):
    server: Store

    def do_GET(self) -> None:
        store, path = self.server, self.server.folder / self.path.partition("?")[0].lstrip("/")
        store.asked.append(f"{self.command} {path.name} {self.headers.get('Range', '')}".strip())
        wanted = store.password and "Basic " + base64.b64encode(store.password.encode()).decode()
        if wanted and self.headers.get("Authorization") != wanted:
            self.send_error(403)
            return
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        first, _, last = (self.headers.get("Range") or "bytes=0-")[6:].partition("-")
        start, content = int(first), content[: int(last) + 1] if last else content
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            stop = len(content) if store.breaks_after is None else start + store.breaks_after
            self.wfile.write(content[start:stop])
            if store.breaks_after is not None:
                store.breaks_after = None
                self.close_connection = True

    do_HEAD = do_GET


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Store]:
    """Start a server of an empty folder."""
    folder.mkdir()
    with running(Store(folder)) as server:
        yield server
