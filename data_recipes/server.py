"""Completions of token ids from OpenAI-compatible servers (vLLM, SGLang, …), whatever fails on the way."""

from __future__ import annotations

import asyncio
import collections
import os
import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..errors import DraftsmithError
from ..progress import say

KEY_VARIABLES = ("DRAFTSMITH_API_KEY", "OPENAI_API_KEY")
_BUSY = "HTTP 429"
_WRONG = {
    401: f"the key in {' or '.join(KEY_VARIABLES)} is missing or not accepted",
    403: f"the key in {' or '.join(KEY_VARIABLES)} is not allowed to",
    404: "is it the base URL of an OpenAI-compatible server?",
    405: "is it the base URL of an OpenAI-compatible server?",
}
_AGAIN = (408, 425, 429)
_EXCERPT = 200
_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
          "frequency_penalty": 0.0}  # fmt: skip
"""The target's own law: servers fill what is missing from the model's generation_config.json."""


@dataclass(frozen=True)
class Patience:
    """How failures are met; times in seconds.

    Attributes:
        first: longest pause after a first failure; it doubles with each further one, up to `longest`. Half of each
            pause is left to chance, so that questions don't come back all at once.
        attempts: a question that failed so often, while others were answered, is left out.
        aside_after: a server that failed so often in a row is set aside for `aside`, then asked whether it is there.
        give_up: the call ends when all servers have failed for so long.
        connect: time that a connection may take.
    """

    first: float = 1.0
    longest: float = 60.0
    attempts: int = 10
    aside_after: int = 5
    aside: float = 30.0
    give_up: float = 300.0
    connect: float = 10.0

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, at least one."""
        most: float = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        return most * random.uniform(0.5, 1.0)


PATIENCE = Patience()


@dataclass(eq=False)
class Question:
    """A prompt to complete.

    Attributes:
        key: what the caller knows it by.
        prompt: token ids.
        max_tokens, temperature, seed: see the OpenAI API.
        tries, failures: what went wrong so far; being told to come later is no failure.
        failing_since: time of the first failure.
    """

    key: Hashable
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    tries: int = 0
    failures: int = 0
    failing_since: float = 0.0


@dataclass(frozen=True)
class Reply:
    """A completion: its finish ("stop" or "length"), its token ids where the server told them, and its text."""

    finish: str
    tokens: list[int] | None
    text: str


@dataclass(frozen=True)
class Refusal:
    """Why a question gets no answer; the reason is short and is counted."""

    reason: str


@dataclass(eq=False)
class _Endpoint:
    url: str
    model: str = ""
    ready: bool = False  # whether it told its model since it was last set aside
    aside_until: float = 0.0
    failures: int = 0  # in a row
    failing_since: float | None = None  # time of the first of them
    last: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Failure(Exception):
    """Something that may go well at the next try; `after` is how long the server asks to be left alone."""

    def __init__(self, kind: str, after: float = 0.0) -> None:
        super().__init__(kind)
        self.kind, self.after = kind, after


class _Refused(Exception):
    """The server will never take this question."""


class Servers:
    """Several servers of one model, asked at the same time.

    Attributes:
        failures: what went wrong so far, by kind ("HTTP 500", "timeout", …).
        retries: questions that were put back for another try.

    Args:
        urls: base URLs, with or without /v1.
        model: what they should serve; they are asked, and a difference is said.
        concurrency: requests to each server at the same time.
        timeout: seconds an answer may take.
    """

    def __init__(
        self, urls: Sequence[str], model: str, concurrency: int, timeout: float, patience: Patience | None = None
    ) -> None:
        self.endpoints = [_Endpoint(base_url(url)) for url in urls]
        self.model, self.concurrency, self.timeout = model, concurrency, timeout
        self.patience = patience or PATIENCE
        self.failures: collections.Counter[str] = collections.Counter()
        self.retries = self._in_flight = self._pending = 0
        self._last_success = float("-inf")

    async def run(
        self, more: Callable[[], list[Question]], done: Callable[[Question, Reply | Refusal], list[Question]]
    ) -> None:
        """Ask until there is nothing left to ask.

        Args:
            more: called whenever questions run short; returns new ones, or none.
            done: called once for each question with what came of it; returns questions that follow from it.

        Raises:
            DraftsmithError: every server failed for too long, or one says that the request itself is wrong.
        """
        self._queue: asyncio.Queue[Question] = asyncio.Queue()
        self._finished = asyncio.Event()
        self._more, self._done = more, done
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        times = httpx.Timeout(self.timeout, connect=self.patience.connect, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=times, limits=limits, headers=headers) as client:
            self._fill()
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._finished.wait())]
            for endpoint in self.endpoints:
                tasks += [asyncio.create_task(self._work(client, endpoint)) for _ in range(self.concurrency)]
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in ended:
                task.result()  # raises what ended a worker

    async def _work(self, client: httpx.AsyncClient, endpoint: _Endpoint) -> None:
        while True:
            await self._make_ready(client, endpoint)
            question = await self._queue.get()
            if not endpoint.ready:  # set aside meanwhile
                self._queue.put_nowait(question)
                continue
            self._in_flight += 1
            try:
                outcome: Reply | Refusal = await self._ask(client, endpoint, question)
            except _Failure as failure:
                self._in_flight -= 1
                await asyncio.sleep(self._note(endpoint, question, failure))
                continue
            except _Refused as refused:
                outcome = Refusal(str(refused))
            self._in_flight -= 1
            endpoint.failures, endpoint.failing_since = 0, None
            self._last_success = time.monotonic()
            self._settle(question, outcome)

    def _settle(self, question: Question, outcome: Reply | Refusal) -> None:
        following = self._done(question, outcome)
        self._pending += len(following) - 1
        for other in following:
            self._queue.put_nowait(other)
        self._fill()

    def _fill(self) -> None:
        while self._queue.qsize() < self.concurrency * len(self.endpoints):
            new = self._more()
            if not new:
                break
            self._pending += len(new)
            for question in new:
                self._queue.put_nowait(question)
        if not self._pending:
            self._finished.set()

    def _note(self, endpoint: _Endpoint, question: Question, failure: _Failure) -> float:
        """Count a failure and put the question back for later; returns how long the worker pauses."""
        now = time.monotonic()
        self.failures[failure.kind] += 1
        question.tries += 1
        self._fail(endpoint, failure.kind, now)
        if failure.kind != _BUSY:
            question.failing_since = question.failing_since if question.failures else now
            question.failures += 1
        if question.failures >= self.patience.attempts and self._last_success > question.failing_since:
            self._settle(question, Refusal(f"{failure.kind}, {question.failures} times"))
        else:
            self.retries += 1
            pause = max(failure.after, self.patience.pause(question.tries))
            asyncio.get_running_loop().call_later(pause, self._queue.put_nowait, question)
        self._check_alive(now)
        return max(failure.after, self.patience.pause(max(1, endpoint.failures)))

    def _fail(self, endpoint: _Endpoint, kind: str, now: float) -> None:
        endpoint.last = kind
        endpoint.failing_since = now if endpoint.failing_since is None else endpoint.failing_since
        endpoint.failures += kind != _BUSY
        if endpoint.failures >= self.patience.aside_after:
            endpoint.ready, endpoint.aside_until = False, now + self.patience.aside

    def _check_alive(self, now: float) -> None:
        """Raise where every server has failed for too long and no answer is on its way."""
        since = [now if e.failing_since is None else e.failing_since for e in self.endpoints]
        if not self._in_flight and now - max(since) >= self.patience.give_up:
            states = "; ".join(f"{e.url}: {e.last}" for e in self.endpoints)
            raise DraftsmithError(
                f"no server has answered for {now - max(since):.0f} s ({states}); {self._pending} questions are open. "
                f"What was answered is kept: start the servers and run again"
            )

    async def _make_ready(self, client: httpx.AsyncClient, endpoint: _Endpoint) -> None:
        """Wait until a server is there; one of its workers asks, the others wait for it."""
        async with endpoint.lock:
            while not endpoint.ready:
                await asyncio.sleep(max(0.0, endpoint.aside_until - time.monotonic()))
                try:
                    await self._ask_model(client, endpoint)
                except _Failure as failure:
                    now = time.monotonic()
                    self.failures[failure.kind] += 1
                    self._fail(endpoint, failure.kind, now)
                    endpoint.aside_until = now + max(failure.after, self.patience.pause(endpoint.failures or 1))
                    self._check_alive(now)
                else:
                    endpoint.ready = True
                    endpoint.failures = min(endpoint.failures, self.patience.aside_after - 1)

    async def _ask_model(self, client: httpx.AsyncClient, endpoint: _Endpoint) -> None:
        found = await self._request(client, "GET", f"{endpoint.url}/models", None)
        try:
            names = [str(entry["id"]) for entry in found["data"]]
        except (KeyError, TypeError) as error:
            raise _Failure("no list of models") from error
        if not names:
            raise _Failure("no model is served")
        fitting = [name for name in names if _short(name) == _short(self.model)]
        if not fitting and not endpoint.model:
            say(f"warning: {endpoint.url} serves {', '.join(names[:3])}, not {self.model}: is it the same model?")
        endpoint.model = (fitting or names)[0]

    async def _ask(self, client: httpx.AsyncClient, endpoint: _Endpoint, question: Question) -> Reply:
        body = {
            "model": endpoint.model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            **_PLAIN,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
        }
        return _reply(await self._request(client, "POST", f"{endpoint.url}/completions", body), endpoint, question)

    async def _request(self, client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None) -> Any:
        try:
            async with asyncio.timeout(self.timeout):  # httpx's own starts anew with every byte
                response = await client.request(method, url, json=body)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _Failure("timeout") from error
        except httpx.RequestError as error:
            raise _Failure("connection") from error
        status = response.status_code
        if status in _AGAIN or status >= 500:
            raise _Failure(f"HTTP {status}", _retry_after(response))
        said = f"HTTP {status} {response.text[:_EXCERPT]!r}"
        if status in _WRONG:
            raise DraftsmithError(f"{url} says {said}: {_WRONG[status]}")
        if status >= 400 and method == "POST":
            say(f"regenerate: {url} refuses a prompt: {said}")
            raise _Refused(f"HTTP {status}")
        if status != 200:
            raise DraftsmithError(f"{url} says {said}: give the base URL of an OpenAI-compatible server")
        try:
            return response.json()
        except ValueError as error:
            raise _Failure("damaged JSON") from error


def base_url(url: str) -> str:
    """Return a server's URL up to /v1.

    Raises:
        DraftsmithError: no http URL, or one with a password, which would end up in logs.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DraftsmithError(f"server {url!r} is no URL ({error}): write it like http://host:8000") from error
    if parsed.userinfo:
        raise DraftsmithError(
            f"the URL of server {parsed.host} holds a password: put it into {KEY_VARIABLES[0]} instead"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise DraftsmithError(f"server {url!r} is no http URL: write it like http://host:8000")
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") else f"{bare}/v1"


def _reply(found: Any, endpoint: _Endpoint, question: Question) -> Reply:
    """Read a completion.

    Raises:
        _Failure: it is none, or an empty one.
        DraftsmithError: the server read another prompt than it was sent.
    """
    try:
        choice = found["choices"][0]
        finish, text = choice["finish_reason"], choice["text"]
        tokens = choice.get("token_ids")
        read = (found.get("usage") or {}).get("prompt_tokens")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Failure("no completion") from error
    if finish not in ("stop", "length"):
        raise _Failure(f"finish {str(finish)[:20]}")
    whole = tokens is None or (isinstance(tokens, list) and all(type(t) is int and t >= 0 for t in tokens))
    if not isinstance(text, str) or not whole:
        raise _Failure("no completion")
    if read is not None and read != len(question.prompt):
        raise DraftsmithError(
            f"{endpoint.url} read {read} prompt tokens where {len(question.prompt)} were sent: it does not take token "
            f"ids as they are, so its answers would not be the target's own"
        )
    if finish == "length":
        text = text.rstrip("\ufffd")  # cut within a character
        if not (text if tokens is None else tokens):
            raise _Failure("empty answer")
    return Reply(finish, tokens, text)


def _retry_after(response: httpx.Response) -> float:
    """Seconds of the Retry-After header, at most five minutes; 0 where there is none, or a date."""
    try:
        return min(300.0, max(0.0, float(response.headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
