"""An OpenAI-compatible server whose answers are a function of the request, and which fails as it is told to."""

from __future__ import annotations

import collections
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [
    "the",
    "fox",
    "runs",
    "home",
    "and",
    "asks",
    "what",
    "a",
    "ship",
    "is",
    "in",
    "winter",
    "dog",
    "story",
    "north",
]
MODEL = "someone/Tiny-Chat"
STALL = 0.6
"""Seconds that a stalled request is kept waiting: longer than the client's time-out in these tests."""


def answer_text(prompt: list[int], temperature: float, seed: int) -> tuple[str, bool]:
    """The text of the answer to a prompt, and whether it is cut by length."""
    said = json.dumps([prompt, temperature, seed if temperature else 0])
    digest = hashlib.sha256(said.encode()).digest()
    return " ".join(WORDS[b % len(WORDS)] for b in digest[: 2 + digest[30] % 6]), digest[31] % 4 == 0


class FakeServer:
    """Runs in threads of this process.

    Args:
        tokenizer: of the "model".
        token_ids: tell the answers' token ids, not only their text.
        faults: what the first tries of a prompt meet, e.g. ("500", "stall"); each prompt meets some of them.
        always: a fault that every completion meets; "dead" cuts every connection, that for the models, too.
        delay: longest time that an answer takes, drawn by its prompt, so that answers come in another order.
        name: the model that it says it serves.
    """

    def __init__(
        self, tokenizer: Any, token_ids: bool = True, faults: tuple[str, ...] = (), always: str | None = None,
        delay: float = 0.0, name: str = MODEL, port: int = 0,
    ) -> None:  # fmt: skip
        self.tokenizer, self.token_ids, self.delay, self.name = tokenizer, token_ids, delay, name
        self.faults, self.always = faults, always
        self.tries: collections.Counter[str] = collections.Counter()
        self.met: collections.Counter[str] = collections.Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.answered = self.running = self.most_running = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.models(self)

            def do_POST(self) -> None:
                fake.completions(self)

            def log_message(self, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *args: object) -> None:
                """A client that was killed."""

        self.http = Quiet(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def models(self, handler: BaseHTTPRequestHandler) -> None:
        if self.always == "dead":
            handler.close_connection = True
            return
        _send(handler, 200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def completions(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.keys.add(handler.headers.get("Authorization"))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            fault = self._fault(json.dumps(body["prompt"]))
            self.met[fault or "none"] += 1
        try:
            self._fail(handler, fault, body) if fault else self._answer(handler, body)
        finally:
            with self.lock:
                self.running -= 1

    def _fault(self, prompt: str) -> str | None:
        if self.always:
            return self.always
        number = hashlib.sha256(prompt.encode()).digest()[0]
        self.tries[prompt] += 1
        # a third of the prompts meets nothing, a third one fault, a third two
        if not self.faults or self.tries[prompt] > number % 3:
            return None
        return self.faults[(number // 3 + self.tries[prompt]) % len(self.faults)]

    def _fail(self, handler: BaseHTTPRequestHandler, fault: str, body: dict[str, Any]) -> None:
        if fault.isdigit():
            headers = {"Retry-After": "0.01"} if fault == "429" else {}
            _send(handler, int(fault), {"error": {"message": "not now"}}, headers)
        elif fault == "stall":
            time.sleep(STALL)
            handler.close_connection = True
        elif fault == "close":
            handler.close_connection = True
        elif fault == "truncate":  # the JSON ends early, the response is whole
            _send_bytes(handler, 200, json.dumps(self._completion(body)).encode()[:-7])
        elif fault == "cut":  # the connection ends within the response
            data = json.dumps(self._completion(body)).encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[:-20])
            handler.close_connection = True
        elif fault == "abort":
            completion = self._completion(body)
            completion["choices"][0]["finish_reason"] = "abort"
            _send(handler, 200, completion)
        elif fault == "other":
            _send(handler, 200, {"object": "error"})
        else:
            handler.close_connection = True

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if self.delay:
            time.sleep(self.delay * hashlib.sha256(json.dumps(body["prompt"]).encode()).digest()[1] / 255)
        completion = self._completion(body)
        with self.lock:
            self.answered += 1
        _send(handler, 200, completion)

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        text, cut = answer_text(body["prompt"], body["temperature"], body["seed"])
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length" if cut else "stop"}
        if self.token_ids and body.get("return_token_ids"):
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            choice["token_ids"] = tokens if cut else [*tokens, self.tokenizer.eos_token_id]
        usage = {"prompt_tokens": len(body["prompt"])}
        return {"object": "text_completion", "model": self.name, "choices": [choice], "usage": usage}


def _send(handler: BaseHTTPRequestHandler, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    _send_bytes(handler, status, json.dumps(value).encode(), headers)


def _send_bytes(
    handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str] | None = None
) -> None:
    try:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
    except OSError:  # the client has gone
        handler.close_connection = True
