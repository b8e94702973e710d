"""Benchmark of the data stages: what exact masks, finding duplicates and storing states cost, against their aims.

Conversations are random words of the project's own prompts, the same in every run. Ratios are taken in one process and
in turns; rates and memory are this machine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import operator
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..data_recipes.builtin import builtin_prompts
from ..data_recipes.chat import ChatFormat
from ..data_recipes.chat_tokens import Document
from ..data_recipes.collect import CollectSettings, collect
from ..data_recipes.conversation import Conversation, Malformed
from ..data_recipes.duplicates import Duplicates
from ..data_recipes.forward import plan_forward
from ..data_recipes.layout import PROMPTS, DocumentRow, TargetInfo, prompt_chunks, read_own_answers
from ..data_recipes.normalise import NormaliseSettings, normalise
from ..data_recipes.prepare import PrepareSettings, prepare
from ..data_recipes.recipe import Filters, recipe_of_source
from ..data_recipes.shapes import parse_record
from ..errors import DraftsmithError
from ..files import read_json
from ..heads.config import default_layer_ids
from ..heads.target import Target, load_tokenizer
from ..manifest import MANIFEST
from ..progress import QUIET_VARIABLE, progress_bar

SEED = 20261
TURNS, TURN_TOKENS = 10, 100
"""Of the conversations that are rendered and compared."""
SMALL_TURNS, SMALL_TOKENS = 2, 20
"""Of the many that `prepare` reads."""
DOCUMENT_TOKENS = (60, 400)
"""Least and most of a document whose states are collected, the template's own tokens aside."""

_ONE_CORE = {"TOKENIZERS_PARALLELISM": "false"}
_COMPARED: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "<": operator.lt}
_SAMPLE_WORDS = 4096
_OWN_ANSWERS = PrepareSettings(answers="dataset")


@dataclass(frozen=True)
class Aim:
    """What the median of a figure is held to."""

    sign: Literal[">=", "<=", "<"]
    bound: float


AIMS = {
    "render_share": Aim(">=", 0.7),
    "prepare_peak_gib": Aim("<", 2.0),
    "collect_share": Aim(">=", 0.9),
    "collect_share_int8": Aim(">=", 0.9),
    "bytes_share": Aim("<=", 1.01),
    "bytes_share_int8": Aim("<=", 0.52),
}


@dataclass(frozen=True)
class DataBenchSettings:
    """How much is measured.

    Attributes:
        rendered: conversations that are rendered and searched for duplicates.
        rounds: of rendering and of searching, behind one that isn't counted.
        conversations: small ones that `prepare` reads.
        documents: whose states are collected, in batches of `token_budget` tokens at most; collect_rounds as above.
            Passes are short and many: what else a machine does then meets both sides alike.
    """

    rendered: int = 128
    rounds: int = 11
    conversations: int = 20_000
    documents: int = 4
    token_budget: int = 512
    collect_rounds: int = 7

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise DraftsmithError(f"bench.{name} = {value} must be at least 1")


def bench_data(target: Target, settings: DataBenchSettings) -> dict[str, Any]:
    """Measure rendering, the search for duplicates, `prepare` and `collect` on synthetic conversations.

    - render_share: conversations/s from record to documents with exact masks, as a share of rendering their messages
      once and `encode_batch` with offsets, on one core.
    - exact_duplicates_per_s, near_duplicates_per_s: conversations/s searched for equal and for similar questions.
    - prepare_per_s, prepare_peak_gib: conversations/s and peak memory of the stage in a process of its own.
    - collect_share, collect_share_int8: tokens/s of the stage as a share of the model's bare pass over its batches.
    - bytes_share, bytes_share_int8: bytes stored of a token / 8 H.

    Returns:
        Figures as {median, low, high}, those with an aim with "aim" and whether the median has "met" it.

    Raises:
        DraftsmithError: the target has no chat template or its template refuses plain conversations.
    """
    writer = ConversationWriter(target.tokenizer)
    figures = {
        **_rendering(target, settings, writer),
        **_preparing(target, settings, writer),
        **_collecting(target, settings, writer),
    }
    return {
        "figures": {name: {**figure, **judge(name, figure["median"])} for name, figure in figures.items()},
        "spread": "median, least, most of rounds; sizes, and all of prepare, are measured once",
    }


