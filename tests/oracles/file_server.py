"""An HTTP server on this machine that serves a few files, well or badly."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Served:
    """Behavior of the server, which tests change, and the requests it got.

    Attributes:
        files: path → content, e.g. `"/file.pth"`.
        etag: of every file; `""`: none is sent; `"each"`: its path.
        stops_after: bytes of one answer, after which the connection is closed.
        redirects: path → address.
        requests: path and Range header of each request.
        url: beginning of the addresses, without a slash at its end.
    """

    files: dict[str, bytes]
    etag: str = '"one"'
    honors_range: bool = True
    sends_length: bool = True
    stops_after: int = 1 << 40
    status: int = 200
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@contextmanager
def file_server(files: dict[str, bytes]) -> Iterator[Served]:
    """Serve `files` until the end of the context."""
    served = Served(files)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, range_header = self.path.partition("?")[0], self.headers["Range"]
            served.requests.append((path, range_header))
            content, start, status = served.files.get(path, b""), 0, served.status
            if path not in served.files:
                status = 404
            if path in served.redirects:
                status = 302
            same = self.headers["If-Range"] in (None, served.etag)
            match = re.fullmatch(r"bytes=(\d+)-", range_header or "")
            if status == 200 and match and served.honors_range and same:
                start = int(match[1])
                status = 206 if start < len(content) else 416
            body = content[start:] if status in (200, 206) else b""
            self.send_response(status)
            if path in served.redirects:
                self.send_header("Location", served.redirects[path])
            if status in (206, 416):
                part = f"{start}-{len(content) - 1}" if status == 206 else "*"
                self.send_header("Content-Range", f"bytes {part}/{len(content)}")
            if served.etag:
                self.send_header("ETag", f'"{path}"' if served.etag == "each" else served.etag)
            if served.sends_length:
                self.send_header("Content-Length", str(len(body)))
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: served.stops_after])
            self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: object) -> None:
            """Ignore clients that go away."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
