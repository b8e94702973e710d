"""Ways to draft by name, as a user asks for them: one table, from which command line and evaluation build drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from ..errors import DraftsmithError
from ..heads.formats.load import load_any
from ..heads.resolve import require_reachable, resolve_target
from ..heads.target import Target
from .decoder.drafters import make_drafter
from .decoder.drafters.draft_model import DraftModelDrafter
from .decoder.drafters.lookahead import LookaheadDrafter
from .decoder.drafters.plain import PlainDrafter
from .decoder.drafters.prompt_lookup import PromptLookupDrafter
from .decoder.drafters.union import UnionDrafter
from .decoder.search import Shape, parse_shape
from .decoder.trees import OwnTree, shape_for
from .decoder.types import Drafter

DEFAULT_DEPTH = 4
"""K of the chain that is drafted where nobody says anything; less where a head drafts less."""
DEFAULT_TREE = f"chain:{DEFAULT_DEPTH}"


def default_tree(most_depth: int | None) -> str:
    """Text of the chain that a head drafts where nobody says anything, which drafts `most_depth` tokens at most."""
    return f"chain:{min(DEFAULT_DEPTH, most_depth or DEFAULT_DEPTH)}"


def read_tree(text: str, checkpoint: Path | None) -> Shape:
    """Read a tree for the head in a checkpoint folder, or for a drafter without one.

    Raises:
        DraftsmithError: the text can't be read, or asks for a tree that was measured for a head where there is none.
    """
    if checkpoint is not None:
        return shape_for(text, checkpoint)
    if OwnTree.parse(text) is not None:
        raise DraftsmithError(f"the tree {text!r} is one that was measured for a trained head: it goes with a head")
    return parse_shape(text)


@dataclass(frozen=True)
class SchemeOptions:
    """What a scheme may be given; None (or False) where nothing was said.

    Attributes:
        head: checkpoint folder of a trained head, in any layout that can be read.
        draft_model: short name, hub id or folder of a small model with the target's tokenizer.
        tree: shape of the drafted trees, see `decoder.trees.shape_for`.
        with_prompt_lookup: add what Prompt Lookup finds to every tree.
    """

    head: Path | None = None
    draft_model: str | None = None
    tree: str | None = None
    with_prompt_lookup: bool = False

    def given(self) -> set[str]:
        """Names of the options that were said."""
        return {f.name for f in fields(self) if getattr(self, f.name)}

    def shape(self) -> Shape:
        """The drafted trees' shape."""
        return read_tree(self.tree or DEFAULT_TREE, self.head)


@dataclass(frozen=True)
class Scheme:
    """One way to draft.

    Attributes:
        build: makes the drafter.
        takes: options that mean something to it.
        needs: the one that it can't do without.
    """

    build: Callable[[Target, SchemeOptions], Drafter]
    takes: frozenset[str] = frozenset()
    needs: str | None = None


def _with_head(target: Target, options: SchemeOptions) -> Drafter:
    assert options.head is not None
    head = load_any(options.head, target)
    tree = options.tree or default_tree(head.most_depth)
    return make_drafter(head, target.parts(), read_tree(tree, options.head))


def _with_draft_model(target: Target, options: SchemeOptions) -> Drafter:
    assert options.draft_model is not None
    shape = options.shape()  # a tree that can't be read is said before anything is loaded
    return DraftModelDrafter(target, load_model(options.draft_model, like=target), shape)


def load_model(name: str, like: Target | None = None, adapter: Path | None = None) -> Target:
    """Load what a user calls `name` (see `resolve_target`).

    Args:
        like: on its device and in its dtype.
        adapter: folder of an adapter to merge into its weights, see `trained.Trained.adapter`.
    """
    source = require_reachable(resolve_target(name))
    revision = None if source.is_local else source.revision
    if like is None:
        return Target.load(source.location, revision=revision, adapter=adapter)
    device = str(like.device)
    return Target.load(source.location, revision=revision, dtype=like.dtype, device=device, adapter=adapter)


SCHEMES: dict[str, Scheme] = {
    "plain": Scheme(lambda target, options: PlainDrafter()),
    "prompt-lookup": Scheme(lambda target, options: PromptLookupDrafter()),
    "lookahead": Scheme(lambda target, options: LookaheadDrafter(), frozenset({"with_prompt_lookup"})),
    "draft-model": Scheme(_with_draft_model, frozenset({"draft_model", "tree", "with_prompt_lookup"}), "draft_model"),
    "head": Scheme(_with_head, frozenset({"head", "tree", "with_prompt_lookup"}), "head"),
}


def check_options(name: str, options: SchemeOptions) -> None:
    """Refuse an unknown scheme, and options that it does not take or lacks; loads nothing.

    Raises:
        DraftsmithError: names the option and the schemes that take it.
    """
    if name not in SCHEMES:
        raise DraftsmithError(f"there is no drafter {name!r}; there are: {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    for option in sorted(options.given() - scheme.takes):
        others = " or ".join(n for n, s in SCHEMES.items() if option in s.takes)
        raise DraftsmithError(f"{_flag(option)} goes with --drafter {others}, not with {name!r}: leave one of them out")
    if scheme.needs and scheme.needs not in options.given():
        raise DraftsmithError(f"--drafter {name} needs {_flag(scheme.needs)}")
    if "tree" in scheme.takes:
        options.shape()


def build_drafter(name: str, target: Target, options: SchemeOptions) -> Drafter:
    """Make the drafter called `name`.

    Raises:
        DraftsmithError: see `check_options`; a head or draft model that doesn't fit the target.
    """
    check_options(name, options)
    drafter = SCHEMES[name].build(target, options)
    return UnionDrafter(drafter, PromptLookupDrafter()) if options.with_prompt_lookup else drafter


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
