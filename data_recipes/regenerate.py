"""Stage `regenerate`: the target answers the prompts itself, chunk by planned chunk, within a time budget.

In this process by the decode loop, which computes the states of every row anyway: a chunk's features are written in the
same go where they are asked for, which saves `collect` a second pass over the text. Or through servers (`served.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import DraftsmithError
from ..eval.decoder.drafters.plain import PlainDrafter
from ..eval.decoder.loop import Request, decode, rows_needed
from ..eval.decoder.sampling import Sampling, sequence_key
from ..files import read_json, write_json
from ..heads.base import Needs
from ..heads.target import Target
from ..manifest import Stage
from ..progress import Progress, progress_bar, say
from .budget import Budget, spent_seconds
from .chat import ChatFormat
from .collect import CollectSettings, chunk_meta, features_stage
from .forward import recorded_document
from .layout import (
    ANSWERS,
    PROMPTS,
    TargetInfo,
    prompt_chunks,
    read_answers,
    read_prompts,
    stage_digest,
    write_rows,
)
from .prepare import began_on
from .store import write_chunk
from .turns import Asking, Dialogue, asked_rows, ended_early

VERSION = 2
STALLED_S = 3600.0
"""Rank 0 waits so long for a sign of life of the others before it gives up; ten times the longest chunk if more."""
_POLL_S = 0.5


@dataclass(frozen=True)
class RegenerateSettings:
    """Settings of the stage.

    Attributes:
        max_new_tokens: most tokens of an answer; longer ones are cut, kept and marked "length".
        slots: sequences decoded at the same time, in this process.
        turns: user turns that are asked: 1 = the first; 0 = all. A later one is asked after the target's own answers.
            A conversation ends early where an answer was cut, where the next turn may not fit the target's context,
            and after its first answer where it has tools, which nobody runs here.
        temperatures: of the answers; 0 = greedy. Of several each conversation takes one, drawn by its id.
        seed: of the draws; with a conversation's id, turn and position it decides each.
        template_kwargs: what `prepare` gave the chat template beside the messages.
        servers: base URLs of OpenAI-compatible servers that answer instead of this process.
        concurrency: requests to each server at the same time.
        server_timeout_s: longest time that a server may take for one answer.
    """

    max_new_tokens: int = 256
    slots: int = 64
    turns: int = 1
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    seed: int = 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    servers: list[str] = field(default_factory=list)
    concurrency: int = 64
    server_timeout_s: float = 600.0

    def temperature(self, name: str) -> float:
        """The temperature of the conversation `name`."""
        return self.temperatures[sequence_key(f"temperature of {name}") % len(self.temperatures)]


def regenerate(
    settings: RegenerateSettings,
    data: Path,
    info: TargetInfo,
    load_target: Callable[[], Target],
    minutes: float | None = None,
    record: CollectSettings | None = None,
    *,
    rank: int = 0,
    world: int = 1,
    load_tokenizer: Callable[[], Any] | None = None,
    model: str | None = None,
) -> Stage:
    """Answer the prompts of `data/prompts` into `data/answers`.

    A later call with a larger budget, or none, goes on with the next chunks; with the same or a smaller one it returns
    at once. The budget counts the seconds of earlier calls, too. At least one chunk is always made. Records that came
    tokenised have no prompt: they are skipped and counted.

    Args:
        settings: see RegenerateSettings.
        data: the data folder, with finished prompts.
        info: the target, as `load_target` will load it.
        load_target: called only when there is work for this process's own decoding.
        minutes: time budget of the stage; None answers everything.
        record: also record the states that `collect` is going to ask for, unless servers answer; None records nothing.
        rank, world: this process takes every `world`-th chunk from the `rank`-th on. Ranks share the file system alone;
            one that was killed and is started again goes on. Rank 0 waits for the others and finishes the stage.
        load_tokenizer: the target's tokenizer; needed with servers.
        model: name of the target, which servers should serve; needed with servers.

    Returns:
        The stage, finished by rank 0. Its record says how many of the planned chunks exist, and the budget.

    Raises:
        DraftsmithError: no prompts, the target changed, no server answers, a rank has gone.
    """
    _check(settings)
    identity = {
        "prompts": stage_digest(data / PROMPTS, "prepare"),
        "fingerprint": info.fingerprint,
        "max_new_tokens": settings.max_new_tokens,
        "turns": settings.turns,
        "temperatures": settings.temperatures,
        "seed": settings.seed,
        "template_kwargs": settings.template_kwargs,
        "slots": None if settings.servers else settings.slots,  # None: through servers
    }
    stage = Stage.open(data / ANSWERS, "regenerate", VERSION, identity, rank)
    chunks = prompt_chunks(data)
    missing = [path for path in chunks if not _answers(stage, path).exists()]
    if _is_done(stage.manifest, len(chunks) - len(missing), missing, minutes):
        return stage
    features = None
    if record is not None and not settings.servers:
        features = features_stage(data, stage.digest, info, record, rank)
    budget = Budget(stage.folder, minutes, {path.stem for path in missing}, rank)
    mine = [path for path in chunks[rank::world] if not _answers(stage, path).exists()]
    if mine and budget.room_for(len(asked_rows(mine[0])[0])):
        if settings.servers:
            assert load_tokenizer is not None
            assert model is not None
            _through_servers(settings, stage, info, mine, budget, rank, load_tokenizer(), model, began_on(data))
        else:
            _InProcess(settings, stage, info, load_target(), features, record, began_on(data)).run(mine, budget)
    if world > 1 and minutes is not None:
        left = [path.stem for path in mine if not _answers(stage, path).exists()]
        write_json(_ended(stage, rank), {"world": world, "minutes": minutes, "left": left})
    if rank == 0:
        _wait_for_ranks(stage, chunks, world, minutes, budget)
        _finish(stage, settings, chunks, minutes)
    return stage


def answer_seconds(data: Path) -> float:
    """Seconds that the answers of a data folder took, over all calls that made them."""
    return spent_seconds(data / ANSWERS)


def _check(settings: RegenerateSettings) -> None:
    if not settings.temperatures:
        raise DraftsmithError("regenerate.temperatures is empty: give at least one, e.g. [0.0] for greedy answers")
    for temperature in settings.temperatures:
        Sampling(temperature, seed=settings.seed).check(1)


class _InProcess:
    """Answers chunks by the decode loop."""

    def __init__(
        self, settings: RegenerateSettings, stage: Stage, info: TargetInfo, target: Target,
        features: Stage | None, record: CollectSettings | None, today: date | None,
    ) -> None:  # fmt: skip
        if target.fingerprint != info.fingerprint:
            raise DraftsmithError(f"the target {target.id} changed since its prompts were made: run again")
        self.settings, self.stage, self.target, self.features = settings, stage, target, features
        self.meta = None if record is None else chunk_meta(target, record)
        self.asking = _asking(settings, info, target.tokenizer, frozenset(target.eos_ids), today)
        self.drafter = PlainDrafter(None if self.meta is None else Needs(self.meta.layer_ids, last=True))
        self.tokens, self.started = 0, time.monotonic()

    def run(self, paths: Sequence[Path], budget: Budget) -> None:
        """Answer chunks in order as long as the budget has room for them."""
        with progress_bar("regenerate", None, "conversations") as bar:
            for number, path in enumerate(paths, 1):
                rows, skipped = asked_rows(path)
                left = len(rows) * (len(paths) - number + 1)
                if not budget.room_for(len(rows)):
                    break
                if (more := budget.expected(len(rows), left)) is not None:
                    bar.expect(bar.done + more)
                started = time.monotonic()
                dialogues = [self.asking.begin(row) for row in rows]
                states = self._decode(dialogues, bar)
                self._record(path, dialogues, states)
                seconds = time.monotonic() - started
                budget.add(path.stem, len(rows), seconds, ended_early=ended_early(dialogues), skipped=skipped)
                # last: the chunk is done when its answers are there
                write_rows(_answers(self.stage, path), [row for d in dialogues for row in d.rows()])

    def _decode(self, dialogues: Sequence[Dialogue], bar: Progress) -> dict[str, list[Tensor | None]]:
        """Bring dialogues to their ends, turn by turn; returns the states of each one's documents by its row's id."""
        states: dict[str, list[Tensor | None]] = {d.row.id: [] for d in dialogues}
        while asked := {d.name: d for d in dialogues if d.prompt is not None}:
            requests = [self._request(d) for d in asked.values()]
            slots, capacity = min(self.settings.slots, len(requests)), rows_needed(requests, self.drafter)
            for result in decode(self.target, self.drafter, requests, slots=slots, capacity=capacity):
                dialogue = asked[result.id]
                dialogue.take(result.tokens, result.finish)
                # a turn that goes on with a document reads all of it again: its states are those of the whole
                states[dialogue.row.id][len(dialogue.documents) - 1 :] = [result.states]
                self.tokens += len(result.tokens)
                bar.note(f"{self.tokens / max(time.monotonic() - self.started, 1e-9):,.0f} tokens/s")
                bar.advance(dialogue.prompt is None)
        return states

    def _request(self, dialogue: Dialogue) -> Request:
        assert dialogue.prompt is not None
        sampling = Sampling(self.settings.temperature(dialogue.row.id), seed=self.settings.seed)
        return Request(dialogue.name, dialogue.prompt, self.settings.max_new_tokens, sampling)

    def _record(self, path: Path, dialogues: Sequence[Dialogue], states: dict[str, list[Tensor | None]]) -> None:
        if self.features is None or self.meta is None:
            return
        documents = []
        for dialogue in dialogues:
            for row, found in zip(dialogue.rows(), states[dialogue.row.id], strict=True):
                assert found is not None
                documents.append(recorded_document(row, found, self.target, self.meta))
        where = self.features.folder / f"{path.stem}.safetensors"
        for name in write_chunk(where, documents, self.meta):
            say(f"regenerate: the states of {name} are not finite: left out of the features")


def _through_servers(
    settings: RegenerateSettings, stage: Stage, info: TargetInfo, paths: Sequence[Path], budget: Budget, rank: int,
    tokenizer: Any, model: str, today: date | None,
) -> None:  # fmt: skip
    from .served import ServedAnswers  # an HTTP client, which nobody else needs
    from .server import Servers

    servers = Servers(settings.servers, model, settings.concurrency, settings.server_timeout_s)
    asking = _asking(settings, info, tokenizer, frozenset({*info.stop_ids, tokenizer.eos_token_id} - {None}), today)
    with progress_bar("regenerate", None, "conversations") as bar:
        ServedAnswers(servers, asking, settings, stage.folder, paths, budget, bar, rank).run()


def _asking(
    settings: RegenerateSettings, info: TargetInfo, tokenizer: Any, stop_ids: frozenset[int], today: date | None
) -> Asking:
    chat = None
    if settings.turns != 1 or (settings.servers and getattr(tokenizer, "chat_template", None)):
        chat = ChatFormat(tokenizer, template_kwargs=settings.template_kwargs, stop_ids=sorted(stop_ids), today=today)
    return Asking(tokenizer, chat, settings.turns, settings.max_new_tokens, info.max_positions, stop_ids)


def _is_done(manifest: dict[str, Any] | None, done: int, missing: list[Path], minutes: float | None) -> bool:
    """Whether nothing is missing, or only what the budget of the finished stage, which is not raised, left out."""
    if manifest is None:
        return False
    before: float | None = manifest["record"]["minutes"]
    raised = before is not None and (minutes is None or minutes > before)
    return not missing or (done >= manifest["record"]["chunks"] and not raised)


def _wait_for_ranks(stage: Stage, chunks: Sequence[Path], world: int, minutes: float | None, budget: Budget) -> None:
    """Wait until every chunk is there, or left for a larger budget by the rank whose it is."""
    patience = max([STALLED_S, *(10 * chunk["seconds"] for chunk in budget.chunks)])
    coming = {path: number % world for number, path in enumerate(chunks)} if world > 1 else {}
    news = time.monotonic()
    with progress_bar("waiting for other ranks", None, "chunks") as bar:
        while coming:
            left = {rank: _left(stage, rank, world, minutes) for rank in range(world)}
            rest = {p: r for p, r in coming.items() if not _answers(stage, p).exists() and p.stem not in left[r]}
            if len(rest) < len(coming):
                news = time.monotonic()
                bar.advance(len(coming) - len(rest))
            elif time.monotonic() - news > patience:
                path, rank = next(iter(rest.items()))
                raise DraftsmithError(
                    f"{_answers(stage, path)} and {len(rest) - 1} other chunks did not come for {patience / 60:.0f} "
                    f"minutes: start rank {rank} again; what is there is kept"
                )
            coming = rest
            if coming:
                time.sleep(_POLL_S)


def _left(stage: Stage, rank: int, world: int, minutes: float | None) -> set[str]:
    """Chunks that a rank has left for a larger budget than `minutes`."""
    path = _ended(stage, rank)
    said = read_json(path) if minutes is not None and path.exists() else {}
    return set(said["left"]) if (said.get("world"), said.get("minutes")) == (world, minutes) else set()


def _finish(stage: Stage, settings: RegenerateSettings, chunks: Sequence[Path], minutes: float | None) -> None:
    done = sum(_answers(stage, path).exists() for path in chunks)
    complete = done == len(chunks)
    groups = _counts(stage, settings, chunks)
    total = sum(groups.values(), Counter[str]())
    if not total["answers"]:
        raise DraftsmithError(
            f"{stage.folder} holds no answer: no record has a prompt to answer (all came tokenised), or the servers "
            f"refused all; to train on the data set's own answers set answers=dataset"
        )
    budget = Budget(stage.folder, minutes, {path.stem for path in chunks if not _answers(stage, path).exists()})
    tokens, seconds = total["answer_tokens"], budget.seconds
    record: dict[str, Any] = {
        "minutes": None if complete else minutes,
        "chunks": done,
        "chunks_planned": len(chunks),
        **_shares(total),
        "decode_seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2) if seconds else None,
        "by_temperature": {str(temperature): _shares(group) for temperature, group in sorted(groups.items())},
        **{name: budget.total(name) for name in ("skipped", "retries")},
        **{name: budget.tally(name) for name in ("ended_early", "left_out", "failures")},
    }
    stage.finish(**record)
    if complete:
        for journal in stage.folder.glob("journal-*.jsonl"):
            journal.unlink(missing_ok=True)
    rest = "" if complete else f"; {len(chunks) - done} of {len(chunks)} chunks are left for a larger time budget"
    say(
        f"regenerate: {record['answers']:,} answers, {tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
        f"{record['eos_share']:.0%} ended by themselves{rest}"
    )
    for name in ("skipped", "left_out", "failures"):
        if record[name]:
            say(f"regenerate: {name.replace('_', ' ')}: {record[name]}")


def _counts(stage: Stage, settings: RegenerateSettings, chunks: Sequence[Path]) -> dict[float, Counter[str]]:
    """Documents, answers, their tokens and how many ended by themselves, by temperature."""
    groups: dict[float, Counter[str]] = {}
    for path in chunks:
        if not _answers(stage, path).exists():
            continue
        names = {row.id for row in read_prompts(path)}
        for row in read_answers(_answers(stage, path)):
            name = row.id if row.id in names else row.id.rpartition("/")[0]
            group = groups.setdefault(settings.temperature(name), Counter())
            answers = len(row.spans)
            group.update(
                documents=1, answers=answers, answer_tokens=row.answer_tokens, eos=answers - (row.finish == "length")
            )
    return groups


def _shares(group: Counter[str]) -> dict[str, Any]:
    counts: dict[str, Any] = {name: group[name] for name in ("documents", "answers", "answer_tokens")}
    return counts | {"eos_share": round(group["eos"] / group["answers"], 4)}


def _answers(stage: Stage, prompts: Path) -> Path:
    return stage.folder / prompts.name


def _ended(stage: Stage, rank: int) -> Path:
    return stage.folder / f"ended-{rank}.json"
