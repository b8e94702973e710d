"""Recorded requests, decoded by a closed loop of so many clients: each sends its next one when the last is answered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..data_recipes.census import Census
from ..data_recipes.chat import ChatFormat
from ..data_recipes.conversation import Malformed
from ..data_recipes.messages import read_messages, read_tools
from ..data_recipes.records import read_records
from ..errors import DraftsmithError
from ..progress import Progress
from .closed_loop import ROUNDS, WAYS, Matched, Ways, check_greedy, round_key
from .decoder.loop import Request
from .decoder.sampling import Sampling
from .journal import Journal
from .metrics import percentiles

KEY = "replay"
"""Of the journal: the finished result."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
_SAMPLING = tuple(field.name for field in fields(Sampling))
_WHOLE = {"top_k", "seed"}
_NAMES = {"id", "custom_id", "request_id"}
_ENVELOPE = {"method", "url", "body"}
"""Of a batch file's records: the request itself is under "body"."""
_TEMPLATE = "chat_template_kwargs"
_RENDERED = {"tools", _TEMPLATE}
"""What only a chat template reads: it changes nothing beside a prompt."""
_KNOWN = {"messages", "prompt", "tools", _TEMPLATE, *_LIMITS, *_SAMPLING, *_NAMES}


@dataclass(frozen=True)
class Recorded:
    """The requests of a file, ready to decode.

    Attributes:
        requests: in the file's order, each called by its place, "file:line".
        problems: what was left out, by reason, with the first places.
        unused: keys that change nothing here, and how many records have them.
    """

    requests: list[Request]
    problems: list[str]
    unused: dict[str, int]


class RequestReader:
    """Reads records as OpenAI's chat and text completions take them: `messages`, or `prompt` as it is.

    Args:
        ways: whose target and context.
        max_new_tokens: of records that don't say any.
        template_kwargs: what the chat template is given; those of a record (`chat_template_kwargs`, as vLLM and SGLang
            take them) come on top.
    """

    def __init__(self, ways: Ways, max_new_tokens: int, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.target, self.context, self.max_new_tokens = ways.target, ways.context, max_new_tokens
        self.template_kwargs, self.formats = template_kwargs or {}, dict[str, ChatFormat]()
        self.census, self.unused, self.seen = Census(), Counter[str](), Counter[str]()

    def read(self, path: Path) -> Recorded:
        """Read all requests of a file.

        Raises:
            DraftsmithError: the file as a whole can't be read, or holds no request that can be replayed.
        """
        requests = list(self._requests(path))
        problems = self.census.lines()
        if not requests:
            raise DraftsmithError(
                f"{path} holds no request that can be replayed: {'; '.join(problems) or 'it is empty'}; a line is e.g. "
                '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
            )
        return Recorded(requests, problems, dict(self.unused.most_common()))

    def _requests(self, path: Path) -> Iterator[Request]:
        for where, value in read_records(path, path.name):
            self.census.read += 1
            try:
                request = self._request(where, value)
                self._check(request)
            except (Malformed, DraftsmithError) as reason:
                self.census.refuse(where, str(reason))
            else:
                self.census.keep()
                yield request

    def _request(self, where: str, value: Any) -> Request:
        if isinstance(value, Malformed):
            raise value
        if not isinstance(value, dict):
            raise Malformed(f"a {type(value).__name__} instead of a request")
        body = value.get("body")
        record = body if isinstance(body, dict) else value
        given = {key: item for key, item in record.items() if item is not None}
        request = Request(self._name(where), self._tokens(given), self._limit(given), self._sampling(given))
        self.unused.update(given.keys() - (_KNOWN if "messages" in given else _KNOWN - _RENDERED))
        if body is record:
            self.unused.update(value.keys() - _ENVELOPE - _NAMES)
        return request

    def _name(self, where: str) -> str:
        """The place; of several records in one line the later ones are numbered."""
        self.seen[where] += 1
        return where if self.seen[where] == 1 else f"{where}#{self.seen[where]}"

    def _tokens(self, record: Mapping[str, Any]) -> list[int]:
        asked = [key for key in ("messages", "prompt") if key in record]
        if len(asked) != 1:
            raise Malformed("both messages and a prompt" if asked else "neither messages nor a prompt")
        return self._said(record) if asked == ["messages"] else self._prompt(record["prompt"])

    def _said(self, record: Mapping[str, Any]) -> list[int]:
        if not isinstance(record["messages"], list):
            raise Malformed(f"'messages' is a {type(record['messages']).__name__}, not a list")
        messages = read_messages(record["messages"])
        if any("media" in message for message in messages):
            raise Malformed("images, audio, video or files")
        if messages[-1]["role"] not in ("user", "tool"):
            raise Malformed(f"the last message is the {messages[-1]['role']}'s: there is nothing to answer")
        return self._format(record.get(_TEMPLATE, {})).prompt(messages, read_tools(dict(record)))

    def _format(self, own: Any) -> ChatFormat:
        """The chat template with a record's own arguments."""
        if not isinstance(own, dict):
            raise Malformed(f"'{_TEMPLATE}' is a {type(own).__name__}, not an object")
        given = {**self.template_kwargs, **own}
        key = json.dumps(given, sort_keys=True, default=str)
        if key not in self.formats:
            self.formats[key] = ChatFormat(self.target.tokenizer, template_kwargs=given, stop_ids=self.target.eos_ids)
        return self.formats[key]

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.target.tokenizer(prompt, verbose=False).input_ids)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return prompt
        raise Malformed("a prompt that is neither a text nor token ids")

    def _limit(self, record: Mapping[str, Any]) -> int:
        key = next((key for key in _LIMITS if key in record), None)
        if key is None:
            return self.max_new_tokens
        if type(record[key]) is not int or record[key] < 1:
            raise Malformed(f"'{key}' must be a whole number, at least 1")
        return int(record[key])

    @staticmethod
    def _sampling(record: Mapping[str, Any]) -> Sampling:
        values = {name: record[name] for name in _SAMPLING if name in record}
        for name, value in values.items():
            is_whole = type(value) is int
            if not is_whole and (name in _WHOLE or not isinstance(value, float)):
                raise Malformed(f"'{name}' must be a {'whole ' if name in _WHOLE else ''}number")
        return Sampling(**values)

    def _check(self, request: Request) -> None:
        if not request.tokens:
            raise Malformed("an empty prompt")
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.target.vocab_size:
            raise Malformed(f"token ids outside the vocabulary of {self.target.vocab_size}")
        request.sampling.check(self.target.vocab_size)
        if len(request.tokens) + request.max_new_tokens > self.context:
            raise Malformed(f"prompt and answer need more than the context of {self.context} tokens")


