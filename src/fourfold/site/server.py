"""`fourfold plan --serve`: the planner's page on the loopback interface, answered by processes of this Python. No torch.

    GET  /, /planner.js, …   the page: the files listed in `page_files`, and no others
    POST /ask/KIND           a question (site/question.py); the answer is lines of JSON: {"progress": …}, then {"answer": …}

Protection against other web pages: the Host header must name the loopback interface (a name that an attacker's DNS points at
127.0.0.1 does not), a question must be JSON of this origin (browsers do not send it from other origins without a preflight
request), questions are limited in size, number and time, and each is answered by a separate process, which ends when the client
disconnects. A question names no file (site/question.py).
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from fourfold.errors import PlanError
from fourfold.site.question import LONGEST, choices

__all__ = ["PAGE_POLICY", "PlannerServer", "page_files", "serve"]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "json": "application/json"}
_MOST = {"plan": 2, "glance": 4}
"""Questions of a kind that are answered at once."""
_TIME = {"plan": 600.0, "glance": 30.0}
"""Seconds until a question is given up."""
_BEAT = 0.2
"""Seconds between signs of life, by which a client that has left is noticed."""


def page_files(engine: str) -> dict[str, bytes]:
    """The files of the page by name. `engine`: "server", or "pyodide" for a static folder."""
    found = {}
    for package, names in (
        ("fourfold.view", ("report.css", "report.js")),
        ("fourfold.site.assets", ("planner.html", "planner.css", "planner.js", "worker.js")),
    ):
        for name in names:
            found[name] = resources.files(package).joinpath(name).read_bytes()
    page = found.pop("planner.html").decode().replace("{{engine}}", engine).replace("{{policy}}", _meta_policy())
    if engine == "server":
        del found["worker.js"]
    return found | {"index.html": page.encode(), "choices.json": json.dumps(choices()).encode()}


def _meta_policy() -> str:
    """The policy for a <meta> element, which cannot say who may frame the page."""
    return "; ".join(p for p in PAGE_POLICY.split("; ") if not p.startswith("frame-ancestors"))


class PlannerServer(ThreadingHTTPServer):
    """The page and its questions, on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, port: int = 0):
        self._lock, self._closed = threading.Lock(), False
        self._processes: set[subprocess.Popen[bytes]] = set()
        super().__init__(("127.0.0.1", port), _Handler)  # closes itself where the port is taken
        self.files = page_files("server")
        self.port = self.server_address[1]
        self.places = {kind: threading.BoundedSemaphore(n) for kind, n in _MOST.items()}
        self._spare = self._started()
        """Has imported the planner already, and waits for a question."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def hosts(self) -> set[str]:
        """What a browser on this machine calls us; without a port where it is that of http."""
        names = ("127.0.0.1", "localhost")
        return {f"{name}:{self.port}" for name in names} | (set(names) if self.port == 80 else set())

    def server_close(self) -> None:
        """Also ends what is being answered."""
        super().server_close()
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        """A process for one question; in a session of its own, so that Ctrl-C ends the server first."""
        command = [sys.executable, "-m", "fourfold.site.question"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._processes.add(process)
        return process

    @contextlib.contextmanager
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        """The spare process; it ends with the context, and another takes its place."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the server is being closed")
            process, self._spare = self._spare, self._started()
        try:
            yield process
        finally:
            process.kill()
            with self._lock:
                self._processes.discard(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PlannerServer
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds for a client to send its request
    server_version, sys_version = "fourfold", ""

    def do_GET(self) -> None:
        if not self._from_here():
            return
        name = self.path.partition("?")[0].lstrip("/") or "index.html"
        if name not in self.server.files:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")
            return
        self._head(HTTPStatus.OK, _TYPES[name.rpartition(".")[2]] + "; charset=utf-8", len(self.server.files[name]))
        self.wfile.write(self.server.files[name])

    def do_POST(self) -> None:
        if not self._from_here():
            return
        kind, length = self.path.removeprefix("/ask/"), self.headers.get("Content-Length", "")
        if kind not in _MOST or not self.path.startswith("/ask/"):
            self._refuse(HTTPStatus.NOT_FOUND, "no such question")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a question is application/json")
        elif not length.isdecimal() or len(length) > 12:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a question has a Content-Length")
        elif int(length) > LONGEST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {LONGEST} bytes")
        else:
            self._answer(kind, self.rfile.read(int(length)))

    def _from_here(self) -> bool:
        """Whether the request is for the loopback interface, and from a page of ours or from no page."""
        host, origin = self.headers.get("Host", "").lower(), self.headers.get("Origin")
        if host not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"open {self.server.address} instead")
            return False
        site = self.headers.get("Sec-Fetch-Site", "none")
        if origin not in (None, f"http://{host}") or (self.command != "GET" and site not in ("none", "same-origin")):
            self._refuse(HTTPStatus.FORBIDDEN, "questions of other pages are not answered")
            return False
        return True

    def _answer(self, kind: str, body: bytes) -> None:
        place = self.server.places[kind]
        if not place.acquire(blocking=False):
            text = f"{_MOST[kind]} questions of this kind are being answered already; cancel one, or wait"
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, text)
            return
        try:
            self._head(HTTPStatus.OK, "application/x-ndjson", None)
            with self.server.process() as process:
                for line in _asked(process, kind, body):  # a client that has left raises here, which ends the process
                    self._chunk(line)
            self._chunk(b"")
        finally:
            place.release()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # the request's body has not been read
        body = json.dumps({"error": text}).encode()
        self._head(status, "application/json", len(body))
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        size = ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", str(length))
        for name, value in (
            size,
            ("Content-Security-Policy", PAGE_POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


def _asked(process: subprocess.Popen[bytes], kind: str, body: bytes) -> Iterator[bytes]:
    """Lines of the answer as they come, and an empty line now and then."""
    assert process.stdin is not None
    assert process.stdout is not None
    text = json.dumps(body.decode("utf-8", errors="replace"))  # one line, whatever the question is
    with contextlib.suppress(BrokenPipeError):  # it has failed already
        process.stdin.write(f"{kind}\n{text}\n".encode())
        process.stdin.flush()
    deadline, rest = time.monotonic() + _TIME[kind], b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            if time.monotonic() > deadline:
                yield _error(f"no answer within {_TIME[kind]:.0f} s; use fewer ranks, or constrain the search")
                return
            if not ready.select(_BEAT):
                yield b"\n"
                continue
            data = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]  # a pipe is buffered
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"
                if line.startswith(b'{"answer"'):
                    return
    yield _error("the planner failed on this question; its message is where the server was started")


def _error(text: str) -> bytes:
    return json.dumps({"answer": {"error": text}}).encode() + b"\n"


def serve(port: int = 0) -> int:
    """Serve until Ctrl-C."""
    if not 0 <= port <= 65535:
        raise PlanError(f"--port {port} must be from 0 to 65535; 0 takes one that is free")
    try:
        server = PlannerServer(port)
    except OSError as e:
        raise PlanError(f"--port {port} cannot be used ({e.strerror}); leave it out for one that is free") from None
    with server:
        print(f"the planner is at {server.address} on this machine; stop it with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
    return 0
