"""What the page that a conversation was copied from has left in a turn, and the text that it stands for.

Only what is certain is converted; HTML that is the subject stays. Certain is

- a turn that is as a whole the element in which a chat page shows it: `<div class="markdown prose …">`;
- an answer that is as a whole block elements of running text (`<p>`, `<ol>`, …; no attributes but links'), its tags
  balanced, where nobody speaks of markup;
- outside code fences, escapes in a turn whose apostrophes or quotation marks are escaped (`I&#39;m`) and that has no
  `<` or `>` of its own, where nobody speaks of markup;
- the button "Copy code" on or behind the line that names a block's language.

The page's counter ("1 / 2") and its buttons go with the first. What would still look like markup afterwards stays as it
was, because then the markup is the subject.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BLOCKS = frozenset(("p", "ul", "ol", "pre", "blockquote", "table", "hr", *_HEADINGS))
_WITHIN = frozenset(("li", "thead", "tbody", "tr", "th", "td", "strong", "b", "em", "i", "del", "a", "code", "br"))
_OF_PAGES = frozenset(("div", "span", "button", "svg", "img", "sup"))
_DROPPED = frozenset(("button", "svg"))
_VOID = frozenset(("br", "hr", "img"))
_HOLDS_BLOCKS = frozenset(("", "div", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr"))
_HOLDS_BOTH = frozenset(("div", "li", "blockquote"))  # blocks, or the words of one
_ODD_TAG = re.compile(r"<(?![^<>]{1,5000}>)")  # the parser takes quadratic time for tags that never close
_DEEPEST = 50
_MARKS = {"strong": "**", "b": "**", "em": "*", "i": "*", "del": "~~"}
_PLAIN_ATTRIBUTES = frozenset(("href", "target", "rel", "start"))
_PAGE_ELEMENT = re.compile(r'<div class="[^"]*\b(?:markdown|prose|whitespace-pre-wrap)\b')
_COUNTER = re.compile(r"\s*\d{1,2} / \d{1,2}\s*")
_LANGUAGE = re.compile(r"\blang(?:uage)?-([\w+#.-]+)")
_FENCED = re.compile(r"(```.*?(?:```|\Z))", re.DOTALL)
_NAMES = (
    "python|bash|shell|sh|powershell|javascript|js|jsx|typescript|ts|tsx|html|css|scss|java|kotlin|swift|scala|c|cpp|"
    r"c\+\+|csharp|c#|go|rust|ruby|php|perl|lua|r|matlab|sql|graphql|json|yaml|xml|ini|diff|makefile|dockerfile|vbnet|"
    "arduino|markdown|latex|plaintext|text|haskell|dart"
)
_BUTTON = re.compile(rf"(?m)^(```[\w+#.-]*|(?i:{_NAMES}))(?:[ \t]*\n[ \t]*)?Copy code[ \t]*(?:\n|\Z)")
_ESCAPED = re.compile(r"\w&#(?:0?39|x27);\w|&quot;[^&\"]+&quot;")
_ABOUT_MARKUP = re.compile(
    r"html|xml|css|markup|web ?page|web ?site|\btags?\b|template|wordpress|react|vue|svg|escap|entit|encod|quot"
    "|</?[a-z]",
    re.IGNORECASE,
)


def about_markup(text: str) -> bool:
    """Whether what is said may be about markup, so that the markup in an answer may be what was asked for."""
    return _ABOUT_MARKUP.search(text) is not None


def may_hold_markup(text: str) -> bool:
    """Whether a turn is worth a closer look: quick, and false for nearly all."""
    return _holds_quotes(text) or "Copy code" in text or text.lstrip()[:1] == "<"


def plain_text(text: str, answer: bool, subject: Callable[[], bool]) -> str:
    """Return a turn without what is certainly left of its page.

    Args:
        text: the turn.
        answer: whether it is the assistant's.
        subject: says whether the conversation may be about markup; asked only where it matters.
    """
    if "Copy code" in text:
        text = _BUTTON.sub(r"\1\n", text)
    if text.lstrip()[:1] == "<":
        page = _PAGE_ELEMENT.match(text.lstrip()) is not None
        if page or (answer and not subject()):
            text = _settled(text, lambda turn: _from_elements(turn, page))
    if _is_escaped(text) and not subject():
        text = _settled(text, _unescaped)
    return text


def _settled(text: str, convert: Callable[[str], str | None]) -> str:
    """Convert a text unless it can't be, or the result could be converted again."""
    converted = convert(text)
    if (
        converted is None
        or converted == text
        or _is_escaped(converted)
        or _from_elements(converted, page=True) is not None
    ):
        return text
    return converted


def _holds_quotes(text: str) -> bool:
    return "&" in text and any(quote in text for quote in ("&#39;", "&#039;", "&#x27;", "&quot;"))


def _is_escaped(text: str) -> bool:
    if not _holds_quotes(text):
        return False
    outside = "\n".join(_FENCED.split(text)[::2])
    return "<" not in outside and ">" not in outside and _ESCAPED.search(outside) is not None


def _unescaped(text: str) -> str:
    return _outside_fences(text, html.unescape)


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if i % 2 else change(part) for i, part in enumerate(_FENCED.split(text)))


