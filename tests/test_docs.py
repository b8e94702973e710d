"""Every command that README and docs show is one that the command line takes; every link leads somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from draftsmith import cli
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


def test_make_takes_what_is_shown() -> None:
    """All at once: `make -n` prints what would be done, and the command line reads it."""
    for page, command in shown():
        if command[0] != "make":
            continue
        done = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{page} shows '{shlex.join(command)}': {done.stderr}"
        for line in done.stdout.splitlines():
            found = words(line)
            if found and PROGRAM.fullmatch(found[0]):
                parse(found[1:])


def test_the_configuration_behind_it_resolves() -> None:
    """What is shown of commands with --dry-run is resolved, down to the last setting; capitals stand for something."""
    resolved = 0
    for page, command in shown():
        name, rest = command[1], command[2:]
        if command[0] == "make" or "dry_run" not in COMMANDS.get(name, ("", set()))[1] or name == "push":
            continue
        if "--help" in rest or any(re.search(r"(?<![\w=-])[A-Z]{3,}(?!\w*=)", word) for word in rest):
            continue
        done = CliRunner().invoke(cli.app, [name, *rest, "--dry-run"])
        assert done.exit_code == 0, f"{page} shows '{shlex.join(command)}': {done.exception or done.output}"
        resolved += 1
    assert resolved > 10


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
