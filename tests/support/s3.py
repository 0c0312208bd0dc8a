"""HTTP servers for tests, and an in-memory server of the part of S3's protocol that clients use to write, list, read and delete
objects. It does not check signatures, records all requests, and answers 403 to requests that a test refuses."""

import contextlib
import hashlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest


class Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass


class LocalServer(http.server.ThreadingHTTPServer):
    """Listens on a free port of this machine."""

    daemon_threads = True

    def __init__(self, handler: type[Quiet]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._is_open = True

    def handle_error(self, *_: Any) -> None:
        """Ignore errors of a client that closed the connection or was killed."""

    def close(self) -> None:
        if self._is_open:
            self.shutdown()
            self.server_close()
        self._is_open = False


S = TypeVar("S", bound=LocalServer)


@contextlib.contextmanager
def running(server: S) -> Iterator[S]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


class S3Server(LocalServer):
    """Buckets are created by their first object, except those in `missing_buckets`."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.objects: dict[str, bytes] = {}
        """bucket/key -> content."""
        self.parts: dict[str, dict[int, bytes]] = {}
        """Multipart uploads: id -> part number -> content."""
        self.asked: list[tuple[str, str]] = []
        """Method and bucket/key of each request, in order."""
        self.missing_buckets: set[str] = set()
        self.refuses: Callable[[str, str], bool] = lambda method, name: False
        """Called with method and bucket/key before a request is processed."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a client finds the server."""
        credentials = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**credentials, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}"}

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Configure clients in this process."""
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # clients of earlier servers
        for name, value in self.environment.items():
            patch.setenv(name, value)


class _Handler(Quiet):
    server: S3Server

    def _begin(self) -> tuple[str, dict[str, str], bytes] | None:
        """Return bucket/key, query and body; None if the request was refused."""
        parts = urlsplit(self.path)
        name = unquote(parts.path).strip("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, name))
        if self.server.refuses(self.command, name):
            self._fail(403, "AccessDenied")
        elif name.partition("/")[0] in self.server.missing_buckets:
            self._fail(404, "NoSuchBucket")
        else:
            return name, query, body
        return None

    def _answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._answer(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), status)

    def do_PUT(self) -> None:
        if (request := self._begin()) is None:
            return
        name, query, body = request
        if "uploadId" in query:
            self.server.parts[query["uploadId"]][int(query["partNumber"])] = body
        elif "/" in name:
            self.server.objects[name] = body
        self._answer(ETag=_tag(body))

    def do_POST(self) -> None:
        if (request := self._begin()) is None:
            return
        name, query, body = request
        if "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.server.objects.pop(f"{name}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif "uploads" in query:
            upload = str(len(self.server.parts))
            self.server.parts[upload] = {}
            bucket, _, key = name.partition("/")
            self._answer(
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>".encode()
            )
        else:
            numbers = map(int, re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode()))
            parts = self.server.parts.pop(query["uploadId"])
            self.server.objects[name] = b"".join(parts[number] for number in numbers)
            self._answer(b"<CompleteMultipartUploadResult><ETag>whole</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        if (request := self._begin()) is not None:
            self.server.objects.pop(request[0], None)
            self._answer(status=204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if (request := self._begin()) is None:
            return
        name, query, _ = request
        if "list-type" in query:
            self._list(name, query.get("prefix", ""), query.get("delimiter", ""))
        elif "/" not in name:
            self._answer()
        elif (content := self.server.objects.get(name)) is None:
            self._fail(404, "NoSuchKey")
        else:
            headers = {"ETag": _tag(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            first, _, last = (self.headers.get("Range") or "bytes=0-")[6:].partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            self._answer(part, 206 if "Range" in self.headers else 200, **headers)

    def _list(self, bucket: str, prefix: str, delimiter: str) -> None:
        rows: dict[str, str] = {}
        for name, content in sorted(self.server.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if name == key or not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            folder = f"{prefix}{head}{delimiter}"
            size = f"<Size>{len(content)}</Size><ETag>{_tag(content)}</ETag>"
            when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass>"
            if found:
                rows[folder] = f"<CommonPrefixes><Prefix>{quote(folder)}</Prefix></CommonPrefixes>"
            else:
                rows[key] = f"<Contents><Key>{quote(key)}</Key>{size}{when}</Contents>"
        head = f"<Name>{bucket}</Name><Prefix>{quote(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
        more = f"<MaxKeys>1000</MaxKeys><EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>{''.join(rows.values())}"
        self._answer(f"<ListBucketResult>{head}{more}</ListBucketResult>".encode())


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
