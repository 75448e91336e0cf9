"""A judge over HTTP that does what the first answer of a group says, in threads of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class Judge(ThreadingHTTPServer):
    """requests: what came, in order. most: calls that were under way at the same time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Quiet: a caller that does not wait any longer is what is tested."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    def tried(self, first: str) -> int:
        """How often a group with this first answer came."""
        return sum(bool(body["episodes"]) and body["episodes"][0]["completion"] == first for body in self.requests)


class _Handler(BaseHTTPRequestHandler):
    server: Judge
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/chat/completions"):
            return self._grade(body["messages"][0]["content"])
        with self.server.lock:
            self.server.requests.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        first = body["episodes"][0]["completion"] if body["episodes"] else unquote(self.path.partition("?")[2])
        try:
            self._answer(first, body)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def _grade(self, asked: str) -> None:
        """Full marks where "Is A the same as B?" is true; nothing where something else is asked."""
        match asked.removesuffix("?").split(" "):
            case ["Is", reference, "the", "same", "as", answer]:
                said = f"Score: {10 * (reference == answer)}"
            case _:
                said = "no idea"
        self._send(json.dumps({"choices": [{"message": {"content": said}}]}))

    def _answer(self, first: str, body: dict[str, Any]) -> None:
        episodes, times = body["episodes"], self.server.tried(first)
        match first.split(":", 1):
            case ["raw", text]:
                self._send(text)
            case ["one", text]:
                self._send(f"[{text}{', 1' * (len(episodes) - 1)}]")
            case ["status", code]:
                self._send("out\nof order", int(code))
            case ["busy", after] if times == 1:
                self._send("busy", 503, after)
            case ["date", _] if times == 1:
                self._send("busy", 429, formatdate(time.time() + 3600, usegmt=True))
            case ["hang", _] if times == 1:
                time.sleep(1.5)
            case ["slow", seconds]:
                time.sleep(float(seconds))
                self._send(json.dumps([time.time() for _ in episodes]))
            case ["raise"]:
                self._send("a traceback", 500)
            case ["cut", _] if times == 1:
                self.close_connection = True
            case ["cut" | "busy" | "date" | "hang", _]:
                self._send(json.dumps([times for _ in episodes]))
            case _:
                self._send(json.dumps([float(e["completion"] == body["task"]["answer"]) for e in episodes]))

    def _send(self, text: str, code: int = 200, retry_after: str = "") -> None:
        content = text.encode()
        self.send_response(code)
        if retry_after:
            self.send_header("retry-after", retry_after)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Quiet."""


@contextmanager
def judging() -> Generator[Judge]:
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
