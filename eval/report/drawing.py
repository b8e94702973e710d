"""What one answer looked like: a token tree with its accepted path, and a text by how each token came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..samples import BONUS, CORRECTED, DRAFTED, KINDS, PLAIN
from .charts import CHARACTER, TOP, short, svg
from .markup import said

MOST_NODES = 48
"""Nodes of a tree that are drawn beside the accepted path."""
TOKEN = 12
"""Characters of a token that are shown."""
COLUMN, ROW, BOX = 104, 22, 16
"""Pixels: from one depth to the next, from one branch to the next, and a node's height."""
DEEPEST_TINT = 6
"""Drafts of this depth and below look alike; their tips still differ."""
MEANINGS = {
    PLAIN: "not drafted: the prompt's pass, or a step without a draft",
    DRAFTED: "an accepted draft, darker the deeper it stood",
    CORRECTED: "the target's own token where the draft went another way",
    BONUS: "the target's own token behind a draft that was accepted whole",
}


def tree_drawing(title: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Draw a tree from its root on the left to its deepest nodes on the right.

    Args:
        nodes: of one tree: token (text), parent (index, -1 at the root), depth, accepted; parents come first.
    """
    kept = _kept(nodes)
    rows = _rows(nodes, kept)
    body = []
    for i in sorted(kept, key=lambda k: bool(nodes[k]["accepted"])):  # accepted edges lie on top
        if nodes[i]["parent"] >= 0:
            body.append(_edge(_place(nodes, rows, nodes[i]["parent"]), _place(nodes, rows, i), nodes[i]["accepted"]))
    body += [_node(nodes[i], *_place(nodes, rows, i)) for i in kept]
    width = 8 + COLUMN * (1 + max(nodes[i]["depth"] for i in kept))
    height = TOP + 12 + ROW * (1 + max(rows.values()))
    path = " ".join(repr(node["token"]) for node in nodes if node["accepted"])
    return svg(title, body, max(width, CHARACTER * len(title) * 1.2), height, f"{len(nodes)} nodes; accepted: {path}")


def left_out(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Nodes of a tree that its drawing has no room for."""
    return len(nodes) - len(_kept(nodes))


def _kept(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """The accepted path, and the first nodes there are: where a node is among them, so is its parent."""
    return [i for i, node in enumerate(nodes) if node["accepted"] or i < MOST_NODES]


def _rows(nodes: Sequence[Mapping[str, Any]], kept: Sequence[int]) -> dict[int, int]:
    """Line of each node: a first child stands on its parent's, every other one begins a new line below all so far."""
    rows: dict[int, int] = {}
    waiting, lines = [(kept[0], 0)], 1
    while waiting:
        node, row = waiting.pop()
        if row < 0:
            row, lines = lines, lines + 1
        rows[node] = row
        below = [i for i in kept if nodes[i]["parent"] == node]
        waiting += [(i, row if i == below[0] else -1) for i in reversed(below)]
    return rows


def _place(nodes: Sequence[Mapping[str, Any]], rows: Mapping[int, int], i: int) -> tuple[float, float]:
    """Left end and middle of a node's box."""
    return 4.0 + COLUMN * nodes[i]["depth"], TOP + 14.0 + ROW * rows[i]


def _edge(start: tuple[float, float], end: tuple[float, float], accepted: bool) -> str:
    x, bend = start[0] + COLUMN - 16, end[0] - 6
    path = f"M{x:.0f} {start[1]:.0f}C{bend:.0f} {start[1]:.0f} {x:.0f} {end[1]:.0f} {end[0]:.0f} {end[1]:.0f}"
    return f'<path d="{path}" class="{"path" if accepted else "branch"}"/>'


def _node(node: Mapping[str, Any], x: float, y: float) -> str:
    name = "root" if node["depth"] == 0 else f"depth {node['depth']}, {'accepted' if node['accepted'] else 'refused'}"
    kind = "kept" if node["accepted"] else "lost"
    return (
        f'<g class="{kind}"><title>{said(repr(node["token"]))}: {name}</title>'
        f'<rect x="{x:.0f}" y="{y - BOX / 2:.0f}" width="{COLUMN - 16}" height="{BOX}" rx="3"/>'
        f'<text x="{x + 5:.0f}" y="{y + 4:.0f}">{said(visible(node["token"]))}</text></g>'
    )


def visible(token: str) -> str:
    """A token as a label: blanks and line ends can be seen, and it is short."""
    shown = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return short("".join(c if c.isprintable() else "�" for c in shown), TOKEN)


def coloured_text(pieces: Sequence[Mapping[str, Any]]) -> str:
    """An answer whose tokens show how they came: by colour, by the line below them, and in words as a tip."""
    return f'<pre class="answer">{"".join(_piece(piece) for piece in pieces)}</pre>'


def legend(pieces: Sequence[Mapping[str, Any]]) -> str:
    """What the looks mean, and how many pieces of these texts have them; tokens without a text make no piece."""
    counts = Counter(piece["kind"] for piece in pieces)
    total = len(pieces)
    lines = [
        f'<li><span class="{kind}{" d2" if kind == DRAFTED else ""}">{kind}</span> '
        f"{said(MEANINGS[kind])}: {counts[kind]} of {total} pieces of text ({counts[kind] / total:.0%})</li>"
        for kind in KINDS
    ]
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _piece(piece: Mapping[str, Any]) -> str:
    kind, depth = piece["kind"], piece["depth"]
    looks = f"{kind} d{min(depth, DEEPEST_TINT)}" if kind == DRAFTED else kind
    told = f"{kind}, depth {depth}" if kind == DRAFTED else kind
    return f'<span class="{looks}" title="{told}">{said(piece["text"])}</span>'
