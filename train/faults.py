"""What isn't finite: steps that are left out, the documents that did it, and when it is too much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import DraftsmithError
from .checkpoint import RunState

MAX_SKIPPED = 3
"""Documents, or steps in a row, that may be left out; one more stops the run."""


def note_left_out(state: RunState, documents: Iterable[str], in_a_row: int) -> str:
    """Note a left-out step; returns what to tell the user.

    A document is met once an epoch, each time among others. A step that shares documents with an earlier one has its
    cause, so that a cause's documents become fewer; other steps are a cause of their own.

    Args:
        documents: ids of the step's that are suspected.
        in_a_row: left-out steps without a good one between them, this one included.

    Raises:
        DraftsmithError: too many causes, or too many steps in a row.
    """
    names = sorted(set(documents))
    state.skipped += 1
    for i, suspects in enumerate(state.suspects):
        if common := sorted(set(suspects) & set(names)):
            state.suspects[i] = common
            break
    else:
        state.suspects.append(names)
    message = f"step {state.step}: loss or gradient not finite on documents {shown(names)}"
    causes = len(state.suspects)
    if causes > MAX_SKIPPED or in_a_row > MAX_SKIPPED:
        much = f"steps of {causes} different documents" if causes > MAX_SKIPPED else f"{in_a_row} steps in a row"
        suspected = shown([" or ".join(x[:4]) for x in state.suspects])
        raise DraftsmithError(
            f"{message}; {much} were left out, more than {MAX_SKIPPED}: lower train.lr_matrix, or look at those "
            f"documents; suspected so far: {suspected}"
        )
    return f"{message}; the step is left out ({state.skipped} so far, for {causes} of at most {MAX_SKIPPED} documents)"


def name_unmeasured(documents: Iterable[str], known: set[str]) -> str | None:
    """What to tell of held-out documents whose figures aren't finite, None where all are known (as they then are)."""
    new = sorted(set(documents) - known)
    known.update(new)
    return f"validation leaves out documents whose figures aren't finite: {shown(new)}" if new else None


def shown(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


__all__ = ["MAX_SKIPPED", "name_unmeasured", "note_left_out", "shown"]
