"""Is a head worse than an earlier report says? Judged on the answers that both reports hold, prompt by prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DraftsmithError
from .metrics import Interval, bootstrap
from .report.content import SCHEMA

RULE = (
    "worse = the whole 95 % interval of the change, questions resampled in pairs, lies below 0; a speed-up must also "
    "lie below the earlier interval, as the clock differs between two processes"
)
LEAST = 6
"""Fewest questions of which a change can be told: of five, all may fall by chance (1 in 32, more than 2.5 %)."""
_MACHINE = ("processor", "device", "cpus", "threads", "system")
_Key = tuple[str, str, int, str]
"""Benchmark, question, turn, and the hash of the prompt's tokens and the answer's length."""
_Rows = NDArray[np.float64]
"""[Q, F]: sums of a question's answers, see `_series`; those of the earlier report stand behind the new ones."""
_PLAIN_TOKENS, _PLAIN_SECONDS, _TOKENS, _SECONDS, _STEPS = range(5)
_WIDTH = 5


@dataclass(frozen=True)
class Change:
    """One figure on the shared prompts.

    Attributes:
        name: of the figure: "tau" or "speedup".
        what: the tree and temperature that it is of.
        change: now - before, and its 95 % interval.
        judged: whether it can be told from these two reports at all.
        worse: whether it has fallen below the noise; see RULE.
    """

    name: str
    what: str
    now: float
    before: float
    change: float
    change_ci: Interval
    judged: bool
    worse: bool


@dataclass(frozen=True)
class Against:
    """A report beside an earlier one.

    Attributes:
        path: of the earlier one.
        n_prompts: greedy answers in both.
        failed: the output check failed now and had passed before.
        notes: what differs between the reports, and what is therefore not judged.
    """

    path: str
    n_prompts: int
    changes: list[Change]
    notes: list[str]
    failed: bool

    @property
    def worse(self) -> bool:
        """Whether anything has become worse."""
        return self.failed or any(change.worse for change in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "worse": self.worse, "rule": RULE}

    def lines(self) -> list[str]:
        """For people."""
        found = [f"against {self.path}, {self.n_prompts} answers in both:"]
        for c in self.changes:
            verdict = "worse" if c.worse else "within the noise or better" if c.judged else "not judged"
            found.append(
                f"  {c.name.replace('tau', 'τ').replace('speedup', 'speed-up')}, {c.what}: {c.now:.3f} now, "
                f"{c.before:.3f} before, {c.change:+.3f} [{c.change_ci[0]:+.3f}, {c.change_ci[1]:+.3f}]: {verdict}"
            )
        return [*found, *(f"  note: {note}" for note in self.notes), f"  {RULE}"]


def read_earlier(path: Path) -> dict[str, Any]:
    """Read a report to compare with.

    Raises:
        DraftsmithError: it can't be read, or was written by another version.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DraftsmithError(f"--against {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise DraftsmithError(f"--against {path} is no report: {error}") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != SCHEMA:
        raise DraftsmithError(
            f"--against {path} holds {schema or 'no report'}, this version compares {SCHEMA}: measure that head again "
            "with 'draftsmith eval'"
        )
    return dict(report)


def against(report: Mapping[str, Any], earlier: Mapping[str, Any], path: str) -> Against:
    """Compare two reports.

    Args:
        report, earlier: contents of `report.json`.
        path: of the earlier one, for messages.

    Raises:
        DraftsmithError: another target, chat template, number format or answer length, too few prompts in both, or no
            tree that both report.
    """
    _refuse(report, earlier, path)
    now, before = _series(report["prompts"]), _series(earlier["prompts"])
    shared = [key for key in now if key in before]
    questions = len({key[:2] for key in shared})
    if questions < LEAST:
        raise DraftsmithError(
            f"the report can't be compared with {path}: {questions} questions are in both with equal prompts "
            f"({report['prompts']['name']} now, {earlier['prompts']['name']} before), {LEAST} are needed: measure the "
            "same benchmarks (--bench, --prompts)"
        )
    common = _common_tree(report, earlier, path)
    notes = _notes(report, earlier, common.tree)
    if alone := len(now.keys() ^ before.keys()):
        notes.append(f"{alone} answers are in one of the reports alone and left out")
    failed = report["summary"]["speedup"] is None and earlier["summary"]["speedup"] is not None
    if failed:
        notes.append(f"no speed-up any more: outputs against plain decoding: {report['summary']['output_check']}")
    return Against(path, len(shared), _changes(report, earlier, common), notes, failed)


def _refuse(report: Mapping[str, Any], earlier: Mapping[str, Any], path: str) -> None:
    """Raise DraftsmithError where the two didn't measure the same thing."""
    places = {
        "target": ("target", "fingerprint"),
        "chat template": ("target", "chat_template_sha256"),
        "dtype": ("environment", "dtype"),
        "max_new_tokens": ("prompts", "max_new_tokens"),
    }
    other = [
        f"{name} {report[group][key]} now, {earlier[group][key]} before"
        for name, (group, key) in places.items()
        if report[group][key] != earlier[group][key]
    ]
    if other:
        raise DraftsmithError(f"the report can't be compared with {path}: {'; '.join(other)}")


@dataclass(frozen=True)
class _Common:
    """The tree that tau is compared on, and which logs of either report are of it, as `_series` calls them."""

    tree: str
    now: str
    before: str


