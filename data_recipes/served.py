"""Answers through servers: many conversations on their way at the same time, every finished turn kept at once."""

from __future__ import annotations

import asyncio
import collections
import functools
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import DraftsmithError
from ..files import atomic_path, explain_os_errors
from ..progress import Progress
from .budget import Budget
from .chat import Documents
from .chat_turns import CLOSED, OPENED
from .conversation import Conversation
from .layout import write_rows
from .server import Question, Refusal, Reply, Servers
from .turns import Asking, Dialogue, asked_rows, ended_early

if TYPE_CHECKING:
    from .regenerate import RegenerateSettings

LEFT_OUT_CAP = 0.01
"""Share of prompts that the servers may refuse before the stage stops; a few are always allowed."""
_ALLOWED = 3
_OPEN_CHUNKS = 64
_FINISH = {"stop": "eos", "length": "length"}

Entry = dict[str, Any]
"""A line of the journal: {"id", "turn", "tokens", "finish", "seconds": of work since the last chunk was written}."""


class AnswerJournal:
    """Turns that were answered in chunks that are not complete yet; each rank writes a file of its own.

    Attributes:
        found: entries of all ranks by id and turn; whoever uses one takes it out.
        seconds: that this rank's earlier calls spent on chunks that are not there yet.

    Args:
        folder: of the stage.
        rank: whose turns are written here; those of all ranks are read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"journal-{rank}.jsonl"
        entries = {path: _read(path) for path in journals(folder)}
        self.found = {(entry["id"], entry["turn"]): entry for found in entries.values() for entry in found}
        self.seconds = max((entry["seconds"] for entry in entries.get(self.path, [])), default=0.0)
        self._file: TextIO | None = None
        self.keep([], self.seconds)  # without a torn last line

    def add(self, entry: Entry) -> None:
        """Write an entry; it outlives this process when this returns."""
        with explain_os_errors(self.path):
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - it stays open between entries
            self._file.write(_line(entry))
            self._file.flush()

    def keep(self, entries: Iterable[Entry], seconds: float = 0.0) -> None:
        """Forget all entries but these and those that nobody has asked for yet; `seconds` are not in a chunk yet."""
        self.close()
        lines = (_line({**entry, "seconds": seconds}) for entry in [*entries, *self.found.values()])
        with atomic_path(self.path) as temporary, open(temporary, "w", encoding="utf-8") as f:
            f.writelines(lines)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def end(self) -> None:
        """Delete the file, unless it still holds what a chunk needs that is not there yet."""
        self.close()
        if not self.found:
            self.path.unlink(missing_ok=True)


def journals(folder: Path) -> list[Path]:
    """The journals of all ranks."""
    return sorted(folder.glob("journal-*.jsonl"))


def _line(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"


def _read(path: Path) -> list[Entry]:
    """Entries of a journal; the last one may be torn, where its process was killed, and is left out then."""
    lines = path.read_bytes().split(b"\n")
    try:
        return [json.loads(line) for line in lines[:-1]]
    except ValueError as error:
        raise DraftsmithError(
            f"{path} is damaged ({error}): delete it and run 'draftsmith regenerate' again"
        ) from error


@dataclass(eq=False)
class _Chunk:
    path: Path
    dialogues: list[Dialogue]
    skipped: int
    entries: list[Entry] = field(default_factory=list)
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def complete(self) -> bool:
        return all(dialogue.prompt is None for dialogue in self.dialogues)


class ServedAnswers:
    """Answers the prompts of some chunks through servers.

    Args:
        servers: who is asked.
        asking: how conversations are gone through.
        settings: temperatures and seed; with a conversation's id and turn it makes the seed that the server is given.
        folder: of the stage: where the journal and the chunks lie.
        paths: the prompts' chunks, in order.
        budget: notes what chunks took, and says whether the next one fits.
        bar: counts conversations.
        rank: see AnswerJournal.
    """

    def __init__(
        self, servers: Servers, asking: Asking, settings: RegenerateSettings, folder: Path, paths: Sequence[Path],
        budget: Budget, bar: Progress, rank: int,
    ) -> None:  # fmt: skip
        self.servers, self.asking, self.settings = servers, asking, settings
        self.folder, self.budget, self.bar = folder, budget, bar
        self.journal = AnswerJournal(folder, rank)
        self._waiting = collections.deque(paths)
        self._open: collections.deque[_Chunk] = collections.deque()
        self._asked: dict[tuple[str, int], tuple[_Chunk, Dialogue]] = {}
        self._begun = self._left_out = self._tokens = 0
        self._started = time.monotonic()
        self._written = self._started - self.journal.seconds
        self._retries, self._failures = 0, collections.Counter[str]()

    def run(self) -> None:
        """Answer until all chunks are there, or the budget has room for no more.

        Raises:
            DraftsmithError: see `Servers.run`; the servers refuse too many prompts. What was answered is kept.
        """
        try:
            asyncio.run(self.servers.run(self._more, self._done))
        finally:
            self.journal.close()
        self.journal.end()

    def _more(self) -> list[Question]:
        """Open the next chunk that has something to ask."""
        while self._waiting and len(self._open) < _OPEN_CHUNKS:
            rows, skipped = asked_rows(self._waiting[0])
            under_way = sum(d.prompt is not None for chunk in self._open for d in chunk.dialogues)
            if (self._begun and self.budget.is_spent) or not self.budget.room_for(under_way + len(rows)):
                self._waiting.clear()
                break
            chunk = _Chunk(self._waiting.popleft(), [self.asking.begin(row) for row in rows], skipped)
            left = len(rows) * len(self._waiting)
            self._begun += len(rows)
            if (more := self.budget.expected(len(rows), left)) is not None:
                self.bar.expect(self._begun + more)
            self._open.append(chunk)
            questions = [q for dialogue in chunk.dialogues for q in self._go_on(chunk, dialogue)]
            self._write()
            if questions:
                return questions
        return []

    def _go_on(self, chunk: _Chunk, dialogue: Dialogue) -> list[Question]:
        """Take what the journal knows of a conversation; returns the next question, if there is one."""
        while dialogue.prompt is not None:
            key = (dialogue.row.id, dialogue.turn)
            entry = self.journal.found.pop(key, None)
            if entry is None:
                self._asked[key] = chunk, dialogue
                temperature, seed = self.settings.temperature(dialogue.row.id), _seed(self.settings.seed, *key)
                return [Question(key, dialogue.prompt, self.asking.max_new_tokens, temperature, seed)]
            self._take(chunk, dialogue, entry)
        self.bar.advance()
        return []

    def _take(self, chunk: _Chunk, dialogue: Dialogue, entry: Entry) -> None:
        chunk.entries.append(entry)
        dialogue.take(entry["tokens"], entry["finish"])

    def _done(self, question: Question, outcome: Reply | Refusal) -> list[Question]:
        key: Any = question.key
        chunk, dialogue = self._asked.pop(key)
        if isinstance(outcome, Refusal):
            self._leave_out(chunk, dialogue, outcome.reason)
        else:
            tokens = self._tokens_of(outcome)
            seconds = round(time.monotonic() - self._written, 3)
            entry = {"id": key[0], "turn": key[1], "tokens": tokens, "finish": _FINISH[outcome.finish],
                     "seconds": seconds}  # fmt: skip
            self.journal.add(entry)
            self._take(chunk, dialogue, entry)
            self._tokens += len(tokens)
        following = self._go_on(chunk, dialogue)
        self._write()
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        self.bar.note(f"{rate:,.0f} tokens/s, {self.servers.failures.total():,} failures")
        return following

    def _leave_out(self, chunk: _Chunk, dialogue: Dialogue, reason: str) -> None:
        """End a conversation; not in the journal, so that another run asks again while the chunk is open."""
        dialogue.end(reason)
        chunk.left_out[reason] += not dialogue.documents
        self._left_out += 1
        if self._left_out > max(_ALLOWED, LEFT_OUT_CAP * self._begun):
            raise DraftsmithError(
                f"the servers refused {self._left_out} of {self._begun} conversations ({reason}), more than "
                f"{LEFT_OUT_CAP:.0%}: mend what they say above (is their context long enough?) and run again"
            )

    def _tokens_of(self, reply: Reply) -> list[int]:
        """Tokens of an answer as the target's own decoding would give them."""
        if reply.tokens is not None:
            tokens = list(reply.tokens)
        else:
            tokens = self.asking.tokenizer.encode(reply.text, add_special_tokens=False)
        if reply.finish == "stop" and not (tokens and tokens[-1] in self.asking.stop_ids):
            tokens.append(self._end_of_turn)
        return tokens

    @functools.cached_property
    def _end_of_turn(self) -> int:
        return _end_of_turn(self.asking)

    def _write(self) -> None:
        """Write the chunks that are complete, in their order."""
        wrote = False
        while self._open and self._open[0].complete:
            chunk = self._open.popleft()
            rows, now = [row for dialogue in chunk.dialogues for row in dialogue.rows()], time.monotonic()
            self.budget.add(
                chunk.path.stem,
                len(chunk.dialogues),
                now - self._written,
                skipped=chunk.skipped,
                ended_early=ended_early(chunk.dialogues),
                left_out=chunk.left_out,
                failures=self.servers.failures - self._failures,
                retries=self.servers.retries - self._retries,
            )
            self._written, self._failures, self._retries = now, self.servers.failures.copy(), self.servers.retries
            write_rows(self.folder / chunk.path.name, rows)
            wrote = True
        if wrote:
            self.journal.keep(entry for chunk in self._open for entry in chunk.entries)


def _end_of_turn(asking: Asking) -> int:
    """The token that ends an answer, as the chat template writes it: servers leave it out of an answer's text.

    Raises:
        DraftsmithError: the template doesn't show it.
    """
    if asking.format is None:
        return int(asking.tokenizer.eos_token_id)
    for answer in ("b", f"{OPENED}\nb\n{CLOSED}\n\nc"):  # some templates want a thought
        probe = Conversation(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
        found = asking.format.documents([probe])[0]
        if isinstance(found, Documents):
            document = found.rows[0]
            return document.tokens[document.spans[-1][1] - 1]
    raise DraftsmithError(
        "the servers tell no token ids, and the chat template does not show which token ends an answer: use servers "
        "that take return_token_ids (vLLM 0.10.2 or newer)"
    )


def _seed(seed: int, name: str, turn: int) -> int:
    """31 bits, which every server takes as a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{turn}".encode()).digest()[:4], "big") >> 1
