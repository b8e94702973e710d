"""Stage `regenerate`: the target answers the prompts itself, chunk by planned chunk, within a time budget.

Decoding computes the states of every row anyway, so a chunk's features are written in the same go when layers are
named: that saves `collect` a second pass over the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..eval.decoder.drafters.plain import PlainDrafter
from ..eval.decoder.loop import Request, Result, decode, rows_needed
from ..files import read_json, write_json
from ..heads.base import Needs
from ..heads.target import Target
from ..manifest import Stage
from ..progress import Progress, progress_bar, say
from .chat import document
from .collect import chunk_meta, features_stage
from .layout import (
    ANSWERS,
    PROMPTS,
    AnswerRow,
    PromptRow,
    TargetInfo,
    answer_chunks,
    read_answers,
    read_prompts,
    stage_digest,
    write_rows,
)
from .store import Document, chunk_name, split_states, write_chunk

VERSION = 1
_TIMES = "times.json"


@dataclass(frozen=True)
class RegenerateSettings:
    """Settings of the stage.

    Attributes:
        max_new_tokens: most tokens of an answer; longer ones are cut, kept and marked "length".
        chunk: prompts a chunk, the unit that is finished or not.
        slots: sequences decoded at the same time.
    """

    max_new_tokens: int = 256
    chunk: int = 128
    slots: int = 64


def regenerate(
    settings: RegenerateSettings,
    data: Path,
    info: TargetInfo,
    load_target: Callable[[], Target],
    minutes: float | None = None,
    layer_ids: Sequence[int] | None = None,
) -> Stage:
    """Answer the prompts of `data/prompts` into `data/answers`, greedily.

    A later call with a larger budget, or none, goes on with the next chunks; with the same or a smaller one it returns
    at once. The budget counts the seconds of earlier calls, too. At least one chunk is always made.

    Args:
        settings: see RegenerateSettings.
        data: the data folder, with finished prompts.
        info: the target, as `load_target` will load it.
        load_target: called only when there is work.
        minutes: time budget of the stage; None answers everything.
        layer_ids: also record the features of these layers; None records nothing.

    Returns:
        The finished stage. Its record says how many of the planned chunks exist, and the budget.
    """
    stage = Stage.open(data / ANSWERS, "regenerate", VERSION, {
        "prompts": stage_digest(data / PROMPTS, "prepare"),
        "fingerprint": info.fingerprint,
        "max_new_tokens": settings.max_new_tokens,
        "chunk": settings.chunk,
        "slots": settings.slots,
    })  # fmt: skip
    prompts = read_prompts(data)
    chunks = [prompts[at : at + settings.chunk] for at in range(0, len(prompts), settings.chunk)]
    missing = [i for i in range(len(chunks)) if not _path(stage, i).exists()]
    times = _Times(stage.folder / _TIMES, minutes, {chunk_name(i) for i in missing})
    if _is_done(stage.manifest, len(chunks) - len(missing), missing, minutes):
        return stage
    features = features_stage(data, stage.digest, info, layer_ids) if layer_ids is not None else None
    if missing and times.room_for(len(chunks[missing[0]])):
        target = load_target()
        if target.fingerprint != info.fingerprint:
            raise DraftsmithError(f"the target {target.id} changed since its prompts were made: run again")
        planned = sum(len(chunks[i]) for i in missing)
        with progress_bar("regenerate", planned if minutes is None else None, "answers") as bar:
            for i in missing:
                if not times.room_for(len(chunks[i])):
                    break
                started = time.monotonic()
                rows = _answer(chunks[i], settings, target, layer_ids, features, i, bar)
                write_rows(_path(stage, i), rows)  # last: the chunk is done when its answers are there
                times.add(i, len(rows), time.monotonic() - started)
                if minutes is not None:
                    bar.expect(bar.done + min(planned - bar.done, times.fitting(settings.chunk)))
    _finish(stage, chunks, minutes, times)
    return stage


def _answer(
    prompts: list[PromptRow],
    settings: RegenerateSettings,
    target: Target,
    layer_ids: Sequence[int] | None,
    features: Stage | None,
    number: int,
    bar: Progress,
) -> list[AnswerRow]:
    """Decode one chunk and write its features; returns its answers in the prompts' order."""
    drafter = PlainDrafter(None if features is None else Needs(tuple(layer_ids or ()), last=True))
    requests = [Request(p.id, p.tokens, settings.max_new_tokens) for p in prompts]
    capacity = rows_needed(requests, drafter)
    results: dict[str, Result] = {}
    made, started = 0, time.monotonic()
    for result in decode(target, drafter, requests, slots=min(settings.slots, len(prompts)), capacity=capacity):
        results[result.id] = result
        made += len(result.tokens)
        bar.note(f"{made / (time.monotonic() - started):,.0f} tokens/s")
        bar.advance()
    if features is not None and layer_ids is not None:
        documents = [_document(p, results[p.id], target.hidden_size) for p in prompts]
        path = features.folder / f"{chunk_name(number)}.safetensors"
        for name in write_chunk(path, documents, chunk_meta(target, layer_ids)):
            say(f"regenerate: the states of {name} are not finite: left out of the features")
    return [AnswerRow(p.id, p.split, p.tokens, results[p.id].tokens, results[p.id].finish) for p in prompts]


