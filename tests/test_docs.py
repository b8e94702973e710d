"""Every command that README and docs show is done, or resolved with --dry-run; every link leads somewhere."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from shipped import make_run
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.eval.report import REPORT
from draftsmith.heads.target import Target
from draftsmith.options import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(r"(?:\S*bin/)?draftsmith")
REFUSED: type[Exception] = typer.BadParameter.__mro__[2]
"""What the command line raises for anything that it can't take."""
STOPS = {"|", "<", ">", "2>", "&&", ";", "&"}


def shell_lines(text: str) -> list[str]:
    """Lines of fenced shell blocks, and inline code that looks like a command; continued lines joined."""
    fenced = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    bare = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    return [*lines, *(line for block in bare for line in block.splitlines() if line.startswith("make ")), *inline]


def words(line: str) -> list[str]:
    """The words of a command up to a pipe or redirection, without variables set for it; [] where it is none."""
    if line.lstrip("$ ").startswith(("#", "-")) or "…" in line:
        return []
    try:
        found = shlex.split(line.lstrip("$ "), comments=True)
    except ValueError:
        return []
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        found = found[1:]
    stop = next((i for i, word in enumerate(found) if word in STOPS), len(found))
    return found[:stop]


def shown() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for line in shell_lines(page.read_text("utf-8")):
            command = words(line)
            if len(command) > 1 and (PROGRAM.fullmatch(command[0]) or command[0] == "make"):
                found.append((page.name, command))
    return found


def parse(arguments: list[str]) -> None:
    """Let the command line read arguments without doing anything; raises `REFUSED` where it can't."""
    group: Any = typer.main.get_command(cli.app)
    top = group.context_class(group, info_name="draftsmith")
    if arguments[0].startswith("--"):
        group.make_context("draftsmith", arguments, resilient_parsing=True)
        return
    _, command, rest = group.resolve_command(top, arguments)
    if rest and rest != ["--help"]:  # a command may be named without what it needs
        command.make_context(arguments[0], rest, parent=top)


def test_commands_are_shown() -> None:
    """What the other tests look at is there."""
    pages = {page for page, _ in shown()}
    assert {"README.md", "planning.md", "data.md"} <= pages
    assert len(shown()) > 50


@pytest.mark.parametrize(("page", "command"), [(p, c) for p, c in shown() if c[0] != "make"])
def test_the_command_line_takes_what_is_shown(page: str, command: list[str]) -> None:
    try:
        parse(command[1:])
    except REFUSED as error:
        pytest.fail(f"{page} shows '{shlex.join(command)}': {error}")


@functools.cache
def made() -> list[tuple[str, list[str]]]:
    """The command lines behind what is shown of make, as `make -n` prints them."""
    found = []
    for page, command in shown():
        if command[0] != "make":
            continue
        done = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{page} shows '{shlex.join(command)}': {done.stderr}"
        lines = (words(line) for line in done.stdout.replace("\\\n", " ").splitlines())
        found += [(page, line) for line in lines if line and PROGRAM.fullmatch(line[0])]
    return found


def test_make_takes_what_is_shown() -> None:
    for _, command in made():
        parse(command[1:])


@pytest.fixture(scope="module")
def place(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands who did what comes before: trained and exported heads, and one from elsewhere."""
    place = tmp_path_factory.mktemp("reader")
    home = make_run(tmp_path_factory.mktemp("made"), tiny_target, Path(tiny_target.id))
    (home / REPORT).unlink()  # its figures aren't this head's
    for model in ("smollm2-135m", "Qwen3-8B"):
        shutil.copytree(home.parent, place / "runs" / model)
    shutil.copytree(home / "export" / "vllm", place / "their-eagle3")
    for model in ("model", "Qwen3-Next"):
        shutil.copytree(tiny_target.id, place / model)
    for name in ("conversations.jsonl", "mine.jsonl", "requests.jsonl"):
        (place / name).write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    return place


TARGET = {"export": "--model", "doctor": "--target", "push": "--target"}
"""The option that names the target, of commands that are really done."""
ELSEWHERE = {"--check", "--help"}
"""What needs a finished run's own figures (tests/test_plan.py has them), and what prints help."""


def doable(command: list[str], target: str) -> list[str]:
    """What to do of a command: with --dry-run where it has that, and with the target that is here; [] for none."""
    name, rest = command[1], command[2:]
    placeholder = any(re.search(r"(?<![\w=-])[A-Z]{3,}(?!\w*=)|\.\.\.", word) for word in rest)
    if command[0] == "make" or name.startswith("-") or placeholder or ELSEWHERE & set(rest):
        return []
    if not rest and "dry_run" not in COMMANDS[name][1]:  # it is only named
        return []
    if (option := TARGET.get(name)) is not None:
        if option in rest:
            rest[rest.index(option) + 1] = target
        elif name != "doctor":
            rest = [*rest, option, target]
    can_dry = {"dry_run", "push_dry_run"} & COMMANDS[name][1] and "--dry-run" not in rest
    return [name, *rest, *(["--dry-run"] if can_dry else [])]


def test_what_is_shown_is_done(place: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command with --dry-run is resolved down to the last setting, the others are done; capitals are left out."""
    monkeypatch.chdir(place)
    done: Counter[str] = Counter()
    wrong = []
    for page, command in [*shown(), *made()]:
        if not (arguments := doable(command, tiny_target.id)):
            continue
        result = CliRunner().invoke(cli.app, arguments)
        told = f"{page} shows '{shlex.join(command)}': {result.exception}: {result.output}"
        untrained = arguments[0] in TARGET and "hardly any draft is accepted" in told  # the head is random
        if result.exit_code and not untrained:
            wrong.append(told)
        done[arguments[0]] += 1
    assert not wrong, "\n".join(wrong)
    assert set(COMMANDS) - set(done) <= {"vocab", "collect"}
    assert done["export"] >= 3 <= done["doctor"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("tour --set nonsense=1", "nonsense"),
        ("tour --heads nosuch", "nosuch"),
        ("tour --recipe nosuch", "nosuch"),
        ("tune --tree chian:3", "chian:3"),
        ("load --tree chian:3", "chian:3"),
        ("load --replay missing.jsonl", "--replay missing.jsonl: there is no such file"),
        ("compare --prompts 2 --max-new-tokens 1", "--max-new-tokens 1 must be at least 2"),
        ("bench train nonsense=1", "nonsense"),
        ("generate hello --drafter plain --typical --temperature 1", "--typical accepts drafts"),
        ("serve-check --heads x", "No such option"),
    ],
)
def test_a_mistake_is_found_without_doing_anything(line: str, told: str) -> None:
    result = CliRunner().invoke(cli.app, [*line.split(), "--dry-run"])
    assert result.exit_code != 0
    assert told in f"{result.exception} {result.output}"


def test_what_nobody_takes_is_found() -> None:
    with pytest.raises(REFUSED, match="No such option"):
        parse(["run", "--nonsense"])
    with pytest.raises(REFUSED, match="No such command"):
        parse(["nonsense"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
