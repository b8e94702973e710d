"""Command `push`: an exported head to the Hub, with its card and its report, in one commit."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftsmithError
from .files import write_text
from .hub import CARD, Destination, upload, usable_token
from .progress import say

if TYPE_CHECKING:
    from .card import Data, Facts
    from .eval.trained import Trained
    from .heads.formats.about import About
    from .heads.formats.doctor import Diagnosis

PREFERRED = "vllm"
"""The engine that a run's head is exported for where it loads such a head: its directory of EAGLE-3 serves three."""


@dataclass(frozen=True)
class PushSettings:
    """What is pushed, and where to.

    Attributes:
        folder: an exported directory, a run's folder or a checkpoint.
        repo: me/Name.
        target: a model that doctor decodes a few prompts with, and that a run's head is exported for: a short name, a
            hub id or a folder. None leaves the decoding out, and exports for the model that the run's folder names.
        runs: folder of all runs, where the run behind an export is looked for.
        public: see hub.Destination, as `revision`.
        message: of the commit; None says what it is.
        license: as the Hub writes it; None says "other".
        dry_run: only list what would be sent.
    """

    folder: Path
    repo: str
    target: str | None = None
    runs: Path = Path("runs")
    public: bool = False
    revision: str | None = None
    message: str | None = None
    license: str | None = None
    dry_run: bool = False


def push(settings: PushSettings) -> dict[str, Any]:
    """Export where needed, ask doctor, write the card, send what the server lacks.

    Returns:
        repo, folder (of the export), dry_run, public, files ([{name, bytes, sent}]; `sent` is None in a dry run),
        left_out (files of the folder that stay here), and after a push what `hub.Upload` holds of url, private,
        created, commit, deleted, untouched and others.

    Raises:
        DraftsmithError: a name or licence that is none, no token, nothing to export, a fault that doctor finds, or
            whatever `hub.upload` raises.
    """
    from .card_facts import PAGES, data_of, report_of

    to = Destination(settings.repo, settings.public, settings.revision)
    if not settings.dry_run:
        usable_token(to.repo)  # before anything is exported
    folder, about = _exported(settings)
    diagnosis = _healthy(folder, settings)
    run = _run_of(folder, about, settings.runs)
    report, pages = report_of(folder, about, run)
    facts = _facts(settings, about, diagnosis, report, None if run is None else data_of(run))
    _write_card(folder / CARD, facts)
    files = _files(folder, about) | pages
    found: dict[str, Any] = {
        "repo": to.repo, "folder": str(folder), "dry_run": settings.dry_run, "public": to.public,
        "left_out": _left_out(folder, files),
    }  # fmt: skip
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if settings.dry_run:
        return {**found, "files": [{"name": n, "bytes": size, "sent": None} for n, size in sizes.items()]}
    message = settings.message or f"{facts.called} head for {about.config.target_id}"
    done = upload(to, files, message, stale=[name for name in PAGES if name not in files])
    rest = {name: getattr(done, name) for name in _TOLD}
    return {**found, "files": [{"name": n, "bytes": b, "sent": n in done.sent} for n, b in sizes.items()], **rest}


_TOLD = ("url", "private", "created", "commit", "deleted", "untouched", "others")


def check_asked(repo: str, head: str) -> None:
    """Refuse, before a run's work, a push at its end that could not be done.

    Args:
        head: a name in configs/heads/.

    Raises:
        DraftsmithError: a name that is none, no token, or no engine loads such a head.
    """
    Destination(repo)
    usable_token(repo)
    engine_for(head)


def push_run(run: Path, repo: str, model: str) -> dict[str, Any]:
    """Push the head of a finished run; see `push`.

    Args:
        run: its folder.
        model: its target.

    Raises:
        DraftsmithError: as `push`; says that the run itself is finished, and how to push it again.
    """
    try:
        result = push(PushSettings(run, repo, target=model, runs=run.parent.parent))
    except DraftsmithError as error:
        raise DraftsmithError(
            f"the run is finished ({run}), and its head was not pushed: {error}; afterwards: "
            + shlex.join(["draftsmith", "push", str(run), repo, "--target", model])
        ) from None
    for line in result_lines(result):
        say(f"push: {line}")
    return result


def result_lines(result: dict[str, Any]) -> list[str]:
    """What became of a push, for people."""
    from .eval.report.plan import size

    files, lines = result["files"], []
    total = sum(file["bytes"] for file in files)
    if result["dry_run"]:
        who = "public" if result["public"] else "private"
        lines.append(f"{result['repo']} ({who}) would get {len(files)} files, {size(total)}:")
        width = max(len(file["name"]) for file in files)
        lines += [f"  {file['name']:{width}}  {size(file['bytes']):>9}" for file in files]
    elif result["commit"] is None:
        lines.append(f"{result['url']}: everything is there already")
    else:
        sent = [file for file in files if file["sent"]]
        names = ", ".join(file["name"] for file in sent) or "nothing"
        who = "private" if result["private"] else "public"
        lines.append(f"{result['url']} ({who}): sent {names}, {size(sum(file['bytes'] for file in sent))}")
    if result.get("deleted"):
        lines.append(f"deleted there, as these weights have no such report: {', '.join(result['deleted'])}")
    if result.get("untouched"):
        lines.append(
            f"{CARD} there was written by hand and is left as it is: put your text into "
            f"{Path(result['folder']) / CARD}, then push again"
        )
    if result["left_out"]:
        lines.append(f"not part of the export, and not sent: {', '.join(result['left_out'])}")
    if result.get("others"):
        lines.append(f"left there as it is: {', '.join(result['others'])}")
    return lines


