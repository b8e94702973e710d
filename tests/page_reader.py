"""A page as a strict reader sees it, without a browser: balanced tags, well-formed drawings, nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr"}
FOREIGN = {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base", "form"}


class Page(HTMLParser):
    """Reads a page and refuses what is wrong with it.

    Attributes:
        tags: (name, attributes) of every element, in order.
        drawings: every SVG, parsed as XML.
        words: the visible text, and that of drawings.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert text.startswith("<!doctype html>")
        assert self.open == [], "tags left open"
        self.drawings = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
        self.words = " ".join(self.said)
        self._refuse(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} stands there twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.said.append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        """Attributes of every element of a name."""
        return [attributes for tag, attributes in self.tags if tag == name]

    def _refuse(self, text: str) -> None:
        assert not {tag for tag, _ in self.tags} & FOREIGN
        elsewhere = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|url\(|@import|javascript:", elsewhere)
        assert not [name for _, attributes in self.tags for name in attributes if name.startswith("on")]
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        for drawing in self.drawings:
            assert drawing.get("role") == "img"
            assert drawing.get("aria-label") == drawing.findtext(f"{SVG}title")
            assert drawing.findtext(f"{SVG}desc")
            assert [*drawing.iter(f"{SVG}rect"), *drawing.iter(f"{SVG}polyline")], "an empty figure"
            _inside(drawing)


def _inside(drawing: ElementTree.Element) -> None:
    """Every mark and every text lies within the drawing's own edges."""
    _, _, width, height = map(float, (drawing.get("viewBox") or "").split())
    for mark in drawing.iter(f"{SVG}rect"):
        x, y, wide, high = (float(mark.get(name, "nan")) for name in ("x", "y", "width", "height"))
        assert min(x, y, wide, high) >= 0
        assert x + wide <= width + 0.1
        assert y + high <= height + 0.1
    for mark in drawing.iter(f"{SVG}circle"):
        assert 0 <= float(mark.get("cx", "nan")) <= width
        assert 0 <= float(mark.get("cy", "nan")) <= height
    for text in drawing.iter(f"{SVG}text"):
        x, y, wide = float(text.get("x", "nan")), float(text.get("y", "nan")), 5.2 * len(text.text or "")
        start = {"middle": x - wide / 2, "end": x - wide}.get(text.get("text-anchor", ""), x)
        assert start >= -1, f"{text.text!r} begins at {start:.0f}"
        assert start + wide <= width + 1, f"{text.text!r} ends at {start + wide:.0f} of {width:.0f}"
        assert 0 < y <= height