def _from_elements(text: str, page: bool) -> str | None:
    """Return the Markdown of a turn that is elements as a whole; None where it is anything else."""
    if text.lstrip()[:1] != "<" or _ODD_TAG.search(text):
        return None
    reader = _Reader(page)
    try:
        reader.feed(text)
        reader.close()
    except AssertionError:  # the standard library's parser at "<![" that opens nothing it knows
        return None
    if not reader.certain or len(reader.open) > 1:
        return None
    return _outside_fences(reader.open[0].text, lambda part: re.sub(r"\n{3,}", "\n\n", part)).strip()


@dataclass
class _Element:
    tag: str
    attributes: Mapping[str, str | None] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    rows: int = 0  # of a list or table: how many are rendered
    code: str | None = None  # of a <pre>: the code in it, beside which stand the page's buttons

    @property
    def text(self) -> str:
        return "".join(self.parts)


class _Reader(HTMLParser):
    """Renders elements as Markdown, and notices whatever is not of a page that shows running text.

    Attributes:
        certain: nothing of that kind so far.
        open: the elements that are not closed yet, below a root without a tag.
    """

    def __init__(self, page: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.page = page
        self.certain = True
        self.open = [_Element("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        if not self.certain or len(self.open) > _DEEPEST:
            self.certain = False
            return
        if not self._inside(_DROPPED):
            known = tag in _BLOCKS or (self.page and tag in _OF_PAGES) or (tag in _WITHIN and len(self.open) > 1)
            plain = self.page or all(name in _PLAIN_ATTRIBUTES or tag in ("pre", "code") for name, _ in attrs)
            self.certain = self.certain and known and plain
        self.open.append(_Element(tag, dict(attrs)))
        if tag in _VOID:
            self._close()

    def handle_endtag(self, tag: str) -> None:
        """Close an element; it must be the one that was opened last."""
        if tag == self.open[-1].tag:
            self._close()
        else:
            self.certain = False

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open and close an element."""
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        """Take text; outside of all elements only the page's counter may stand."""
        top = self.open[-1]
        if top.tag in _HOLDS_BLOCKS and not data.strip() and (top.tag not in _HOLDS_BOTH or "\n" in data):
            return
        if len(self.open) == 1 or (self.page and _COUNTER.fullmatch(data) and top.tag in ("div", "span")):
            self.certain = self.certain and self.page and _COUNTER.fullmatch(data) is not None
            return
        top.parts.append(data)

    def handle_comment(self, data: str) -> None:
        """Notice a comment."""
        self.certain = False

    def handle_decl(self, decl: str) -> None:
        """Notice a declaration: a whole document."""
        self.certain = False

    def unknown_decl(self, data: str) -> None:
        """Notice a marked section: XML."""
        self.certain = False

    def handle_pi(self, data: str) -> None:
        """Notice a processing instruction: XML or PHP."""
        self.certain = False

    def _inside(self, tags: frozenset[str]) -> bool:
        return any(element.tag in tags for element in self.open)

    def _close(self) -> None:
        element = self.open.pop()
        pre = next((e for e in reversed(self.open) if e.tag == "pre"), None)
        if element.tag == "code" and pre is not None:
            language = _LANGUAGE.search(element.attributes.get("class") or pre.attributes.get("class") or "")
            self.certain = self.certain and pre.code is None
            pre.code = f"{language[1] if language else ''}\n{element.text.rstrip()}"
        elif not self._inside(_DROPPED):
            self.open[-1].parts.append(_rendered(element, self.open))


def _rendered(element: _Element, around: list[_Element]) -> str:
    """Return an element's Markdown."""
    tag, text = element.tag, element.text
    if tag in _DROPPED or tag == "img":
        return ""
    if tag in ("td", "th"):
        return f"| {text.strip()} "
    if tag == "tr":
        table = next((e for e in reversed(around) if e.tag == "table"), around[-1])
        table.rows += 1
        return f"{text}|\n" + ("|---" * text.count("| ") + "|\n" if table.rows == 1 else "")
    if tag == "li":
        around[-1].rows += 1
        start = around[-1].attributes.get("start") or ""
        number = (int(start) if re.fullmatch("[0-9]{1,9}", start) else 1) + around[-1].rows - 1
        mark = f"{number}. " if around[-1].tag == "ol" else "- "
        lines = _outside_fences(text.strip(), lambda part: re.sub(r"\n{2,}", "\n", part)).split("\n")
        return mark + ("\n" + " " * len(mark)).join(lines) + "\n"
    if tag == "a":
        href = element.attributes.get("href") or ""
        return f"[{text}]({href})" if href.startswith("http") and href != text else text
    if tag == "pre":
        return f"\n\n```{element.code if element.code is not None else chr(10) + text.strip(chr(10))}\n```\n\n"
    if tag == "blockquote":
        text = "> " + re.sub(r"\n+", "\n> ", text.strip())
    if tag in _HEADINGS:
        text = "#" * int(tag[1]) + " " + text.strip()
    inline = {
        "br": "\n",
        "hr": "\n\n---\n\n",
        "code": f"`{text}`",
        "span": text,
        "sup": text,
        "thead": text,
        "tbody": text,
    }
    if tag in inline:
        return inline[tag]
    if tag in _MARKS:
        return f"{_MARKS[tag]}{text}{_MARKS[tag]}" if text.strip() else text
    return f"\n\n{text.strip()}\n\n"
