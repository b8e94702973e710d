"""How much of a head's speed-up is left under load: by batch, or for recorded requests at some concurrency."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data_recipes.records import record_files
from ..errors import DraftsmithError
from ..files import probe_writable, read_json, sha256_file, write_json
from ..heads.resolve import TargetSource, require_reachable, resolve_target
from ..heads.target import fingerprint, resolve_folder
from ..manifest import Stage
from ..progress import progress_bar, say
from . import batches, replay
from .benchmarks import Benchmark, prompt_set
from .closed_loop import Ways
from .decoder.loop import Request
from .decoder.trees import check_text
from .given_head import GivenHead, find_head
from .harness import EvalSettings, load_benchmarks
from .journal import Journal
from .report import LOAD
from .report.content import environment
from .report.page import refresh_page
from .schemes import SchemeOptions, build_drafter, check_options, load_model

STAGE, VERSION, SCHEMA = "load", 1, "draftsmith.load/1"
BUILTIN = "builtin"
_NOTED, _PROMPTS, _FINISHED = "noted", "prompts", "finished batches"
"""Keys of the journal, beside those of `batches` and `replay`."""


@dataclass(frozen=True)
class LoadSettings:
    """What is decoded.

    Attributes:
        model: target: a short name, a hub id or a folder.
        head, run: see `given_head.find_head`.
        runs: folder of all runs.
        tree: None takes the one that the head's latest report chose.
        batches: sequences at a time, each measured by itself.
        benchmarks: names or paths, see `harness.load_benchmarks`; of conversations the first turns.
        bench_dir: where their files lie.
        prompts: of each benchmark.
        max_new_tokens: of each answer; with `replay` of requests that don't say.
        template_kwargs: what the chat template is given; None: what it was for the head's latest report.
        replay: a file of recorded requests, decoded instead of the benchmarks.
        concurrency: of its clients.
    """

    model: str
    head: str
    runs: Path
    run: str | None = None
    tree: str | None = None
    batches: tuple[int, ...] = (1, 2, 4, 8)
    benchmarks: tuple[str, ...] = (BUILTIN,)
    bench_dir: str | None = None
    prompts: int = 8
    max_new_tokens: int = 64
    template_kwargs: Mapping[str, Any] | None = None
    replay: Path | None = None
    concurrency: int = 8

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("max_new_tokens", 2), ("concurrency", 1)):  # a token is the prefill's
            if (value := getattr(self, name)) < least:
                raise DraftsmithError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise DraftsmithError(
                f"--batches {','.join(map(str, self.batches))}: give whole numbers from 1 on, each once, e.g. 1,2,4,8"
            )
        if self.tree is not None:
            check_text(self.tree)
        if self.replay is not None and not self.replay.is_file():
            raise DraftsmithError(f"--replay {self.replay}: there is no such file")


def load(settings: LoadSettings) -> dict[str, Any]:
    """Measure a head under load, or go on with it; what is finished is not measured again.

    Returns:
        The content of load.json in the head's folder: schema, model, head, head_sha256 (of its weights), head_digest
        (of all its files), target_fingerprint, and what was measured of these very files: `batches` (rows of
        `batches.measure_batch`, by batch) with `sweep` {setting, prompts, below_one_from, below_one, same_steps,
        environment}, and `replay` (see `replay.measure_replay`) with its file, sha256, setting and environment; empty
        or None where it wasn't.

    Raises:
        DraftsmithError: no such head, one that doesn't fit the target, or prompts or requests that can't be decoded.
    """
    probe_writable(settings.runs)
    source = require_reachable(resolve_target(settings.model, notify=say))
    head = find_head(settings.runs / source.name, settings.head, settings.run)
    settings = dataclasses.replace(settings, template_kwargs=head.rendering(settings.template_kwargs))
    for remark in head.remarks:
        say(f"{head.name} {remark}")
    tree = settings.tree or head.tree
    check_options("head", SchemeOptions(head.checkpoint, tree=tree))
    about = {
        "schema": SCHEMA,
        "model": settings.model,
        "head": head.name,
        "head_sha256": head.weights_sha256,
        "head_digest": head.digest,
        "target_fingerprint": fingerprint(resolve_folder(source.location, _revision(source))),
    }
    work = _Work(settings, head, tree, about)
    found = work.sweep() if settings.replay is None else work.replay()
    result = _publish(head.folder / LOAD, about, found)
    refresh_page(head.folder)
    return result


def _revision(source: TargetSource) -> str | None:
    return None if source.is_local else source.revision


def _publish(path: Path, about: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Write the result; what was measured before of the same head and target stays in it."""
    before = read_json(path) if path.exists() else {}
    same = all(before.get(name) == about[name] for name in ("schema", "head_digest", "target_fingerprint"))
    parts: dict[str, Any] = {"batches": [], "sweep": None, "replay": None}
    kept = {name: before.get(name, empty) if same else empty for name, empty in parts.items()}
    result = {**about, **kept, **found}
    write_json(path, result)
    return result