def _common_tree(report: Mapping[str, Any], earlier: Mapping[str, Any], path: str) -> _Common:
    """The chosen tree where both report it, else the chain that heads compare by.

    Steps of a shorter chain don't follow from those of a longer one: what it refuses or never drafts changes where the
    next step begins.
    """
    now, before = ({r["summary"]["chain"]["tree"]: "chain", _tree(r): "speculative"} for r in (report, earlier))
    for tree in (_tree(report), *now):
        if tree in before:
            return _Common(tree, now[tree], before[tree])
    raise DraftsmithError(
        f"the report can't be compared with {path}: no τ in common: it is of {', '.join(now)} now, of "
        f"{', '.join(before)} before: measure one tree in both, e.g. eval.trees=[{_tree(earlier)}]"
    )


def _notes(report: Mapping[str, Any], earlier: Mapping[str, Any], common: str) -> list[str]:
    """What differs and doesn't forbid a comparison."""
    notes = []
    if not _same_machine(report, earlier):
        here, there = report["environment"], earlier["environment"]
        other = [f"{name} {here[name]} now, {there[name]} before" for name in _MACHINE if here[name] != there[name]]
        notes.append(f"another machine: {'; '.join(other)}: speed-ups are not judged")
    here, there = (r["environment"]["versions"] for r in (report, earlier))
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if names:
        other = [f"{name} {here.get(name, 'none')} now, {there.get(name, 'none')} before" for name in names]
        notes.append(f"other versions: {'; '.join(other)}")
    if _tree(report) != _tree(earlier):
        notes.append(
            f"other trees: {_tree(report)} now, {_tree(earlier)} before: τ is that of {common}, which both report, and "
            "not compared above temperature 0"
        )
    temperatures = [{row["temperature"] for row in r["temperatures"]} for r in (report, earlier)]
    if alone := sorted(temperatures[0] ^ temperatures[1]):
        notes.append(f"temperature {', '.join(f'{t:g}' for t in alone)} is in one of the reports alone and left out")
    return notes


def _changes(report: Mapping[str, Any], earlier: Mapping[str, Any], common: _Common) -> list[Change]:
    """Tau and speed-up at every temperature that both have; of other trees tau of greedy answers alone."""
    clocks = _same_machine(report, earlier) and all(r["summary"]["speedup"] is not None for r in (report, earlier))
    same_tree = _tree(report) == _tree(earlier)
    found = []
    logs = [{0.0: r["prompts"], **{s["temperature"]: s for s in r["prompts"]["sampled"]}} for r in (report, earlier)]
    for temperature in [t for t in logs[0] if t in logs[1]]:
        name = f"temperature {temperature:g}" if temperature else "greedy"
        rows = _paired(_series(logs[0][temperature]), _series(logs[1][temperature]))
        if same_tree:
            found.append(_change("tau", f"{_tree(report)}, {name}", rows, _tau, True))
        found.append(_change("speedup", name, rows, _speedup, clocks))
    if not same_tree:
        rows = _paired(_series(report["prompts"], common.now), _series(earlier["prompts"], common.before))
        found.insert(0, _change("tau", f"{common.tree}, greedy", rows, _tau, True))
    return found


def _change(name: str, what: str, rows: _Rows, figure: Callable[[_Rows], NDArray[np.float64]], judged: bool) -> Change:
    """One figure, and whether it has fallen."""

    def difference(total: _Rows) -> NDArray[np.float64]:
        return figure(total[:, :_WIDTH]) - figure(total[:, _WIDTH:])

    whole = rows.sum(0, keepdims=True)
    now, before = (float(figure(part)[0]) for part in (whole[:, :_WIDTH], whole[:, _WIDTH:]))
    interval = bootstrap(rows, difference)
    fallen = interval[1] < 0
    if figure is _speedup:
        fallen = fallen and now < bootstrap(rows[:, _WIDTH:], figure)[0]
    return Change(name, what, now, before, now - before, interval, judged, judged and fallen)


def _tau(total: _Rows) -> NDArray[np.float64]:
    return total[:, _TOKENS] / np.maximum(total[:, _STEPS], 1)


def _speedup(total: _Rows) -> NDArray[np.float64]:
    top = total[:, _TOKENS] * total[:, _PLAIN_SECONDS]
    bottom = total[:, _SECONDS] * total[:, _PLAIN_TOKENS]
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


def _series(logs: Mapping[str, Any], kind: str = "speculative") -> dict[_Key, list[float]]:
    """What each answer adds to the sums: plain tokens and seconds, tokens, seconds and steps of the other way.

    Args:
        logs: of one temperature.
        kind: "speculative", or "chain", which has no seconds.
    """
    found = {}
    for plain, about, other in zip(logs["plain"], logs["speculative"], logs[kind], strict=True):
        key = (about["benchmark"], about["question"], about["turn"], about["sha256"])
        emitted = float(sum(step[2] for step in other["steps"]))
        found[key] = [
            float(plain["tokens"]), plain["seconds"], emitted, other.get("seconds", 0.0), float(len(other["steps"])),
        ]  # fmt: skip
    return found


def _paired(now: Mapping[_Key, Sequence[float]], before: Mapping[_Key, Sequence[float]]) -> _Rows:
    """One row a question that both have: its sums now and before. The turns of a question are resampled as one."""
    sums: dict[tuple[str, str], _Rows] = {}
    for key, values in now.items():
        if key in before:
            row = np.array([*values, *before[key]], dtype=np.float64)
            sums[key[:2]] = sums.get(key[:2], np.zeros_like(row)) + row
    return np.array(list(sums.values())).reshape(-1, 2 * _WIDTH)


def _same_machine(report: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    return all(report["environment"][name] == earlier["environment"][name] for name in _MACHINE)


def _tree(report: Mapping[str, Any]) -> str:
    return str(report["summary"]["setting"]["tree"])
