"""The page and its drawings: every figure there, nothing empty, nothing from elsewhere, readable by all."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from page_reader import SVG, Page
from report_samples import AWKWARD, CURVE, STAGES, load, report, sample, sparse, tree, tune

from draftsmith.eval.report import LOAD, PAGE, REPORT, TUNE
from draftsmith.eval.report.bars import lying_bars, shares_bar
from draftsmith.eval.report.charts import bar_chart, figure, legend_keys, line_chart, ticks
from draftsmith.eval.report.drawing import MOST_NODES, coloured_text, left_out, legend, tree_drawing, visible
from draftsmith.eval.report.markup import model_name
from draftsmith.eval.report.page import refresh_page, write_page
from draftsmith.eval.report.style import STYLE
from draftsmith.eval.report.terminal import caution, group_rows, print_summary, summary_rows


def read(path: Path, found: dict, curve=(), stages=None, **more) -> Page:
    write_page(path, found, curve, stages or {}, **more)
    return Page(path.read_text("utf-8"))


def parsed(drawing: str):
    from xml.etree import ElementTree

    return ElementTree.fromstring(drawing)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_every_figure_is_on_the_page(tmp_path):
    found = report()
    page = read(tmp_path / "report.html", found, CURVE, STAGES)
    for name, text in summary_rows(found):
        assert name in page.words
        assert text in page.words
    s = found["summary"]
    values = [
        *s["acceptance_conditional"],
        *s["chain"]["acceptance_cumulative"],
        *(x for row in s["acceptance_by_rank"] for x in row),
    ]
    for rows in found["by"].values():
        values += [x for row in rows if len(rows) > 1 for x in (row["tau"], *row["tau_ci"], row["speedup"]) if x]
    for row in [*found["temperatures"], *found["benchmarks"]]:
        values += [row["tau"], *row["tau_ci"], row["alpha"], row["speedup"], *row["speedup_ci"]]
    values += [row["expected_tau"] for row in found["tuning"]["table"]]
    values += [1000 * cost[f"{part}_seconds"] for cost in found["passes"].values() for part in ("target", "draft")]
    values += [1000 * times[p] for times in found["ttft"].values() for p in ("p50", "p95")]
    values += [12.5, 321.0, 3.0, 0.0123, 1.71, 1.66, 1.93, 0.267, 0.409]
    for value in values:
        assert figure(value) in page.words, value
    told = ["21.3 %", "70.2 %", "8.5 %", "f" * 64, "a" * 64, "A <fast> one", "torch 2.13", "Apache-2.0", "the original"]
    told += ["no question: 2, first mt.jsonl:4", "sampled: law tested, not compared"]
    for text in told:
        assert text in page.words, text


def test_every_drawing_is_there_once_with_its_figures_below(tmp_path):
    page = read(tmp_path / "report.html", report(), CURVE, STAGES)
    titles = [drawing.get("aria-label") for drawing in page.drawings]
    assert titles == [
        "Acceptance by depth, dynamic:3x3x6",
        "Acceptance by depth, chain:4",
        "Acceptance by rank, dynamic:3x3x6",
        "τ by category",
        "τ by tokens before the step",
        "τ by language",
        "τ by benchmark",
        "Speed-up by benchmark",
        "τ by temperature",
        "Speed-up by temperature",
        "Speed-up by tree, 20 tuning prompts",
        "Cost of a target pass, ms",
        "Where the time of a step goes",
        "Time to the first token, ms",
        "Training loss",
        "τ on held-out answers while training",
        "Seconds of each stage",
        "A tree of 6 nodes",
    ]
    figures = [tag for tag, _ in page.tags if tag in ("figure", "svg", "table", "details")]
    for at, tag in enumerate(figures):
        if tag == "figure":
            assert figures[at : at + 4] == ["figure", "svg", "details", "table"]
    assert len(page.of("figure")) == len(titles)


def test_what_a_report_lacks_has_no_place(tmp_path):
    page = read(tmp_path / "report.html", sparse())
    titles = [drawing.get("aria-label") for drawing in page.drawings]
    assert titles == [
        "Acceptance by depth, chain:3",
        "Acceptance by depth, chain:4",
        "Speed-up by tree, 20 tuning prompts",
        "Cost of a target pass, ms",
    ]
    for heading in ("Where it pays", "Training", "One drawn tree", "How each token came", "How far the tuned target"):
        assert heading not in page.words
    assert "None" not in page.words


def test_load_and_tuning_are_shown_beside_the_report(tmp_path):
    page = read(tmp_path / "report.html", report(), load=load(), tune=tune())
    titles = [drawing.get("aria-label") for drawing in page.drawings]
    speed = titles.index("Speed-up by tree, 20 tuning prompts")
    assert titles[speed + 1 : speed + 5] == [
        "Speed-up by batch, chain:3",
        "Speed-up of the best setting",
        "Speed-up of chains by K, predicted",
        "day.jsonl replayed, 6 at a time: seconds",
    ]
    told = [
        "1.49",
        "1.44 to 1.55",
        "1.27",
        "the speed-up stays above 1 up to batch 4",
        "FAILED: p1 at 3",
        "6.54",
        "66.6",
    ]
    told += ["1.21", "1.34", "1.35", "1.32 to 1.39", "35.5", "23.7", "K & the tree decide", "Throughput 1.5× of plain"]
    for text in told:
        assert text in page.words, text
    by_k = page.drawings[speed + 3]
    assert len(list(by_k.iter(f"{SVG}polyline"))) == 2, "chains at the lowest temperature, a line a batch"
    only = read(tmp_path / "report.html", report(), load=load(batches=[], sweep=None, replay=None))
    assert not [d for d in only.drawings if "batch" in (d.get("aria-label") or "")]


def test_what_was_measured_of_other_weights_is_named_and_left_out(tmp_path):
    page = read(tmp_path / "report.html", report(), load=load(head_sha256="0" * 64), tune=tune())
    assert "load.json is of other weights than this report" in page.words
    assert "tune.json is" not in page.words
    titles = [drawing.get("aria-label") or "" for drawing in page.drawings]
    assert "Speed-up by batch, chain:3" not in titles
    assert "Speed-up of the best setting" in titles


def test_a_folder_is_called_by_its_name(tmp_path):
    found = report()
    found["target"] = {**found["target"], "id": "/home/me/models/Own-1B"}
    write_page(tmp_path / "report.html", found, [], {})
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "for Own-1B</h1>" in text
    assert "/home/me" not in text
    assert model_name("org/Model") == "org/Model"


def test_names_of_a_users_file_stay_text(tmp_path):
    page = read(tmp_path / "report.html", report())
    assert "b" not in {tag for tag, _ in page.tags}
    assert 'a <b> & "c" �� long' in page.words
    assert "Once upon <b>a time" in "".join(page.said).replace("\n", " ")
    assert "\x07" not in (tmp_path / "report.html").read_text("utf-8")


def test_tables_scroll_in_boxes_of_their_own_and_drawings_scale(tmp_path):
    page = read(tmp_path / "report.html", report(), CURVE, STAGES)
    boxes = [attributes for attributes in page.of("div") if (attributes.get("class") or "").startswith("scroll")]
    assert len(boxes) == len(page.of("table")) + 1  # and the tree
    assert all(box["tabindex"] == "0" and box["role"] == "group" and box["aria-label"] for box in boxes)
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert re.search(r"svg\{[^}]*max-width:100%;height:auto", STYLE)
    assert re.search(r"\.scroll\{overflow-x:auto", STYLE)


def test_colours_can_be_told_from_the_page_light_and_dark():
    """WCAG 2.2, success criterion 1.4.3: a contrast of 4.5 for text; its formula of relative luminance."""

    def luminance(colour: str) -> float:
        whole = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
        parts = [int(whole[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    looks = re.findall(r":root\{([^}]*)\}", STYLE)
    assert len(looks) == 2
    for text in looks:
        colours = dict(re.findall(r"--(\w+):(#\w+)", text))
        back = luminance(colours["back"])
        for name in (*"abcdef", "ink", "soft", "bad"):
            light, dark = sorted((luminance(colours[name]), back), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, colours[name])


@pytest.mark.parametrize(
    ("speedup", "told"),
    [(None, "The output check failed"), (0.93, "slower than without it"), (1.01, None)],
)
def test_what_speaks_against_a_head_is_said(tmp_path, capsys, speedup, told):
    found = report()
    found["summary"] |= {"speedup": speedup, "speedup_ci": None if speedup is None else [speedup - 0.1, speedup + 0.1]}
    page = read(tmp_path / "report.html", found)
    print_summary(found)
    shown = " ".join(capsys.readouterr().out.split())
    if told is None:
        assert caution(found) is None
        assert "bad" not in [attributes.get("class") for attributes in page.of("p")]
    else:
        assert told in (caution(found) or "")
        assert told in page.words
        assert told in shown


def test_a_runs_page_is_written_anew_from_its_folder(tmp_path):
    folder = tmp_path / "model" / "eagle2@long"
    folder.mkdir(parents=True)
    assert refresh_page(folder) is None
    assert not list(folder.iterdir())
    (folder / REPORT).write_text(json.dumps(report(stages=STAGES)))
    train = tmp_path / "model" / "eagle1@long" / "train"  # whose weights that head decodes
    train.mkdir(parents=True)
    (train / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CURVE))
    assert refresh_page(folder) == folder / PAGE
    page = Page((folder / PAGE).read_text("utf-8"))
    titles = [drawing.get("aria-label") for drawing in page.drawings]
    assert {"Training loss", "Seconds of each stage"} <= set(titles)
    whole = (folder / PAGE).read_bytes()
    for torn in (b'{"kind": "train", "st', b'{"kind": "caf\xc3', b"\xff\x00{\n"):
        (train / "metrics.jsonl").write_bytes("".join(json.dumps(row) + "\n" for row in CURVE).encode() + torn)
        refresh_page(folder)
        assert (folder / PAGE).read_bytes() == whole  # up to the first line that isn't whole
    assert "Speed-up by batch, chain:3" not in titles
    for name, found in ((LOAD, load()), (TUNE, tune())):
        (folder / name).write_text(json.dumps(found))
    refresh_page(folder)
    page = Page((folder / PAGE).read_text("utf-8"))
    more = {"Speed-up by batch, chain:3", "Speed-up of the best setting"}
    assert more <= {drawing.get("aria-label") for drawing in page.drawings}


# --- drawings ---------------------------------------------------------------------------------------------------------


def test_bars_and_error_bars_stand_where_their_values_are():
    spreads = {"x": [[1.0, 3.0], None, None]}
    drawing = parsed(bar_chart("t", ["a", "b", "c"], {"x": [2.0, 4.0, None]}, "kind", intervals=spreads, mark=1.0))
    first, second = drawing.iter(f"{SVG}rect")  # no bar for None
    foot = float(first.get("y")) + float(first.get("height"))
    unit = float(first.get("height")) / 2
    assert float(second.get("height")) == pytest.approx(4 * unit, abs=0.11)
    assert foot == pytest.approx(float(second.get("y")) + float(second.get("height")), abs=0.11)
    (whisker,) = [path for path in drawing.iter(f"{SVG}path") if path.get("class") == "whisker"]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", whisker.get("d"))]
    assert heights[:2] == pytest.approx([foot - unit, foot - 3 * unit], abs=0.11)
    (mark,) = [line for line in drawing.iter(f"{SVG}line") if line.get("class") == "mark"]
    assert float(mark.get("y1")) == pytest.approx(foot - unit, abs=0.11)
    assert first.findtext(f"{SVG}title") == "x, a: 2 (1 to 3)"
    assert drawing.findtext(f"{SVG}desc") == "by kind. x: a 2 (1 to 3), b 4"


def test_lying_bars_say_long_names_in_full_where_a_pointer_rests():
    drawing = parsed(lying_bars("t", [AWKWARD, "b"], {"x": [1.0, 2.0], "y": [None, 1.5]}, "size", mark=1.0))
    bars = list(drawing.iter(f"{SVG}rect"))
    assert len(bars) == 3
    assert float(bars[1].get("width")) == pytest.approx(2 * float(bars[0].get("width")), abs=0.11)
    assert "long long" in bars[0].findtext(f"{SVG}title")
    assert any((text.text or "").endswith("…") for text in drawing.iter(f"{SVG}text"))
    edges = sorted((float(bar.get("y")), float(bar.get("y")) + float(bar.get("height"))) for bar in bars)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(edges)), "bars overlap"


def test_shares_make_up_the_whole_width():
    drawing = parsed(shares_bar("t", {"draft": 1.0, "verify": 3.0}))
    small, large = (float(bar.get("width")) for bar in drawing.iter(f"{SVG}rect"))
    assert large == pytest.approx(3 * small, abs=0.2)
    assert drawing.findtext(f"{SVG}desc") == "draft 25.0 %, verify 75.0 %"


def test_lines_differ_by_more_than_colour_and_long_ones_are_summed_up():
    lines = {f"line {i}": [(float(x), float(x + i)) for x in range(20)] for i in range(5)}
    drawing = parsed(line_chart("t", lines, "step"))
    looks = {(line.get("stroke"), line.get("stroke-dasharray")) for line in drawing.iter(f"{SVG}polyline")}
    assert len(looks) == 5
    assert "line 2: first 2 at 0, lowest 2 at 0, highest 21 at 19, last 21 at 19" in drawing.findtext(f"{SVG}desc")
    keys, height = legend_keys([f"a rather long name {i}" for i in range(9)])
    places = [(float(x), float(y)) for x, y in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"', keys)]
    assert len(places) == len(set(places)) == 9
    assert height == 14 * len({y for _, y in places}) > 14


def test_values_stand_only_on_bars_that_are_wide_enough():
    for count, told in ((3, True), (30, False)):
        labels = [str(i) for i in range(count)]
        drawing = parsed(bar_chart("t", labels, {"x": [0.123] * count, "y": [0.456] * count}, "depth"))
        assert ("0.456" in [text.text for text in drawing.iter(f"{SVG}text")]) == told
        assert all("0.123" in bar.findtext(f"{SVG}title") for bar in list(drawing.iter(f"{SVG}rect"))[:count])


@pytest.mark.parametrize("draw", [bar_chart, lying_bars])
def test_nothing_to_show_is_no_drawing(draw):
    assert draw("t", [], {"x": []}, "x") == ""
    assert draw("t", ["a"], {"x": [None]}, "x") == ""
    assert line_chart("t", {"x": []}, "x") == ""
    assert shares_bar("t", {}) == ""
    assert shares_bar("t", {"a": 0.0}) == ""


def test_one_value_alone_has_an_axis():
    for chart in (line_chart("t", {"x": [(3.0, 0.0)]}, "x"), bar_chart("t", ["a"], {"x": [0.0]}, "x")):
        assert "nan" not in chart
        parsed(chart)
    assert ticks(0.0, 0.0)[0] == 0.0


def test_a_tree_shows_its_accepted_path():
    drawing = parsed(tree_drawing("t", tree()["nodes"]))
    kinds = [group.get("class") for group in drawing.iter(f"{SVG}g")]
    assert sorted(kinds) == ["kept"] * 3 + ["lost"] * 3
    edges = [path.get("class") for path in drawing.iter(f"{SVG}path")]
    assert edges == ["branch"] * 3 + ["path"] * 2, "accepted edges lie on top"
    boxes = {
        group.findtext(f"{SVG}text"): tuple(float(group.find(f"{SVG}rect").get(k)) for k in ("x", "y"))
        for group in drawing.iter(f"{SVG}g")
    }
    assert len(set(boxes.values())) == 6, "two nodes lie on each other"
    assert boxes["The"][0] < boxes["␣cat"][0] < boxes["␣sat"][0]
    assert boxes["␣cat"][1] == boxes["␣sat"][1] < boxes["␣ran"][1]
    assert boxes["The"][1] == boxes["␣a"][1] < boxes["␣cat"][1] < boxes["⏎"][1]
    assert drawing.findtext(f"{SVG}desc") == "6 nodes; accepted: 'The' ' cat' ' sat'"


def test_a_large_tree_keeps_its_path():
    nodes = [{"token": "r", "parent": -1, "depth": 0, "accepted": True}]
    nodes += [{"token": str(i), "parent": 0, "depth": 1, "accepted": i == 90} for i in range(1, 91)]
    nodes.append({"token": "end", "parent": 90, "depth": 2, "accepted": True})
    texts = [text.text for text in parsed(tree_drawing("t", nodes)).iter(f"{SVG}text")]
    assert {"90", "end"} <= set(texts)
    assert len(texts) == 1 + MOST_NODES + 2
    assert left_out(nodes) == 92 - MOST_NODES - 2


def test_tokens_can_be_seen():
    assert visible(" a\n") == "␣a⏎"
    assert visible("\x1b\t") == "�⇥"
    assert visible("x" * 40) == "x" * 11 + "…"


def test_a_text_shows_how_each_token_came_without_colour():
    pieces = sample()["pieces"]
    text = coloured_text(pieces)
    spans = re.findall(r'<span class="([^"]*)" title="([^"]*)">(.*?)</span>', text, re.DOTALL)
    assert [look for look, _, _ in spans] == [
        "plain", "drafted d1", "drafted d2", "corrected", "drafted d1", "drafted d6", "bonus"
    ]  # fmt: skip
    assert [told for _, told, _ in spans][1:5] == [
        "drafted, depth 1",
        "drafted, depth 2",
        "corrected",
        "drafted, depth 1",
    ]
    lines = {
        kind: re.search(rf"\.{kind}\{{text-decoration:([\w ]+)", STYLE) for kind in ("drafted", "corrected", "bonus")
    }
    assert len({found.group(1) for found in lines.values() if found}) == 3, "each has a line of its own below it"
    told = legend(pieces)
    assert "4 of 7 pieces of text (57%)" in told
    assert told.count("1 of 7 pieces of text (14%)") == 3


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_the_terminal_needs_eighty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    found = report()
    print_summary(found)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for text in (
        "2.345  [2.210, 2.480]",
        "1.52×  [1.440, 1.610]",
        "0.587",
        "draft 21 %",
        "first token, plain",
        "0.42 %",
    ):
        assert text in out
    for name in ("coding", "<512", "greedy", "temperature 0.7", "mt-bench"):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{name}  ")]
        assert "…" not in line
    assert "mt-bench: 1 prompt did not fit the context and were left out" in out
    assert "mt-bench: no question: 2, first mt.jsonl:4" in out
    rows = group_rows(found)
    assert list(rows) == ["benchmark", "category", "tokens before the step", "language", "temperature"]
    assert rows["category"][0] == ("coding", "7", "2.90 [2.80, 3.05]", "0.51", "1.80× [1.73, 1.88]")
    assert rows["tokens before the step"][0][-1] == "–"
