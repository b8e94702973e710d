"""docs/engines.md, made of the contracts; a test holds the file equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..named import head_names
from .contracts import Contract, contract, engines, serve_settings
from .export_layouts import Layout, Row, layout, layout_names

_INTRO = """\
# Engines

<!-- made by heads/formats/contracts_page.py of configs/engines/: change those, not this page -->

What each engine loads of each head, and how it is told. `draftsmith export RUN --engine ENGINE` writes these folders,
`draftsmith doctor DIR` checks them, and every one of them can be read back: an export gives the very logits of the head
that it was made of, in the export's dtype.

"config only" marks what was written by an engine's sources and documents and not run here; the others were run on a
CPU. Every export holds a `draftsmith.json`, which says what its layout has no place for; engines ignore it. A folder of
a layout that several engines have in common serves all of them unchanged within their limits; `serves` in
draftsmith.json names them.
"""
_SYMBOLS = """\
In shapes, H is the hidden size, I the width of the MLP, Q and KV the numbers of a head times query or key-value heads,
V the target's tokens, Vd the draft's, and K the states that are joined; `steps` and `blocks` are Medusa's heads and
their residual blocks. In values, `$name` is taken from the head's config (`$layer_outputs` are layer ids less 1) and
`$name?` is left out where nothing is known. "weights" are stored in the export's dtype. A tensor is written where the
last column says what it holds.
"""
_CONDITIONS = {"reduced": "Vd < V", "fc_norm": "EAGLE-3.1"}
"""Facts on which a tensor depends, as the page says them."""
_MADE = {
    "d2t": "target id = draft id + d2t[draft id]",
    "t2d": "which of the target's tokens are in the draft vocabulary",
    "embed": "the target's embedding",
}
_DEPTH, _TOPK, _NODES = 3, 4, 8


def contracts_page() -> str:
    """The page's whole text."""
    parts = [_INTRO, _overview(), *(_engine(name) for name in engines()), "## Layouts\n", _SYMBOLS]
    text = "\n".join([*parts, *(_layout(layout(name)) for name in layout_names())])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _overview() -> str:
    names = engines()
    titles = [contract(name, head_names()[0]).title for name in names]

    def cell(one: Contract) -> str:
        return f"`{one.layout.name}`" + ("" if one.checked else ", config only") if one.supported else "–"

    rows = [[f"`{head}`", *(cell(contract(name, head)) for name in names)] for head in head_names()]
    return "Layout of each head, by engine:\n\n" + _table(["", *titles], rows)


def _engine(name: str) -> str:
    """One engine: how each head is served there, and why others aren't."""
    found = [contract(name, head) for head in head_names()]
    served = [one for one in found if one.supported]
    common = [text for text in served[0].constraints if all(text in one.constraints for one in served)]
    title = found[0].title
    lines = [f"## {title}\n", f"`--engine {name}`; {found[0].versions}.\n", *(f"- {text}" for text in common)]
    lines += [
        f"- Run here: {heads} by {how}." for how, heads in _grouped((str(x.checked), x) for x in served if x.checked)
    ]
    texts = ((_served(x, common, "" if x.versions == found[0].versions else f"; {x.versions}"), x) for x in served)
    for text, heads in _grouped(texts):
        lines += [f"\n### {title}: {heads}\n", text]
    if missing := [one for one in found if not one.supported]:
        lines += [f"### {title}: unsupported\n"]
        lines += [f"- {heads}: {reason}." for reason, heads in _grouped((str(x.reason), x) for x in missing)]
    return "\n".join([*lines, ""])


def _grouped(pairs: Iterable[tuple[str, Contract]]) -> list[tuple[str, str]]:
    """Texts with the heads that share each."""
    groups: dict[str, list[str]] = {}
    for text, one in pairs:
        groups.setdefault(text, []).append(f"`{one.head}`")
    return [(text, ", ".join(heads)) for text, heads in groups.items()]


def _served(one: Contract, common: list[str], versions: str) -> str:
    """How a head is served with a chain, and with a tree where that can be."""
    place: dict[str, Any] = {"folder": "FOLDER", "model": "MODEL"}
    ids = [2, 18, 33] if one.layout.name == "eagle3" else None
    chain = serve_settings(one.engine, one.head, depth=_DEPTH, layer_ids=ids, **place)
    commands = list(chain.commands)
    if "tree" in one.shapes:
        tree = serve_settings(one.engine, one.head, depth=_DEPTH, topk=_TOPK, nodes=_NODES, layer_ids=ids, **place)
        commands += [f"# a tree of {_NODES} nodes, {_TOPK} children each", *tree.commands]
    lines = [f"Layout `{one.layout.name}`{versions}.\n", _code("bash", commands)]
    if chain.python is not None:
        lines.append(_code("python", chain.python.rstrip().splitlines()))
    limits = [f"- `{limit.fact}` must be {_one_of(limit.only)}: {limit.because}." for limit in one.limits]
    left_out = {*common, *one.layout.notes}
    rest = [f"- {text}" for text in [*one.constraints, *one.notes] if text not in left_out]
    return "\n".join([*lines, *limits, *rest, ""])


def _one_of(values: Iterable[object]) -> str:
    return " or ".join(json.dumps(value) for value in values)


def _code(language: str, lines: Iterable[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```", ""])


def _layout(one: Layout) -> str:
    lines = [f"### `{one.name}`\n", f"{one.title[0].upper()}{one.title[1:]}.\n"]
    if one.native:
        return "\n".join([*lines, *(f"- {note}" for note in one.notes), ""])
    lines += [
        f"`config.json`, `{one.weights}`.\n",
        _code("json", json.dumps(one.config, indent=1).splitlines()),
        _table(["tensor", "shape", "dtype", "need", "holds"], [_row(row) for row in one.rows]),
        *(f"- {note}" for note in one.notes),
        "",
    ]
    return "\n".join(lines)


def _row(row: Row) -> list[str]:
    need = row.need + (f" where {_CONDITIONS[row.when]}" if row.when else "")
    holds = f"`{row.source}`" if row.source else _MADE.get(row.make or "", "")
    if row.make == "or_zeros":
        holds += ", or zeros"
    if row.make == "full_rows":
        holds += ", and their mean for tokens outside the draft vocabulary"
    return [f"`{row.name}`", f"[{', '.join(row.shape)}]", row.dtype, need, holds]


__all__ = ["contracts_page"]
