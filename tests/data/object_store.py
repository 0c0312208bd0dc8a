"""A web server with the objects of a folder: ranges, tags, broken connections, and a password. To clients of Google Cloud
Storage a folder in it is a bucket, as far as they read objects by name."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_GOOGLE = re.compile(r"(/download|)/storage/v1/b/([^/?]+)/o(?:/([^/?]+))?(?:\?.*)?")


class Store(http.server.ThreadingHTTPServer):
    """Serves a folder; counts what is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        self.breaks_after: int | None = None
        """Bytes of an answer before the connection is closed, once."""
        self.password: str | None = None
        self._is_open = True

    def handle_error(self, *_: Any) -> None:
        """A client that has heard enough is no fault."""

    def close(self) -> None:
        if self._is_open:
            self.shutdown()
            self.server_close()
        self._is_open = False

    def address(self, name: str, *, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        if (asked := _GOOGLE.fullmatch(self.path)) is None:
            self._answer(None)
            return
        self.path = f"/{asked[2]}/{unquote(asked[3] or '')}"
        path = self.server.folder / self.path[1:]
        if asked[1] or not path.is_file():
            self._answer(None)
            return
        content = path.read_bytes()
        tag = base64.b64encode(hashlib.md5(content).digest()).decode()
        facts = {"bucket": asked[2], "name": unquote(asked[3]), "size": str(len(content)), "md5Hash": tag, "etag": tag}
        said = json.dumps({"kind": "storage#object", **facts}).encode()
        self.server.asked.append(f"facts {path.name}")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def _answer(self, body: bytes | None) -> None:
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
        if body is None:
            stop = len(content) if store.breaks_after is None else start + store.breaks_after
            self.wfile.write(content[start:stop])
            if store.breaks_after is not None:
                store.breaks_after = None
                self.close_connection = True


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Store]:
    """A server of an empty folder."""
    folder.mkdir()
    server = Store(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
