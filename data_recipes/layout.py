"""What the data stages hand to each other: files, rows, and what is known of the target before it is loaded.

<data>/prompts/prompts.jsonl            one prompt a line: id, split, category, messages, tokens
<data>/answers/chunk-00000.jsonl        one answer a line: id, split, prompt, answer, finish
<data>/features/chunk-00000.safetensors the target's states on the same documents
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
    """

    fingerprint: str
    tokenizer_sha256: str
    max_positions: int

    @classmethod
    def read(cls, location: str, revision: str | None = None) -> Self:
        """Read a model folder, or a hub model's snapshot.

        Raises:
            DraftsmithError: no model there.
        """
        from ..heads.target import fingerprint, resolve_folder

        folder = resolve_folder(location, revision)
        config = read_json(folder / "config.json")
        positions = config.get("text_config", config).get("max_position_embeddings")
        if not isinstance(positions, int):
            raise DraftsmithError(
                f"{folder / 'config.json'} has no max_position_embeddings: it is no decoder-only model"
            )
        files = {name: sha256_file(folder / name) for name in _TOKENIZER_FILES if (folder / name).exists()}
        return cls(fingerprint(folder), sha256_json(files), positions)


@dataclass(frozen=True)
class PromptRow:
    """One line of prompts.jsonl; `tokens` end where the assistant starts to speak."""

    id: str
    split: str
    category: str
    messages: list[dict[str, str]]
    tokens: list[int]


@dataclass(frozen=True)
class AnswerRow:
    """One line of an answers chunk; `finish` is "eos" (the answer ends with that token) or "length" (it was cut)."""

    id: str
    split: str
    prompt: list[int]
    answer: list[int]
    finish: str


def write_rows(path: Path, rows: Iterable[PromptRow | AnswerRow]) -> None:
    """Write rows as JSON lines, atomically."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row.__dict__, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_prompts(data: Path) -> list[PromptRow]:
    """Read all prompts of a data folder."""
    return [PromptRow(**row) for row in _rows(data / PROMPTS / "prompts.jsonl", "prepare")]


def read_answers(path: Path) -> list[AnswerRow]:
    """Read one chunk of answers."""
    return [AnswerRow(**row) for row in _rows(path, "regenerate")]


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
