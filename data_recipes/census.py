"""Counts of what became of a source's records: kept, changed, left out, malformed; by reason, with places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from ..errors import DraftsmithError

_EXAMPLES = 3
_REASONS = 100
_OTHER = "other reasons"


@dataclass
class Tally:
    """How often something happened, and the first places ("file:line") where it did."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, where: list[str], count: int = 1) -> None:
        """Count `count` more, which happened at `where` (or more places than those)."""
        self.count += count
        self.examples += where[: _EXAMPLES - len(self.examples)]


Tallies = dict[str, Tally]
"""By reason: a short text with at most one bounded part that varies, never a record's content."""


class Census:
    """What became of the records of one source, or of one chunk of it.

    Attributes:
        read: records read.
        kept: of these, the ones that came through.
        changed: of those kept, what was changed, by reason; one record may count under several reasons.
        malformed: records that can't be used, by reason. They count against the cap.
        left_out: records that are fine but not wanted (duplicates, too long), by reason. They never count against it.
        revision: the commit of a dataset on the hub.
    """

    def __init__(self) -> None:
        self.read = 0
        self.kept = 0
        self.changed: Tallies = {}
        self.malformed: Tallies = {}
        self.left_out: Tallies = {}
        self.revision: str | None = None

    def keep(self) -> None:
        """Count one record that came through."""
        self.kept += 1

    def change(self, where: str, reason: str) -> None:
        """Count one record that was changed and kept."""
        _tally(self.changed, reason).add([where])

    def refuse(self, where: str, reason: str) -> None:
        """Count one malformed record."""
        _tally(self.malformed, reason).add([where])

    def leave_out(self, where: str, reason: str) -> None:
        """Count one record that is left out on purpose."""
        _tally(self.left_out, reason).add([where])

    def check(self, source: str, cap: float) -> None:
        """Raise a `DraftsmithError` where more than the share `cap` of the records read is malformed."""
        bad = sum(tally.count for tally in self.malformed.values())
        if bad > cap * self.read:
            raise DraftsmithError(
                f"{source}: {bad} of {self.read} records are malformed, more than the cap of {cap:.0%} "
                f"({'; '.join(_lines(self.malformed))}): mend them, or raise prepare.malformed_cap"
            )

    def lines(self) -> list[str]:
        """One text a reason, malformed first, the commonest first: `malformed: 12 × no user turn (a.jsonl:3, …)`."""
        return [f"{kind}: {line}" for kind, tallies in self._kinds() for line in _lines(tallies)]

    def merge(self, other: Census) -> None:
        """Add the counts of records that were read after these.

        Raises:
            DraftsmithError: the two are of different commits of a dataset.
        """
        if self.revision and other.revision and self.revision != other.revision:
            raise DraftsmithError(
                f"counts of commit {other.revision} can't be added to those of {self.revision}: prepare the data again"
            )
        self.revision = self.revision or other.revision
        self.read += other.read
        self.kept += other.kept
        for (_, mine), (_, others) in zip(self._kinds(), other._kinds(), strict=True):
            for reason, tally in others.items():
                _tally(mine, reason).add(tally.examples, tally.count)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form for a manifest's record; the same counts give the same text."""
        return {
            "records": self.read,
            "kept": self.kept,
            "revision": self.revision,
            **{
                kind.replace(" ", "_"): {
                    reason: {"count": tally.count, "examples": list(tally.examples)}
                    for reason, tally in sorted(tallies.items())
                }
                for kind, tallies in self._kinds()
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `to_dict` gave."""
        census = cls()
        census.read, census.kept, census.revision = values["records"], values["kept"], values["revision"]
        for kind, tallies in census._kinds():
            for reason, tally in values[kind.replace(" ", "_")].items():
                tallies[reason] = Tally(tally["count"], list(tally["examples"]))
        return census

    def _kinds(self) -> list[tuple[str, Tallies]]:
        return [("malformed", self.malformed), ("left out", self.left_out), ("changed", self.changed)]


def _tally(tallies: Tallies, reason: str) -> Tally:
    """Return the reason's tally; records that are each wrong in their own way share one, so that memory is bounded."""
    if reason not in tallies and len(tallies) >= _REASONS:
        reason = _OTHER
    return tallies.setdefault(reason, Tally())


def _lines(tallies: Tallies) -> list[str]:
    return [
        f"{tally.count} × {reason} ({', '.join(tally.examples)}{', …' if tally.count > _EXAMPLES else ''})"
        for reason, tally in sorted(tallies.items(), key=lambda item: (-item[1].count, item[0]))
    ]