def answers_of(requests: Sequence[Request]) -> int:
    """Answers that are decoded, warm-ups left out."""
    return len(requests) * len(WAYS) * ROUNDS


def finished_answers(journal: Journal, requests: Sequence[Request]) -> int:
    """How many of them the journal holds."""
    return len(requests) * len(WAYS) * sum(journal.get(round_key(KEY, i)) is not None for i in range(ROUNDS))


def measure_replay(ways: Ways, recorded: Recorded, concurrency: int, journal: Journal, bar: Progress) -> dict[str, Any]:
    """Replay the requests in each way, or go on with it; the finished result is in the journal then.

    Returns:
        concurrency, requests, greedy (how many of them), problems, unused_keys, `closed_loop.Matched.figures`, {PLAIN,
        SPECULATIVE}: {served_tokens_per_s (all answer tokens over the wall time, prefill included), ttft and latency
        {p50, p95} in seconds}, throughput_ratio (of served_tokens_per_s; None unless the outputs are right), answers.
    """
    requests = recorded.requests
    passes = ways.passes(requests, concurrency)
    rounds = ways.rounds(KEY, requests, concurrency, journal, bar.advance)
    matched = Matched(rounds, range(len(requests)), passes, check_greedy(ways, requests, rounds))
    figures = matched.figures()
    served = {way: _served(matched, way) for way in WAYS}
    plain, fast = (served[way]["served_tokens_per_s"] for way in WAYS)
    result = {
        "concurrency": concurrency,
        "requests": len(requests),
        "greedy": sum(request.sampling.temperature == 0 for request in requests),
        "problems": recorded.problems,
        "unused_keys": recorded.unused,
        **figures,
        **served,
        "throughput_ratio": fast / plain if matched.check.passed else None,
        "answers": matched.answers(),
    }
    journal.put(KEY, result)
    return result


def _served(matched: Matched, way: str) -> dict[str, Any]:
    """What clients see of one way, over all rounds."""
    rounds = [served[way] for served in matched.rounds]
    tokens = sum(len(result.tokens) for served in rounds for result in served.results)
    return {
        "served_tokens_per_s": tokens / sum(served.seconds for served in rounds),
        "ttft": percentiles([s for served in rounds for s in served.first_token]),
        "latency": percentiles([s for served in rounds for s in served.latency]),
    }