class _Work:
    """One call: where its journal lies, and target and head, loaded when something is left to measure.

    Args:
        tree: text of the trees; None = the drafter's own default.
        about: what identifies head and target.
    """

    def __init__(self, settings: LoadSettings, head: GivenHead, tree: str | None, about: dict[str, Any]) -> None:
        self.settings, self.head, self.tree = settings, head, tree
        self.identity = {"head": about["head_digest"], "fingerprint": about["target_fingerprint"], "tree": tree}

    @property
    def _rendered(self) -> dict[str, Any]:
        """What the chat template is given, where it is: results from before it could be are not set aside."""
        given = self.settings.template_kwargs
        return {"template_kwargs": given} if given else {}

    def _ways(self) -> Ways:
        """Load target and head."""
        say(f"loading the target {self.settings.model}")
        target = load_model(self.settings.model, adapter=self.head.adapter)
        drafter = build_drafter("head", target, SchemeOptions(self.head.checkpoint, tree=self.tree))
        return Ways(target, drafter)

    def _stage(self, name: str, identity: dict[str, Any]) -> tuple[Stage, Path]:
        """Stage and place of its journal."""
        stage = Stage.open(self.head.folder / STAGE / name, STAGE, VERSION, {**self.identity, **identity})
        return stage, stage.folder / "journal.jsonl"

    def _note(self, ways: Ways, journal: Journal) -> None:
        """Keep in the journal with what is measured, and where."""
        setting = {
            "tree": self.tree or f"chain:{ways.drafter.depth}",
            "depth": ways.drafter.depth,
            "nodes": ways.drafter.rows,
            "max_new_tokens": self.settings.max_new_tokens,
            "template_kwargs": self.settings.template_kwargs,
        }
        place = {**environment(ways.target), "sessions": journal.sessions}
        journal.put(_NOTED, {"setting": setting, "environment": place})

    def sweep(self) -> dict[str, Any]:
        """Measure every batch that is asked for; those that were measured before stay in the result."""
        s = self.settings
        sources = load_benchmarks(EvalSettings(prompts=s.prompts, bench=list(s.benchmarks), bench_dir=s.bench_dir))
        asked = {"prompts": {b.name: b.sha256 for b in sources}, "max_new_tokens": s.max_new_tokens}
        stage, place = self._stage("batches", asked | self._rendered)
        journal = Journal.read(place)
        finished = journal.get(_FINISHED) or []
        missing = sorted(set(s.batches) - set(finished))
        if missing:
            ways, journal = self._ways(), Journal.open(place)
            requests, prompts = _requests(sources, ways, s)
            journal.put(_PROMPTS, prompts)
            self._note(ways, journal)
            with progress_bar(STAGE, sum(batches.answers_of(len(requests), b) for b in missing), "answers") as bar:
                bar.done = sum(batches.finished_answers(journal, len(requests), b) for b in missing)
                for batch in missing:
                    bar.note(f"batch {batch}")
                    batches.measure_batch(ways, requests, batch, journal, bar)
                    journal.put(_FINISHED, finished := sorted([*finished, batch]))
            stage.finish()
        else:
            say(f"everything is measured already; to measure again delete {stage.folder}")
        rows = [journal.get(batches.batch_key(batch)) for batch in finished]
        sweep = {
            **journal.get(_NOTED),
            "prompts": journal.get(_PROMPTS),
            "below_one_from": batches.below_one_from(rows),
            "below_one": batches.below_one_line(rows),
            "same_steps": batches.same_steps(rows),
        }
        return {"batches": rows, "sweep": sweep}

    def replay(self) -> dict[str, Any]:
        """Replay the recorded requests."""
        s, path = self.settings, self.settings.replay
        assert path is not None
        record_files(path)  # refuses what can't be read before anything is loaded
        asked = {"file": sha256_file(path), "concurrency": s.concurrency, "max_new_tokens": s.max_new_tokens}
        stage, place = self._stage("replay", asked | self._rendered)
        journal = Journal.read(place)
        if journal.get(replay.KEY) is None:
            ways, journal = self._ways(), Journal.open(place)
            recorded = replay.RequestReader(ways, s.max_new_tokens, s.template_kwargs).read(path)
            _tell(path, recorded, s.concurrency)
            self._note(ways, journal)
            with progress_bar(STAGE, replay.answers_of(recorded.requests), "answers") as bar:
                bar.done = replay.finished_answers(journal, recorded.requests)
                replay.measure_replay(ways, recorded, s.concurrency, journal, bar)
            stage.finish()
        else:
            say(f"everything is measured already; to measure again delete {stage.folder}")
        about = {"file": path.name, "sha256": asked["file"], **journal.get(_NOTED)}
        return {"replay": {**about, **journal.get(replay.KEY)}}


def _tell(path: Path, recorded: replay.Recorded, concurrency: int) -> None:
    """Say what of a file is not replayed as it was recorded."""
    for problem in recorded.problems:
        say(f"{path}: left out: {problem}")
    if recorded.unused:
        keys = ", ".join(f"{key} ({count})" for key, count in recorded.unused.items())
        say(f"{path}: keys that change nothing here: {keys}")
    if len(recorded.requests) < concurrency:
        say(f"{path}: its {len(recorded.requests)} requests never fill a concurrency of {concurrency}")


def _requests(
    sources: list[Benchmark], ways: Ways, settings: LoadSettings
) -> tuple[list[Request], list[dict[str, Any]]]:
    """First turns of all benchmarks, and what is known of each."""
    sets = [
        prompt_set(
            source,
            ways.target.tokenizer,
            max_new_tokens=settings.max_new_tokens,
            room=ways.context,
            template_kwargs=settings.template_kwargs,
            stop_ids=ways.target.eos_ids,
        )
        for source in sources
    ]
    known = [
        {
            "name": found.name,
            "source": source.source,
            "licence": source.licence,
            "sha256": found.sha256,
            "n_prompts": len(found.requests),
            "dropped": found.dropped,
            "problems": [*source.problems, *found.problems],
        }
        for source, found in zip(sources, sets, strict=True)
    ]
    return [request for found in sets for request in found.requests], known
