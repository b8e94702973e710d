"""The command `generate`: every scheme gives the plain answer, text streams in colours, contradictions are named."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decoder_checks import dense_greedy, random_head
from foreign_heads import specforge
from typer.testing import CliRunner

from draftsmith import cli, cli_measure
from draftsmith.data_recipes.chat import render_prompt
from draftsmith.errors import DraftsmithError
from draftsmith.eval import schemes
from draftsmith.eval.decoder.loop import Result, StepLog
from draftsmith.eval.decoder.sampling import GREEDY, Sampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape
from draftsmith.eval.generate import compare_with, plain_line
from draftsmith.eval.schemes import SCHEMES
from draftsmith.files import sha256_file, write_json
from draftsmith.heads.checkpoint import WEIGHTS, save_head
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.heads.resolve import resolve_target

PROMPT = "write a short story about a ship that sails to the north"
COUNT = 16


@pytest.fixture(scope="module")
def runs(tiny_target: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with two heads: one of the tiny target, and one, `strange`, of another."""
    folder = tmp_path_factory.mktemp("runs")
    for name, fingerprint in (("eagle3", tiny_target.fingerprint), ("eagle3@strange", "0" * 64)):
        head = random_head(tiny_target)
        head.config = dataclasses.replace(head.config, target_fingerprint=fingerprint)
        best = folder / resolve_target(str(tiny_folder)).name / name / "train" / "checkpoints" / "best"
        best.mkdir(parents=True)
        save_head(head, best)
    home = folder / resolve_target(str(tiny_folder)).name
    shutil.copytree(home / "eagle3", home / "eagle1")
    (home / "eagle2").mkdir()
    weights = sha256_file(home / "eagle1" / "train" / "checkpoints" / "best" / WEIGHTS)
    report = {"summary": {"setting": {"tree": "dynamic:2x2x4"}}, "head_sha256": weights}
    write_json(home / "eagle2" / "report.json", report)
    shutil.copytree(home / "eagle3", home / "eagle3@old")
    write_json(home / "eagle3@old" / "report.json", {**report, "head_sha256": "0" * 64})
    return folder