def judge(name: str, median: float) -> dict[str, Any]:
    """Return the aim of a figure as text and whether it is met; nothing where it has none."""
    aim = AIMS.get(name)
    return {} if aim is None else {"aim": f"{aim.sign} {aim.bound:g}", "met": _COMPARED[aim.sign](median, aim.bound)}


class ConversationWriter:
    """Writes ShareGPT records of random words of the built-in prompts; the same ones in every run.

    Args:
        tokenizer: decides how many words make a turn of so many tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._words = [word for prompt in builtin_prompts("train") for word in prompt.text.split()]
        self._draw = random.Random(SEED)
        sample = self._text(_SAMPLE_WORDS)
        tokens = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]
        self._words_per_token = _SAMPLE_WORDS / len(tokens)

    def record(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Return a conversation whose turns have about `sizes` tokens, the user's first."""
        texts = [self._text(max(1, round(size * self._words_per_token))) for size in sizes]
        speakers = ("human", "gpt")
        return {"conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)]}

    def write(self, path: Path, sizes: Iterator[Sequence[int]]) -> None:
        """Write one record a line."""
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(self.record(each)) + "\n" for each in sizes)

    def _text(self, words: int) -> str:
        return " ".join(self._draw.choices(self._words, k=words))


Figures = dict[str, dict[str, Any]]


def _rendering(target: Target, settings: DataBenchSettings, writer: ConversationWriter) -> Figures:
    info, defaults = TargetInfo.read(target.id, target.revision), PrepareSettings()
    chat, size = defaults.chat(info, target.tokenizer), defaults.chunk
    records = [writer.record([TURN_TOKENS] * TURNS) for _ in range(settings.rendered)]
    conversations = [_normalised(record) for record in records]
    asked = [conversation.asked for conversation in conversations]
    masked = _documents(chat, conversations)
    tokens = sum(len(row.tokens) for rows in masked for row in rows)

    def ours() -> None:
        for at in range(0, len(records), size):
            _documents(chat, [_normalised(record) for record in records[at : at + size]])

    def theirs() -> None:
        for at in range(0, len(records), size):
            _render_once(target.tokenizer, conversations[at : at + size])

    def searched(near: float | None) -> Callable[[], None]:
        def search() -> None:
            seen = Duplicates(near)
            for text in asked:
                seen.reason(text)

        return search

    with _environment(_ONE_CORE):
        seconds = _in_turns("bench rendering", {"ours": ours, "theirs": theirs}, settings.rounds)
        works = {"exact": searched(None), "near": searched(Filters().near_duplicates)}
        searches = _in_turns("bench duplicates", works, settings.rounds)
    rates = {name: [len(asked) / x for x in found] for name, found in searches.items()}
    return {
        "render_share": _share(seconds["ours"], seconds["theirs"], tokens),
        "exact_duplicates_per_s": _spread(rates["exact"]),
        "near_duplicates_per_s": _spread(rates["near"]),
    }


def _normalised(record: Any) -> Conversation:
    return normalise(parse_record(record), NormaliseSettings())


def _documents(chat: ChatFormat, conversations: Sequence[Conversation]) -> list[list[Document]]:
    rows = []
    for found in chat.documents(conversations):
        if isinstance(found, Malformed):
            raise DraftsmithError(f"the chat template can't be measured on plain conversations: {found}")
        rows.append(found.rows)
    return rows


def _render_once(tokenizer: Any, conversations: Sequence[Conversation]) -> list[tuple[list[int], Any]]:
    """What a mask by offsets begins with: ids and offsets of the rendered text, for nothing but them."""
    texts = [tokenizer.apply_chat_template(c.messages, tokenize=False) for c in conversations]
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [(encoding.ids, encoding.offsets) for encoding in encodings]


