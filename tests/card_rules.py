"""What a model card's metadata may hold, by the rules that the Hub publishes."""

from __future__ import annotations

import re
from typing import Any

import yaml

LICENSES = {"apache-2.0", "mit", "other", "unknown", "llama3.1", "gemma", "cc-by-4.0", "bsd-3-clause"}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def card_problems(text: str) -> list[str]:
    """What the Hub would refuse of a card's metadata."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if found is None:
        return ["no metadata"]
    data = yaml.safe_load(found[1])
    if not isinstance(data, dict):
        return ["the metadata is no mapping"]
    checks = {
        "license": lambda v: v in LICENSES,
        "base_model": lambda v: all(_ID.fullmatch(x) for x in ([v] if isinstance(v, str) else v)),
        "base_model_relation": lambda v: v in RELATIONS,
        "datasets": lambda v: all(isinstance(x, str) and _ID.fullmatch(x) for x in v),
        "language": lambda v: all(re.fullmatch(r"[a-z]{2,3}|code|multilingual", x) for x in v),
        "library_name": lambda v: isinstance(v, str),
        "pipeline_tag": lambda v: v == "text-generation",
        "tags": lambda v: all(isinstance(x, str) for x in v),
        "model-index": _is_model_index,
    }
    unknown = [f'"{key}" is not known' for key in data if key not in checks]
    return unknown + [f'"{key}" must be valid' for key, ok in checks.items() if key in data and not ok(data[key])]


def _is_model_index(value: Any) -> bool:
    try:
        return all(
            isinstance(entry["name"], str)
            and isinstance(result["task"]["type"], str)
            and isinstance(result["dataset"]["type"], str)
            and isinstance(result["dataset"]["name"], str)
            and isinstance(metric["type"], str)
            and isinstance(metric["value"], int | float | str)
            for entry in value
            for result in entry["results"]
            for metric in result["metrics"]
        )
    except (KeyError, TypeError):
        return False
