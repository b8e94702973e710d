"""Pieces of a page: safe text, tables in boxes of their own, parts that open on demand."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import PurePath
from unicodedata import category

_UNFIT = ("Cc", "Cs", "Cn")
"""Unicode's categories of control characters, of halves of surrogate pairs, and of what is no character."""


def fit(text: object) -> str:
    """Any text without what neither a page nor a terminal can show: control characters, halves of pairs."""
    return "".join(c if c in "\n\t" or category(c) not in _UNFIT else "�" for c in str(text))


def said(text: object) -> str:
    """Any text for a page or a drawing; quotation marks are escaped, too: it may stand in an attribute."""
    return html.escape(fit(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str = "table") -> str:
    """A table that scrolls within its own box where the page is narrow.

    Args:
        head: titles of the columns; all empty for a list of facts, whose texts are broken where they are long.
        name: what the box is called where it isn't seen.
    """
    top = "".join(f'<th scope="col">{said(h)}</th>' for h in head)
    lines = ["".join(_cell(text, number=i > 0) for i, text in enumerate(row)) for row in rows]
    start = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    box = f'<div class="scroll" role="group" aria-label="{said(name)}" tabindex="0">'
    kind = "" if any(head) else ' class="facts"'
    return f"{box}<table{kind}>{start}<tbody>{body}</tbody></table></div>"


def model_name(target: str) -> str:
    """What a target is called where others read it: its hub id, or of a folder's path the last part."""
    path = PurePath(target)
    return path.name if path.is_absolute() else target


def opened_on_demand(summary: str, body: str) -> str:
    """A part that shows its name alone until it is clicked."""
    return f"<details><summary>{said(summary)}</summary>{body}</details>"


def _cell(text: str, number: bool) -> str:
    return f'<td class="n">{said(text)}</td>' if number else f"<td>{said(text)}</td>"
