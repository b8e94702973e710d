"""What the data stages hand to each other: files, rows, and what is known of the target before it is loaded.

<data>/prompts/chunk-00000.jsonl        one conversation a line: `PromptRow`
<data>/answers/chunk-00000.jsonl        one answered document a line: `DocumentRow`, of the same chunk's prompts
<data>/features/chunk-00000.safetensors the target's states on the same documents

A chunk is the unit that is finished or not, in every stage and on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..errors import DraftsmithError
from ..files import atomic_path, read_json, sha256_file, sha256_json
from ..manifest import MANIFEST

PROMPTS, ANSWERS, FEATURES = "prompts", "answers", "features"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class TargetInfo:
    """What the data stages' identities need of the target; read from its folder without loading it.

    Attributes:
        fingerprint: of the weights (`heads.target.fingerprint`).
        tokenizer_sha256: over the tokenizer's and the chat template's files.
        max_positions: the longest context.
        stop_ids: tokens that end an answer, as the model's configuration names them; the tokenizer's own is one more.
    """

    fingerprint: str
    tokenizer_sha256: str
    max_positions: int
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, location: str, revision: str | None = None) -> Self:
        """Read a model folder, or a hub model's snapshot.

        Raises:
            DraftsmithError: no model there.
        """
        from ..heads.loading import config_value
        from ..heads.target import fingerprint, resolve_folder

        folder = resolve_folder(location, revision)
        config = read_json(folder / "config.json")
        positions = config_value(location, revision, "max_position_embeddings")
        if not isinstance(positions, int):
            raise DraftsmithError(
                f"{folder / 'config.json'} names no longest context: write max_position_embeddings into it, the "
                "length that the model was trained for"
            )
        files = {name: sha256_file(folder / name) for name in _TOKENIZER_FILES if (folder / name).exists()}
        return cls(fingerprint(folder), sha256_json(files), positions, _stop_ids(folder, config))


def _stop_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    named = [read_json(path).get("eos_token_id")] if path.exists() else []
    named.append(config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id")))
    found = [token for value in named for token in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(token for token in found if token is not None))


@dataclass(frozen=True)
class PromptRow:
    """One conversation, as `prepare` writes it.

    Attributes:
        id: unique within a recipe and the same in every run: made of the source's name and the content.
        split: "train" or "val".
        source: name of the source in the recipe: what counts are kept by.
        category: the record's own label, or the source's name.
        messages, tools: see `Conversation`; no messages where the record was plain text or tokens.
        prompt: tokens of the first prompt, up to where the assistant starts to speak; empty where the record came
            tokenised.
        documents: what the record's own answers give to train on: rows of `tokens`, and `spans`, the [start, end)
            ranges that are answers. Empty where the answers are to be the target's own.
    """

    id: str
    split: str
    source: str
    category: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prompt: list[int]
    documents: list[dict[str, Any]]


@dataclass(frozen=True)
class DocumentRow:
    """One document to train on.

    Attributes:
        id: the conversation's, with "/1", "/2", … behind it where a conversation gives several documents.
        split, source: see `PromptRow`.
        tokens: prompt and answers.
        spans: [start, end) ranges of tokens that are answers, end-of-turn tokens included; ascending, apart.
        finish: "eos", or "length" where the last answer was cut.
    """

    id: str
    split: str
    source: str
    tokens: list[int]
    spans: list[list[int]]
    finish: str = "eos"

    @property
    def answer_tokens(self) -> int:
        """How many tokens are answers."""
        return sum(end - start for start, end in self.spans)


def write_rows(path: Path, rows: Iterable[PromptRow | DocumentRow]) -> None:
    """Write rows as JSON lines, atomically."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row.__dict__, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_prompts(path: Path) -> list[PromptRow]:
    """Read one chunk of conversations."""
    return [PromptRow(**row) for row in _rows(path, "prepare")]


def read_answers(path: Path) -> list[DocumentRow]:
    """Read one chunk of answered documents."""
    return [DocumentRow(**row) for row in _rows(path, "regenerate")]


def read_own_answers(path: Path) -> list[DocumentRow]:
    """Read the documents that a chunk of conversations gives with its own answers."""
    return [
        DocumentRow(f"{row.id}/{i}" if len(row.documents) > 1 else row.id, row.split, row.source, **document)
        for row in read_prompts(path)
        for i, document in enumerate(row.documents, 1)
    ]


def prompt_chunks(data: Path) -> list[Path]:
    """Return the chunks of conversations, in order."""
    return sorted((data / PROMPTS).glob("chunk-*.jsonl"))


def answer_chunks(data: Path) -> list[Path]:
    """Return the finished chunks of answers, in order."""
    return sorted((data / ANSWERS).glob("chunk-*.jsonl"))


def stage_digest(folder: Path, command: str) -> str:
    """Return the digest of the finished stage in `folder`; `command` makes it where it is missing."""
    if not (folder / MANIFEST).exists():
        raise DraftsmithError(f"{folder} is not finished: run 'draftsmith {command}' first")
    return sha256_json(read_json(folder / MANIFEST)["identity"])


def _rows(path: Path, command: str) -> list[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as f:
            return [json.loads(line) for line in f]
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path} does not exist: run 'draftsmith {command}' first") from error
    except ValueError as error:
        raise DraftsmithError(f"{path} is damaged ({error}): delete it and run 'draftsmith {command}' again") from error
