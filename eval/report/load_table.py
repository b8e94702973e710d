"""What `draftsmith load` measured, in the terminal."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..closed_loop import SPECULATIVE
from ..tune import PLAIN

COLUMNS = ("batch", "τ", "plain tokens/s", "with the head", "speed-up", "running", "outputs")
WIDTH = 110
"""Characters of a table where standard output is no terminal that says how wide it is."""


def batch_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a batch, in the order of COLUMNS."""
    return [
        (
            str(row["batch"]),
            f"{row['tau']:.3f}",
            f"{row['baseline_tokens_per_s']:.1f}",
            f"{row['tokens_per_s']:.1f}",
            speedup_text(row),
            f"{row['running'][PLAIN]:.1f} / {row['running'][SPECULATIVE]:.1f}",
            row["output_check"],
        )
        for row in result["batches"]
    ]


def speedup_text(row: Mapping[str, Any]) -> str:
    """A speed-up with its interval; a dash where none is given."""
    if row["speedup"] is None:
        return "–"
    low, high = row["speedup_ci"]
    return f"{row['speedup']:.2f}× [{low:.2f}, {high:.2f}]" + (" (doubtful)" if row["flag"] else "")


def replay_rows(replay: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """One row a figure: its name, plain, with the head."""
    plain, fast = replay[PLAIN], replay[SPECULATIVE]
    served = [f"{way['served_tokens_per_s']:.1f}" for way in (plain, fast)]
    rows = [
        ("tokens/s, prefill and waiting included", served[0], served[1]),
        ("tokens/s of decoding steps", f"{replay['baseline_tokens_per_s']:.1f}", f"{replay['tokens_per_s']:.1f}"),
    ]
    for name, label in (("ttft", "first token"), ("latency", "whole answer")):
        rows += [
            (f"{label}, {share}, s", f"{plain[name][share]:.3f}", f"{fast[name][share]:.3f}")
            for share in ("p50", "p95")
        ]
    running = replay["running"]
    return [*rows, ("running sequences, mean", f"{running[PLAIN]:.1f}", f"{running[SPECULATIVE]:.1f}")]


def sweep_lines(result: Mapping[str, Any]) -> list[str]:
    """What the table of batches doesn't say."""
    sweep = result["sweep"]
    lines = [sweep["below_one"], f"tau: {sweep['same_steps']['verdict']}"]
    lines += [f"batch {row['batch']}: {row['flag']}" for row in result["batches"] if row["flag"]]
    return lines + [f"{p['name']}: {problem}" for p in sweep["prompts"] for problem in p["problems"]]


def replay_lines(replay: Mapping[str, Any]) -> list[str]:
    """What the table of a replay doesn't say."""
    ratio = replay["throughput_ratio"]
    lines = [f"outputs against plain: {replay['output_check']}", f"tau {replay['tau']:.3f}"]
    if ratio is not None:
        alone = speedup_text(replay) if replay["tau"] else "none: every answer ends with its first token"
        lines.append(f"throughput {ratio:.2f}× plain; decoding steps alone {alone}")
    else:
        lines.append("no speed-up is given: the outputs are not plain decoding's")
    return lines + ([replay["flag"]] if replay["flag"] else [])


def print_load(result: Mapping[str, Any], part: str) -> None:
    """Print a part of the result, "batches" or "replay", on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    about = result["sweep"] if part == "batches" else result["replay"]
    setting, e = about["setting"], about["environment"]
    caption = f"tree {setting['tree']}; {e['processor']}, {e['threads']} threads, {e['dtype']}"
    title = f"{result['head']} for {result['model']}: "
    if part == "batches":
        count = sum(p["n_prompts"] for p in about["prompts"])
        names = ", ".join(p["name"] for p in about["prompts"])
        title += f"{count} prompts ({names}) × {setting['max_new_tokens']} new tokens, greedy"
        table, rows, lines = Table(*COLUMNS), batch_rows(result), sweep_lines(result)
    else:
        title += f"{about['requests']} requests of {about['file']}, {about['concurrency']} at a time"
        table = Table("", "plain", "with the head")
        rows, lines = [*replay_rows(about)], replay_lines(about)
    for row in rows:
        table.add_row(*row)
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    say(title)
    console.print(table)
    for line in (caption, *lines):
        say(line)