def engine_for(head: str) -> str:
    """The engine that such a head is exported for; raises DraftsmithError where none loads it.

    Args:
        head: a name in configs/heads/, or a family's.
    """
    from .heads.formats.contracts import contract, contracts_of

    engines = [one.engine for one in contracts_of(head)]
    if not engines:
        contract(PREFERRED, head).require()
    return PREFERRED if PREFERRED in engines else engines[0]


def _exported(settings: PushSettings) -> tuple[Path, About]:
    """The exported directory: the given one, or that of a run's best checkpoint, made where it isn't there yet."""
    from .heads.formats.about import read_about

    folder = settings.folder
    if not folder.is_dir():
        raise DraftsmithError(f"{folder} is no folder: give an exported head, or the folder of a run")
    if (about := read_about(folder)) is not None:
        return folder, about
    return _export(folder, settings.target)


def _export(folder: Path, model: str | None) -> tuple[Path, About]:
    """Export the head of a run or a checkpoint, unless that was done with these very weights.

    Args:
        model: its target; None takes what the folder above the run is called.
    """
    from .heads.checkpoint import CONFIG
    from .heads.config import load_config
    from .heads.formats.about import read_about
    from .heads.formats.export import default_folder
    from .heads.formats.export_run import export_run
    from .heads.formats.run_source import find_source

    source = find_source(folder)
    if source.run is None:
        raise DraftsmithError(
            f"{folder} lies in no run: export it first (draftsmith export), then push what that wrote"
        )
    engine = engine_for(source.head or load_config(source.checkpoint / CONFIG).family)
    out = default_folder(folder, engine)
    about = read_about(out) if out.is_dir() else None
    if about is not None and about.provenance.get("weights_sha256") == source.weights_sha256:
        say(f"push: exported for {engine} before: {out}")
        return out, about
    say(f"push: exporting for {engine} into {out}")
    kept = _own_card(out / CARD)
    about = export_run(folder, engine, out=out, model=model).about
    if kept is not None:
        write_text(out / CARD, kept)
    return out, about


def _own_card(path: Path) -> str | None:
    """The text of a card that the user has made his own, None where there is none."""
    from .card import OWN_LINE

    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"{path} is no UTF-8 text ({error}): save it as UTF-8, or delete it") from error
    return None if text is None or OWN_LINE in text.splitlines() else text


def _healthy(folder: Path, settings: PushSettings) -> Diagnosis:
    """What doctor says; raises DraftsmithError where it finds a fault."""
    from .eval.exported import examine

    diagnosis = examine(folder, _asked_target(settings), settings.runs)
    if not diagnosis.ok:
        first = next((finding for finding in diagnosis.findings if finding.is_fault), None)
        said = "no engine loads it" if first is None else f"{first.cause}; {first.fix}"
        raise DraftsmithError(f"doctor finds {folder} at fault: {said}; 'draftsmith doctor {folder}' tells all of it")
    return diagnosis


def _asked_target(settings: PushSettings) -> str | None:
    """The target that doctor asks; in a dry run None where that would ask the network."""
    from .heads.resolve import resolve_target

    if settings.target is None or not settings.dry_run or resolve_target(settings.target, notify=say).is_local:
        return settings.target
    say(f"push: {settings.target} is on the Hub: the head is not compared with it in a dry run")
    return None


def _run_of(folder: Path, about: About, runs: Path) -> Trained | None:
    """The run that the export was made of, None where it isn't here or has other weights by now."""
    from .eval.trained import trained_head

    name, weights = about.provenance.get("run"), about.provenance.get("weights_sha256")
    if not isinstance(name, str) or "/" not in name:
        return None
    model, head = name.split("/", 1)
    homes = [parent for parent in folder.resolve().parents if parent.name == model] + [runs / model]
    for home in homes:
        try:
            run = trained_head(home, head)
        except DraftsmithError:
            continue
        if run.weights_sha256 == weights:
            return run
    say(f"push: the run {name} with these weights is not in {runs}: the card says nothing of its data and figures")
    return None


def _facts(
    settings: PushSettings, about: About, diagnosis: Diagnosis, report: dict[str, Any] | None, data: Data | None
) -> Facts:
    from .card import LICENSE, Facts
    from .card_facts import serving_of, unsupported_of

    config = about.config
    return Facts(
        repo=settings.repo,
        kind=about.head,
        model=_called(config.target_id),
        head=config.to_dict(),
        parameters=int(diagnosis.facts["parameters"]),
        dtype=about.dtype,
        layout=diagnosis.layout,
        report=report,
        training=about.provenance.get("training"),
        data=data,
        serving=serving_of(settings.repo, about, diagnosis, report),
        unsupported=unsupported_of(diagnosis, about.head),
        license=LICENSE if settings.license is None else settings.license,
    )


def _called(target: str) -> str:
    """What commands take as --model: the short name that stands for a hub id, else the id."""
    from .heads.resolve import model_entry, model_names

    return next((name for name in model_names() if model_entry(name)["hub_id"] == target), target)


def _write_card(path: Path, facts: Facts) -> None:
    """Write the card, unless its text is the user's own."""
    from .card import write

    text = write(facts)
    if _own_card(path) is not None:
        say(f"push: {path} is your own text and is sent as it is")
    else:
        write_text(path, text)


def _files(folder: Path, about: About) -> dict[str, Path]:
    """What the export lists, its record and the card, by name.

    Raises:
        DraftsmithError: a listed file isn't there, or isn't inside the folder.
    """
    from .heads.formats.about import ABOUT

    names = dict.fromkeys([*about.files, ABOUT, CARD])
    for name in names:
        path = folder / name
        if not path.is_file() or path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
            raise DraftsmithError(f"{folder} lists {name} and has no such file of its own: export the head again")
    return {name: folder / name for name in names}


def _left_out(folder: Path, files: dict[str, Path]) -> list[str]:
    there = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in there if name not in files]
