"""Prompts as `prepare` leaves them, and stages in processes of their own, for the tests of `regenerate`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import tokenizers  # noqa: F401 - imported before the forks
import torch
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

from draftsmith.data_recipes import regenerate as regenerate_module
from draftsmith.data_recipes import server
from draftsmith.data_recipes.layout import (
    PROMPTS,
    DocumentRow,
    PromptRow,
    TargetInfo,
    answer_chunks,
    read_answers,
    write_rows,
)
from draftsmith.data_recipes.regenerate import RegenerateSettings, regenerate
from draftsmith.heads.target import Target, load_tokenizer
from draftsmith.manifest import Stage

FAST = server.Patience(first=0.01, longest=0.05, attempts=10, aside_after=5, aside=0.05, give_up=1.0, connect=1.0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def prompt_row(number: int, messages: list[dict[str, Any]], prompt: list[int], **fields: Any) -> PromptRow:
    values: dict[str, Any] = {
        "id": f"asks/{number:03d}", "split": "val" if number % 8 == 1 else "train", "source": "asks",
        "category": "asks", "messages": messages, "tools": None, "prompt": prompt, "documents": [],
    }  # fmt: skip
    return PromptRow(**(values | fields))


def make_prompts(data: Path, tokenizer: Any, conversations: list[list[dict[str, Any]]], chunk: int = 8) -> None:
    """A finished stage `prepare` with these conversations."""
    rows = []
    for number, messages in enumerate(conversations):
        end = next(i for i, m in enumerate(messages) if m["role"] == "user") + 1
        prompt = tokenizer.apply_chat_template(messages[:end], add_generation_prompt=True, return_dict=False)
        rows.append(prompt_row(number, messages, list(prompt)))
    write_prompts(data, rows, chunk)


def write_prompts(data: Path, rows: list[PromptRow], chunk: int = 8) -> None:
    stage = Stage.open(data / PROMPTS, "prepare", 0, {})
    for number in range(0, len(rows), chunk):
        write_rows(stage.folder / f"chunk-{number // chunk:05d}.jsonl", rows[number : number + chunk])
    stage.finish()


def answered(data: Path) -> list[DocumentRow]:
    return [row for path in answer_chunks(data) for row in read_answers(path)]


def answer_bytes(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in answer_chunks(data)}


def run_rank(
    settings: RegenerateSettings, target: str, data: str, rank: int, world: int, kill_before_replace: int | None = None
) -> None:
    """One rank of the stage in a process of its own; the n-th file that would appear kills it."""
    os.environ["DRAFTSMITH_QUIET"] = "1"
    torch.set_num_threads(1)
    server.PATIENCE = FAST
    regenerate_module._POLL_S = 0.05
    if kill_before_replace is not None:
        _kill_before(kill_before_replace)

    def load() -> Target:
        return Target.load(target, dtype=torch.float32, device="cpu")

    regenerate(
        settings, Path(data), TargetInfo.read(target), load, rank=rank, world=world,
        load_tokenizer=lambda: load_tokenizer(target), model="tiny-chat",
    )  # fmt: skip


def run_served(settings: RegenerateSettings, target: str, data: str, rank: int) -> None:
    """One rank of two that answers its chunks through servers and doesn't wait for the other."""
    os.environ["DRAFTSMITH_QUIET"] = "1"
    server.PATIENCE = FAST
    regenerate_module._wait_for_ranks = lambda *_: None  # type: ignore[assignment]
    regenerate_module._finish = lambda *_: None  # type: ignore[assignment]
    regenerate(
        settings, Path(data), TargetInfo("f" * 64, "0" * 64, 512, (2,)), _no_target, rank=rank, world=2,
        load_tokenizer=lambda: load_tokenizer(target), model="tiny-chat",
    )  # fmt: skip


def _no_target() -> Target:
    raise AssertionError("servers answer")


def _kill_before(n: int) -> None:
    real, count = os.replace, 0

    def replace(*args: object) -> None:
        nonlocal count
        count += 1
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)  # type: ignore[arg-type]

    os.replace = replace  # type: ignore[assignment]
