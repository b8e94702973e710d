"""What a card says of a head: its report, training and data, as their stages noted them, and how engines serve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .card import Data, Serving
from .card_parts import figures, languages
from .data_recipes.index import INDEX
from .data_recipes.layout import ANSWERS, PROMPTS
from .data_recipes.prepare import commits_of
from .data_recipes.sources import HUB
from .errors import DraftsmithError
from .eval.report import PAGE, REPORT
from .eval.trained import Trained
from .files import read_json, sha256_file
from .manifest import MANIFEST, PLAN
from .progress import say

if TYPE_CHECKING:
    from .heads.config import HeadConfig
    from .heads.formats.about import About
    from .heads.formats.doctor import Diagnosis

PAGES = (REPORT, PAGE)
"""Of a pushed head: what is not on its weights is none of its files."""
_SCHEMA = "draftsmith.report/3"
_DEPTH = 3
"""K of the commands on a card where no chain was measured, and the head drafts so deep."""
_CARD_READS = {
    "summary": dict, "environment": dict, "by": dict, "temperatures": list, "benchmarks": list, "ttft": dict,
    "prompts": dict, "tuning": dict,
}  # fmt: skip


def report_of(folder: Path, about: About, run: Trained | None) -> tuple[dict[str, Any] | None, dict[str, Path]]:
    """The report on an export's weights: the run's latest, else one that lies beside it.

    Args:
        folder: of the export; about: its record; run: behind it, None where that isn't here.

    Returns:
        It, and the files of report and page by their names; None and none where these weights were not measured.

    Raises:
        DraftsmithError: a report that is damaged.
    """
    weights = about.provenance.get("weights_sha256")
    places = [] if run is None else [run.folder]
    for place in [*places, folder]:
        if weights is None or not _is_own_file(place / REPORT):
            continue
        found = _read(place / REPORT)
        if found.get("head_sha256") != weights:
            continue
        if found.get("schema") == _SCHEMA:
            _check(found, place / REPORT)
            return found, {name: place / name for name in PAGES if _is_own_file(place / name)}
        say(f"push: {place / REPORT} is of another version ({found.get('schema')})")
    say("push: these weights were not measured: 'draftsmith eval' gives the card its figures")
    return None, {}


def _is_own_file(path: Path) -> bool:
    """A link may show a file that nobody meant to publish."""
    return path.is_file() and not path.is_symlink()


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise DraftsmithError(f"{path} is no report (it holds a {type(found).__name__}): {_WAY_OUT}")
    return found


_WAY_OUT = "delete it, and measure the head again with 'draftsmith eval'"


def _check(report: Mapping[str, Any], path: Path) -> None:
    """Raise DraftsmithError where a card can't be written of a report."""
    if damaged := [name for name, kind in _CARD_READS.items() if not isinstance(report.get(name), kind)]:
        raise DraftsmithError(f"{path} is damaged ({', '.join(damaged)} missing or of another kind): {_WAY_OUT}")
    try:
        figures(report)
        languages(report)
        _shape(dict(report), ("tree",), None)
        _ = [(row["name"], row["n_prompts"], round(row["tau"], 3)) for row in report["benchmarks"]]
        _ = [f"{row['temperature']:g}" for row in report["temperatures"]]
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, DraftsmithError) as error:
        raise DraftsmithError(f"{path} is damaged ({type(error).__name__}: {error}): {_WAY_OUT}") from error


def data_of(run: Trained) -> Data | None:
    """What the head learned from; None where it isn't there any more, or was added to since."""
    plan = run.train / PLAN
    digest = read_json(plan).get("features") if plan.exists() else None
    stores = sorted(run.folder.parent.glob(f"data/*/*/{INDEX}"))
    store = next((path.parent for path in stores if sha256_file(path) == digest), None)
    if store is None or not (store.parent / PROMPTS / PLAN).exists():
        return None
    asked = read_json(store.parent / PROMPTS / PLAN)
    record = read_json(store / MANIFEST)["record"]
    answers = store.parent / ANSWERS / PLAN
    sampled = asked["answers"] == "target" and answers.exists()
    return Data(
        recipe=store.parent.name,
        sources=[_source(source, commits_of(store.parent)) for source in asked["sources"]],
        answers=asked["answers"],
        documents=record["documents"],
        tokens=record["tokens"],
        answer_tokens=record["answer_tokens"],
        temperatures=read_json(answers)["temperatures"] if sampled else [],
    )


def _source(source: Mapping[str, Any], commits: Mapping[str, str]) -> tuple[str, str | None, str | None]:
    """A source as `card.Data` has it; a dataset's id is what stands before its configuration and split."""
    name = str(source["name"])
    dataset = str(source["dataset"]).removeprefix(HUB).partition(":")[0] if source["kind"] == "hf" else None
    return name, dataset, commits.get(name)


def serving_of(repo: str, about: About, diagnosis: Diagnosis, report: dict[str, Any] | None) -> list[Serving]:
    """How the engines that load this directory serve it, with the shape that was measured."""
    from .heads.formats.contracts import contract, engines, serve_settings

    most = _most_depth(about.config)
    found = []
    for engine in (engine for engine in engines() if diagnosis.passed(engine)):
        shape = _shape(report, contract(engine, about.head).shapes, most)
        told = serve_settings(
            engine,
            about.head,
            folder=repo,
            model=about.config.target_id,
            layer_ids=about.config.layer_ids or None,
            **shape,
        )
        notes = [*told.notes, *told.constraints]
        found.append(Serving(contract(engine, about.head).title, told.commands, told.python, notes))
    return found


def _most_depth(config: HeadConfig) -> int | None:
    """How deep the head drafts; None: without end."""
    import torch

    from .heads.registry import head_family
    from .heads.vocab import DraftVocab

    vocab = DraftVocab(torch.arange(config.draft_vocab_size), config.vocab_size)
    config = dataclasses.replace(config, draft_vocab_sha256=vocab.sha256)
    with torch.device("meta"):
        return head_family(config.family).head(config, vocab).most_depth


def _shape(report: dict[str, Any] | None, shapes: Collection[str], most: int | None) -> dict[str, int]:
    """Arguments of `serve_settings`: the measured tree where the engine verifies such, else the best chain measured.

    Args:
        shapes: that the engine verifies.
        most: how deep the head drafts, None: without end; of the chain of `_DEPTH` where none was measured.
    """
    from .eval.decoder.search import Dynamic, parse_shape

    setting = {} if report is None else report["summary"]["setting"]
    if setting.get("kind") == "dynamic" and "tree" in shapes:
        tree = parse_shape(setting["tree"])
        assert isinstance(tree, Dynamic)
        return {"depth": tree.depth, "topk": tree.top_k, "nodes": tree.rows}
    if setting.get("kind") == "chain":
        return {"depth": setting["depth"]}
    chains = [] if report is None else [r for r in report["tuning"]["table"] if r["tree"].startswith("chain:")]
    best = max(chains, key=lambda row: float(row["predicted_tokens_per_s"]), default=None)
    depth = _DEPTH if best is None else int(best["depth"])
    return {"depth": depth if most is None else min(depth, most)}


def unsupported_of(diagnosis: Diagnosis, head: str) -> list[tuple[str, str]]:
    """Engines that don't load this directory, and why."""
    from .heads.formats.contracts import contract, engines

    others = [engine for engine in engines() if not diagnosis.passed(engine)]
    return [(contract(engine, head).title, diagnosis.verdicts[engine]) for engine in others]