def _document(prompt: PromptRow, result: Result, hidden_size: int) -> Document:
    assert result.states is not None
    tokens, answer = document(prompt.tokens, result.tokens)
    aux, last = split_states(result.states, hidden_size)
    return Document(prompt.id, prompt.split, torch.tensor(tokens), torch.tensor(answer), aux, last)


def _is_done(manifest: dict[str, Any] | None, done: int, missing: list[int], minutes: float | None) -> bool:
    """Whether nothing is missing, or only what the budget of the finished stage, which is not raised, left out."""
    if manifest is None:
        return False
    before: float | None = manifest["record"]["minutes"]
    raised = before is not None and (minutes is None or minutes > before)
    return not missing or (done >= manifest["record"]["chunks"] and not raised)


class _Times:
    """Seconds spent by chunk, kept on disk, so that the budget holds across killed runs; and the budget itself."""

    def __init__(self, path: Path, minutes: float | None, missing: set[str]) -> None:
        self.path, self.minutes = path, minutes
        chunks: dict[str, dict[str, float]] = read_json(path) if path.exists() else {}
        self.chunks = {name: chunk for name, chunk in chunks.items() if name not in missing}
        self.before = self.seconds
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return sum(c["seconds"] for c in self.chunks.values())

    def add(self, number: int, answers: int, seconds: float) -> None:
        self.chunks[chunk_name(number)] = {"answers": answers, "seconds": round(seconds, 3)}
        write_json(self.path, self.chunks)

    def room_for(self, answers: int) -> bool:
        """Whether so many more answers fit the budget, at the rate measured so far."""
        return self.minutes is None or not self.chunks or self._answers_left() >= answers

    def fitting(self, chunk: int) -> int:
        """Answers of whole chunks that still fit the budget, once a chunk was measured."""
        return max(0, int(self._answers_left())) // chunk * chunk

    def _answers_left(self) -> float:
        assert self.minutes is not None
        each = self.seconds / sum(c["answers"] for c in self.chunks.values())
        spent = self.before + time.monotonic() - self.started  # loading the target included
        return (60 * self.minutes - spent) / each


def answer_seconds(data: Path) -> float:
    """Seconds that the answers of a data folder took, over all processes that made them."""
    path = data / ANSWERS / _TIMES
    return _Times(path, None, set()).seconds if path.exists() else 0.0


def _finish(stage: Stage, chunks: list[list[PromptRow]], minutes: float | None, times: _Times) -> None:
    rows = [
        (len(r.answer), r.finish == "eos") for path in answer_chunks(stage.folder.parent) for r in read_answers(path)
    ]
    done = sum(_path(stage, i).exists() for i in range(len(chunks)))
    tokens, seconds = sum(n for n, _ in rows), times.seconds
    complete = done == len(chunks)
    record: dict[str, Any] = {
        "minutes": None if complete else minutes,
        "chunks": done,
        "chunks_planned": len(chunks),
        "answers": len(rows),
        "answer_tokens": tokens,
        "eos_share": round(sum(eos for _, eos in rows) / len(rows), 4),
        "decode_seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2) if seconds else None,
    }
    stage.finish(**record)
    rest = "" if complete else f"; {len(chunks) - done} of {len(chunks)} chunks are left for a larger time budget"
    say(
        f"regenerate: {len(rows):,} answers, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
        f"{record['eos_share']:.0%} ended by themselves{rest}"
    )


def _path(stage: Stage, number: int) -> Path:
    return stage.folder / f"{chunk_name(number)}.jsonl"