@pytest.fixture
def generate(tiny_folder: Path, runs: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process; returns what it wrote to standard output and error."""

    def run(*args: str, model: Path = tiny_folder) -> tuple[str, str]:
        cli.app(
            ["generate", *args, "--model", str(model), "--runs", str(runs), "--max-new-tokens", str(COUNT)],
            standalone_mode=False,
        )
        return capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def greedy(tiny_target: Any) -> list[int]:
    text = dense_greedy(tiny_target, render_prompt(tiny_target.tokenizer, [{"role": "user", "content": PROMPT}]), COUNT)
    assert not set(text) & set(tiny_target.eos_ids)
    return text


def test_text_streams_to_standard_output_and_figures_go_to_standard_error(
    tiny_folder: Path, tiny_target: Any, greedy: list[int]
) -> None:
    command = [sys.executable, "-m", "draftsmith.cli", "generate", "-", "--model", str(tiny_folder)]
    path = os.pathsep.join([*sys.path, str(Path(cli.__file__).parent.parent)])
    done = subprocess.run(
        [*command, "--drafter", "lookahead", "--max-new-tokens", str(COUNT)],
        input=PROMPT.encode() + b"\n", capture_output=True, env={**os.environ, "PYTHONPATH": path}, check=True,
    )  # fmt: skip
    assert done.stdout.decode() == tiny_target.tokenizer.decode(greedy, skip_special_tokens=True) + "\n"
    assert f"\n{COUNT} tokens, " in "\n" + done.stderr.decode()
    assert " tokens/s, tau " in done.stderr.decode()
    figures, came, plain = done.stderr.decode().splitlines()[-3:]
    assert figures.endswith(" accepted/step, finish: length")
    assert re.fullmatch(r"drafted \d+( \(at depth .*\))?, corrected \d+, bonus \d+, plain \d+", came)
    assert re.fullmatch(r"plain decoding: [\d.]+ tokens/s, speed-up [\d.]+x \(one answer each; identical\)", plain)


WAYS = [
    ("plain", []),
    ("prompt-lookup", []),
    ("lookahead", []),
    ("lookahead", ["--with-prompt-lookup"]),
    ("head", []),
    ("head", ["--tree", "static:0,1,0.0", "--with-prompt-lookup"]),
    ("draft-model", ["--tree", "dynamic:3x2x6"]),
    ("draft-model", ["--with-prompt-lookup"]),
]


def test_every_scheme_is_tried() -> None:
    assert {name for name, _ in WAYS} == set(SCHEMES)


@pytest.mark.parametrize(("name", "more"), WAYS)
def test_every_scheme_gives_the_plain_answer(
    generate: Any, tiny_folder: Path, tiny_target: Any, greedy: list[int], name: str, more: list[str]
) -> None:
    extra = ["--draft-model", str(tiny_folder)] if name == "draft-model" else []
    out, err = generate(PROMPT, "--drafter", name, *more, *extra, "--json")
    answer = json.loads(out)
    assert answer["tokens"] == greedy
    assert answer["text"] == tiny_target.tokenizer.decode(greedy, skip_special_tokens=True)
    assert (answer["finish"], answer["lossy"], answer["drafter"]) == ("length", False, name)
    assert answer["steps"] * answer["tau"] == pytest.approx(COUNT - 1)
    assert answer["tokens_per_second"] > 0
    came = answer["origins"]
    assert sum(came["drafted"]) + came["corrected"] + came["bonus"] + came["plain"] == COUNT
    if name == "plain":
        assert answer["plain"] is None
        assert came == {"drafted": [], "corrected": 0, "bonus": 0, "plain": COUNT}
    else:
        plain = answer["plain"]
        assert plain["check"] == "identical"
        assert plain["speedup"] == pytest.approx(answer["tokens_per_second"] / plain["tokens_per_second"])
    assert f"tau {answer['tau']:.2f} over {answer['steps']} steps" in err
    if name == "draft-model":  # the target drafts for itself
        assert answer["accepted_per_step"] > 1
    if name == "plain":
        assert answer["tau"] == 1


def test_a_head_takes_the_weights_and_the_tree_that_it_is_decoded_with(
    generate: Any, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[Shape] = []
    real = schemes.make_drafter
    monkeypatch.setattr(
        schemes, "make_drafter", lambda head, parts, shape: shapes.append(shape) or real(head, parts, shape)
    )
    for name in ("eagle2", "eagle1"):
        assert json.loads(generate(PROMPT, "--head", name, "--json")[0])["tokens"] == greedy
    generate(PROMPT, "--head", "eagle2", "--tree", "chain:1", "--json")
    told = generate(PROMPT, "--run", "old", "--json")[1]
    assert "eagle3@old has a report on other weights than these, whose tree is not taken" in told
    monkeypatch.setattr(Eagle3Head, "most_depth", 3)
    generate(PROMPT, "--head", "eagle3", "--json")
    assert shapes == [Dynamic(2, 2, 4), Chain(4), Chain(1), Chain(4), Chain(3)]


def test_sampled_answers_follow_the_seed_not_the_scheme(generate: Any) -> None:
    sampled = ("--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01",
               "--repetition-penalty", "1.1", "--json", PROMPT)  # fmt: skip
    found = [
        json.loads(generate(*sampled, "--drafter", name, "--seed", seed)[0])["tokens"]
        for name, seed in (("plain", "1"), ("prompt-lookup", "1"), ("lookahead", "1"), ("plain", "2"))
    ]
    assert found[0] == found[1] == found[2] != found[3]
    plain = json.loads(generate(*sampled, "--drafter", "lookahead")[0])["plain"]
    assert plain["check"] == "sampled: law tested, not compared"
    assert plain["speedup"] > 0


def test_typical_acceptance_says_that_it_is_lossy(generate: Any) -> None:
    out, err = generate(PROMPT, "--drafter", "lookahead", "--temperature", "1", "--typical", "--json")
    assert json.loads(out)["lossy"]
    assert json.loads(out)["plain"]["speedup"] is None
    assert "finish: length, lossy (typical acceptance)\n" in err
    assert err.rstrip().endswith("no speed-up is given: typical acceptance changes what the target says")


def test_a_raw_prompt_is_continued_as_it_is(generate: Any, tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny_target.tokenizer(PROMPT).input_ids
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((PROMPT + "\n").encode())))
    answer = json.loads(generate("--raw", "--drafter", "plain", "--json")[0])
    assert answer["prompt_tokens"] == len(ids)
    want = dense_greedy(tiny_target, ids, COUNT)
    assert answer["tokens"] == want[: len(answer["tokens"])]


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    with pytest.raises(DraftsmithError, match="standard input is not UTF-8 text"):
        cli_measure._read_stdin()


def test_a_stop_token_ends_the_answer(generate: Any, tiny_target: Any, greedy: list[int]) -> None:
    at = next(i for i, t in enumerate(greedy) if i > 2 and t not in greedy[:i] and _is_one(tiny_target.tokenizer, t))
    stop = tiny_target.tokenizer.decode([greedy[at]])
    answer = json.loads(generate(PROMPT, "--drafter", "prompt-lookup", "--stop-token", stop, "--json")[0])
    assert answer["tokens"] == greedy[: at + 1]
    assert answer["finish"] == "eos"


def _is_one(tokenizer: Any, token: int) -> bool:
    return tokenizer.encode(tokenizer.decode([token]), add_special_tokens=False) == [token]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--drafter", "eagle"], "no drafter 'eagle'; there are: plain, prompt-lookup"),
        (["--drafter", "plain", "--tree", "chain:3"], "goes with --drafter draft-model or head, not with 'plain'"),
        (["--drafter", "lookahead", "--draft-model", "x/y"], "--draft-model goes with --drafter draft-model, not"),
        (["--drafter", "prompt-lookup", "--with-prompt-lookup"], "--with-prompt-lookup goes with --drafter lookahead"),
        (["--drafter", "lookahead", "--run", "best"], "--head and --run name a trained head"),
        (["--drafter", "draft-model"], "--drafter draft-model needs --draft-model"),
        (["--tree", "own:4"], "no tree was measured for this head"),
        (["--drafter", "draft-model", "--draft-model", "x/y", "--tree", "own:4"], "it goes with a head"),
        (["--tree", "bush:3"], "'bush:3' can't be read; write chain:4"),
        (["--tree", "bush:3"], "; own:32 (nodes of the tree that was measured for the head)"),
        (["--run", "none"], "train one with 'draftsmith run'"),
        (["--run", "none"], "there are: eagle1, eagle2, eagle3, eagle3@old, eagle3@strange"),
        (["--run", "strange"], "trained for another target"),
        (["--drafter", "plain", "--top-p", "0.5"], "give --temperature, too"),
        (["--drafter", "lookahead", "--typical"], "--typical changes nothing at temperature 0"),
        (["--drafter", "plain", "--typical", "--temperature", "1"], "makes none: take another drafter"),
        (["--drafter", "plain", "--stop-token", "a ship"], "it must be a single one"),
        (["--drafter", "plain", "--temperature", "1", "--top-k", "9999"], "top_k = 9999 must be between 0"),
    ],
)  # fmt: skip
def test_contradictions_are_named(generate: Any, args: list[str], told: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        generate(PROMPT, *args)
    assert told in str(caught.value)


def test_an_empty_prompt_and_a_missing_template_are_refused(generate: Any, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="the prompt is empty"):
        generate("  ")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_folder.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    with pytest.raises(DraftsmithError, match="give --raw to continue plain text"):
        generate(PROMPT, "--drafter", "plain", model=bare)
    assert generate(PROMPT, "--drafter", "plain", "--raw", model=bare)[0]


def test_without_a_limit_the_answer_gets_what_fits(
    tiny_folder: Path, tiny_target: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = "the quick brown fox " * 38
    room = tiny_target.max_positions - len(tiny_target.tokenizer(prompt).input_ids)
    assert 0 < room < 256
    cli.app(
        ["generate", prompt, "--raw", "--model", str(tiny_folder), "--drafter", "prompt-lookup", "--json",
         "--temperature", "3", "--seed", "4"],
        standalone_mode=False,
    )  # fmt: skip
    answer = json.loads(capfd.readouterr().out)
    assert answer["finish"] == "eos" or len(answer["tokens"]) == room


def test_without_a_limit_a_small_draft_model_gets_what_fits(
    tiny_folder: Path, tiny_target: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    shutil.copytree(tiny_folder, small)
    config = json.loads((small / "config.json").read_text())
    write_json(small / "config.json", {**config, "max_position_embeddings": 64})
    prompt = "the quick brown fox " * 4
    room = 64 - len(tiny_target.tokenizer(prompt).input_ids)
    assert room > 0
    cli.app(
        ["generate", prompt, "--raw", "--model", str(tiny_folder), "--drafter", "draft-model", "--draft-model",
         str(small), "--json", "--no-plain"],
        standalone_mode=False,
    )  # fmt: skip
    answer = json.loads(capfd.readouterr().out)
    assert answer["finish"] == "eos" or len(answer["tokens"]) == room


def test_a_reader_that_leaves_is_no_error(tiny_folder: Path) -> None:
    """As behind `| head`: the pipe is closed before anything comes."""
    command = [sys.executable, "-m", "draftsmith.cli", "generate", PROMPT, "--model", str(tiny_folder)]
    options = ["--drafter", "plain", "--max-new-tokens", "30"]
    path = os.pathsep.join([*sys.path, str(Path(cli.__file__).parent.parent)])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], env={**os.environ, "PYTHONPATH": path}, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in said
    assert "Broken" not in said


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.eval.generate.generate", interrupted)
    done = CliRunner().invoke(cli.app, ["generate", "hello"])
    assert done.exit_code == 130
    assert done.stderr == "interrupted\n"


def test_the_command_colours_what_was_drafted(generate: Any, tiny_folder: Path, tiny_target: Any, greedy: Any) -> None:
    drafts = ("--drafter", "draft-model", "--draft-model", str(tiny_folder))  # the target itself: all is accepted
    text = tiny_target.tokenizer.decode(greedy, skip_special_tokens=True) + "\n"
    out, err = generate(PROMPT, *drafts, "--color")
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == text
    assert "\x1b[32m" in out
    assert "\x1b[1m" in out
    assert "(at depth \x1b[32m1: 3\x1b[0m, \x1b[36m2: 3\x1b[0m" in err
    out, err = generate(PROMPT, *drafts, "--no-plain")  # no terminal: no colours
    assert out == text
    assert "\x1b" not in err
    assert "plain decoding" not in err
    with pytest.raises(DraftsmithError, match="--color changes nothing"):
        generate(PROMPT, *drafts, "--color", "--json")


def _answer(tokens: list[int], seconds: float, lossy: bool = False) -> Result:
    steps = [StepLog(0, 0, 1)] * (len(tokens) - 1)
    return Result("r", [1], tokens, "length", steps, seconds, lossy)


@pytest.mark.parametrize(
    ("plain", "fast", "sampling", "speedup", "check"),
    [
        (_answer([5, 6, 7], 4.0), _answer([5, 6, 7], 2.0), GREEDY, 2.0, "identical"),
        (_answer([5, 6, 7], 4.0), _answer([5, 6, 8], 2.0), GREEDY, None, "the answers part at token 3"),
        (_answer([5, 6, 7], 4.0), _answer([5, 6], 2.0), GREEDY, None, "the answers part at token 3"),
        (_answer([5, 6, 7], 4.0), _answer([9, 8, 7], 1.0), Sampling(temperature=1.0), 4.0, "sampled"),
        (_answer([5, 6, 7], 4.0), _answer([5, 6, 7], 2.0, lossy=True), GREEDY, None, "typical acceptance"),
        (_answer([5], 0.0), _answer([5], 0.0), GREEDY, None, "identical"),
    ],
)
def test_a_speed_up_stands_only_beside_answers_that_agree(
    plain: Result, fast: Result, sampling: Sampling, speedup: float | None, check: str
) -> None:
    found = compare_with(plain, fast, sampling)
    assert found["speedup"] == speedup
    assert found["check"].startswith(check)
    line = plain_line(found)
    assert ("speed-up 2.00x" in line) == (speedup == 2.0)
    if speedup is None:
        assert "no speed-up is given" in line or "ended with its first token" in line


def test_a_head_is_named_by_its_folder_too(
    generate: Any, runs: Path, tiny_folder: Path, tiny_target: Any, greedy: list[int], tmp_path: Path
) -> None:
    home = runs / resolve_target(str(tiny_folder)).name
    for place in (home / "eagle3", home / "eagle3" / "train" / "checkpoints" / "best", home / "eagle2"):
        assert json.loads(generate(PROMPT, "--head", str(place), "--json", "--no-plain")[0])["tokens"] == greedy
    foreign = specforge(random_head(tiny_target), tmp_path / "theirs", tiny_target.parts())
    assert json.loads(generate(PROMPT, "--head", str(foreign), "--json", "--no-plain")[0])["tokens"] == greedy
    with pytest.raises(DraftsmithError, match="--run old names a run of a kind"):
        generate(PROMPT, "--head", str(home / "eagle3"), "--run", "old")
    with pytest.raises(DraftsmithError, match="there is no head to start from"):
        generate(PROMPT, "--head", str(home / "nowhere"))