def _preparing(target: Target, settings: DataBenchSettings, writer: ConversationWriter) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        source, data = Path(folder) / "conversations.jsonl", Path(folder) / "data"
        writer.write(source, ([SMALL_TOKENS] * SMALL_TURNS for _ in range(settings.conversations)))
        # a process that this one starts itself would begin with this one's peak memory as its own
        process = multiprocessing.get_context("forkserver").Process(
            target=_prepare, args=(target.id, target.revision, str(source), data)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise DraftsmithError(f"'prepare' ended with status {process.exitcode}: what it said is above")
        record = read_json(data / PROMPTS / MANIFEST)["record"]
    return {
        "prepare_per_s": _spread([settings.conversations / record["seconds"]]),
        "prepare_peak_gib": _spread([record["peak_rss_bytes"] / 2**30]),
    }


def _prepare(location: str, revision: str | None, source: str, data: Path) -> None:
    """Run the stage on a file of conversations with answers of their own; the body of a child process."""
    os.environ.update(_ONE_CORE)
    info = TargetInfo.read(location, revision)
    prepare(_OWN_ANSWERS, recipe_of_source(source), data, info, lambda: load_tokenizer(location, revision))


def _collecting(target: Target, settings: DataBenchSettings, writer: ConversationWriter) -> Figures:
    info, layers = TargetInfo.read(target.id, target.revision), tuple(default_layer_ids(target.n_layers))
    forms = {
        "": CollectSettings(layers, settings.token_budget, answers="dataset"),
        "_int8": CollectSettings(layers, settings.token_budget, "int8", answers="dataset"),
    }
    records: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, data = Path(folder) / "conversations.jsonl", Path(folder) / "data"
        writer.write(source, _document_sizes(settings.documents))
        with _environment({QUIET_VARIABLE: "1"}):
            prepare(_OWN_ANSWERS, recipe_of_source(str(source)), data, info, lambda: target.tokenizer)
        chunks = [read_own_answers(path) for path in prompt_chunks(data)]

        def collected(form: str) -> Callable[[], None]:
            def work() -> None:
                stage = collect(forms[form], data, info, lambda: target)
                assert stage.manifest is not None
                records[form] = stage.manifest["record"]
                shutil.rmtree(stage.folder)

            return work

        works = {"plain": lambda: bare_pass(target, chunks, settings.token_budget)}
        works |= {form: collected(form) for form in forms}
        seconds = _in_turns("bench collection", works, settings.collect_rounds)
    whole = 8 * target.hidden_size
    tokens = records[""]["tokens"]
    shares = {f"collect_share{form}": _share(seconds[form], seconds["plain"], tokens) for form in forms}
    return shares | {f"bytes_share{form}": _spread([records[form]["bytes"] / tokens / whole]) for form in forms}


def _document_sizes(documents: int) -> Iterator[Sequence[int]]:
    """A question and an answer twice as long."""
    draw = random.Random(SEED)
    for _ in range(documents):
        length = draw.randint(*DOCUMENT_TOKENS)
        yield (length // 3, length - length // 3)


@torch.inference_mode()
def bare_pass(target: Target, chunks: Sequence[Sequence[DocumentRow]], token_budget: int) -> None:
    """Run the decoder layers over the batches that `collect` makes; no hooks, no output head, nothing kept."""
    with target.attention():
        for rows in chunks:
            lengths = [len(row.tokens) - 1 for row in rows]
            for batch in plan_forward(lengths, token_budget):
                padded = torch.zeros(len(batch), max(lengths[i] for i in batch), dtype=torch.int64)
                for line, i in enumerate(batch):
                    padded[line, : lengths[i]] = torch.tensor(rows[i].tokens[:-1])
                target.body(input_ids=padded.to(target.device), use_cache=False)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _in_turns(name: str, works: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work by round; the order is turned round from round to round, and the first is a warm-up."""
    seconds: dict[str, list[float]] = {work: [] for work in works}
    with progress_bar(name, len(works) * (rounds + 1), "runs") as bar, _environment({QUIET_VARIABLE: "1"}):
        for number in range(rounds + 1):
            for work in list(works)[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                works[work]()
                taken = time.perf_counter() - started
                if number:
                    seconds[work].append(taken)
                bar.advance()
    return seconds


def _share(ours: Sequence[float], theirs: Sequence[float], tokens: int) -> dict[str, Any]:
    """Our tokens/s over theirs, by round, on the same text."""
    return {
        **_spread([b / a for a, b in zip(ours, theirs, strict=True)]),
        "tokens_per_s": tokens / statistics.median(ours),
        "counterpart_tokens_per_s": tokens / statistics.median(theirs),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
