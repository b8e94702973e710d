"""`draftsmith push`: from a run's folder to a repository with export, card and report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from card_rules import card_problems
from fake_hub import TOKEN, talking_hub
from shipped import PUSHED, make_run
from typer.testing import CliRunner

from draftsmith import cli, pipeline, tour
from draftsmith.card import OWN_LINE
from draftsmith.errors import DraftsmithError
from draftsmith.eval import exported
from draftsmith.files import read_json, write_json
from draftsmith.push import PushSettings, check_asked, push, push_run, result_lines
from draftsmith.run_config import resolve


@pytest.fixture(scope="module")
def trained(tiny_target, tiny_folder, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), tiny_target, tiny_folder)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, exported for vLLM."""
    home = tmp_path / "runs" / trained.parent.name
    shutil.copytree(trained.parent, home)
    return home / "eagle3"


@pytest.fixture
def export(run):
    return run / "export" / "vllm"


@pytest.fixture
def server(monkeypatch, tmp_path):
    with talking_hub(monkeypatch, tmp_path / "no-token") as fake:
        yield fake


@pytest.fixture
def lenient(monkeypatch):
    """Doctor decodes next to nothing, and minds no head that has learned nothing."""
    monkeypatch.setattr(exported, "PROMPTS", 1)
    monkeypatch.setattr(exported, "NEW_TOKENS", 8)
    monkeypatch.setattr(exported, "IMPLAUSIBLE", 0.0)


@pytest.fixture
def settings(run):
    return PushSettings(run, "me/Head", runs=run.parent.parent)


def changed(settings, **changes):
    return PushSettings(**{**vars(settings), **changes})


def card_of(server, name="me/Head"):
    return server.files(name)["README.md"].decode()


def test_a_run_goes_to_the_hub_with_export_card_and_report(
    server, settings, run, export, tiny_folder, monkeypatch, capsys
):
    """From the checkpoint: exported, decoded by doctor, pushed. The head has learned nothing, which doctor minds."""
    shutil.rmtree(export.parent)
    monkeypatch.setattr(exported, "NEW_TOKENS", 8)
    with pytest.raises(DraftsmithError, match=r"doctor finds .*hardly any draft is accepted"):
        push(changed(settings, target=str(tiny_folder)))
    assert server.requests == []
    monkeypatch.setattr(exported, "IMPLAUSIBLE", 0.0)
    result = push(changed(settings, target=str(tiny_folder)))
    there = server.files("me/Head")
    assert sorted(there) == PUSHED
    assert there["report.json"] == (run / "report.json").read_bytes()
    assert there["model.safetensors"] == (export / "model.safetensors").read_bytes()
    assert card_problems(card_of(server)) == []
    assert (server.repos["me/Head"].private, result["private"], result["created"]) == (True, True, True)
    assert server.repos["me/Head"].messages == ["initial commit", "EAGLE-3 head for acme/tiny"]
    assert (result["folder"], result["left_out"], result["others"]) == (str(export), [], [])
    assert sorted(file["name"] for file in result["files"] if file["sent"]) == PUSHED
    assert sum(file["bytes"] for file in result["files"]) == sum(map(len, there.values()))
    told = capsys.readouterr()
    assert f"exporting for vllm into {export}" in told.err
    assert TOKEN not in told.out + told.err + json.dumps(result)
    assert not any(TOKEN.encode() in data for data in there.values())


def test_the_card_has_the_runs_facts(server, settings):
    push(settings)
    lines = card_of(server).splitlines()
    metadata = yaml.safe_load("\n".join(lines[1 : lines.index("---", 1)]))
    assert metadata["base_model"] == "acme/tiny"
    assert metadata["datasets"] == ["acme/chat"]
    assert {"speculative-decoding", "eagle3", "vllm", "sglang"} <= set(metadata["tags"])
    for line in (
        "| tokens a step, τ | 2.25 (2.10–2.40) |",
        "| prompts | recipe `mixture`: [acme/chat](https://huggingface.co/datasets/acme/chat) at `abcdef012345`, "
        "the toolkit's own prompts |",
        "| tokens | 900, 300 of them answers |",
        "| optimizer steps | 40 |",
        "| trained on documents of | at most 64 tokens |",
        "### SGLang",
        "draftsmith eval --model acme/tiny --head ./Head",
    ):
        assert line in lines
    commands = "\n".join(line for line in lines if line.startswith(("vllm serve", "python -m sglang")))
    assert commands.count("me/Head") == 2
    assert '"num_speculative_tokens": 2' in commands  # the measured chain
    assert not any(line.startswith("- vLLM:") for line in lines)
    assert any(line.startswith("- TGI: not for this engine") for line in lines)


def test_a_second_push_sends_nothing_and_says_so(server, settings, capsys):
    push(settings)
    server.requests.clear()
    capsys.readouterr()
    result = push(settings)
    assert result["commit"] is None
    assert not any(file["sent"] for file in result["files"])
    assert all(line.startswith("GET") for line in server.requests)
    assert result_lines(result) == [f"{server.url}/me/Head: everything is there already"]
    assert "exported for vllm before" in capsys.readouterr().err


def test_another_licence_sends_the_card_alone(server, settings):
    push(settings)
    server.put.clear()
    result = push(changed(settings, license="apache-2.0", message="a licence"))
    assert [file["name"] for file in result["files"] if file["sent"]] == ["README.md"]
    assert server.put == []
    assert server.repos["me/Head"].messages[-1] == "a licence"
    assert "license: apache-2.0" in card_of(server)


def test_a_dry_run_lists_files_and_asks_nobody(server, settings, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    result = push(changed(settings, dry_run=True))
    assert server.requests == []
    assert sorted(file["name"] for file in result["files"]) == PUSHED
    assert {file["sent"] for file in result["files"]} == {None}
    lines = result_lines(result)
    assert lines[0].startswith("me/Head (private) would get 6 files, ")
    assert any(line.split()[0] == "model.safetensors" and line.split()[-1] == "kB" for line in lines)
    with pytest.raises(DraftsmithError, match="needs a token"):
        push(settings)


def test_only_what_the_export_lists_is_sent(server, settings, export):
    (export / "notes.txt").write_text("my own")
    (export / ".env").write_text(f"HF_TOKEN={TOKEN}")
    result = push(changed(settings, folder=export))
    assert sorted(server.files("me/Head")) == PUSHED
    assert result["left_out"] == [".env", "notes.txt"]
    assert result_lines(result)[1] == "not part of the export, and not sent: .env, notes.txt"


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname", "gone.json", "link.json"])
def test_a_list_that_names_other_files_is_refused(server, settings, export, name):
    (export.parent / "secret.json").write_text("{}")
    (export / "link.json").symlink_to(export.parent / "secret.json")
    about, there = read_json(export / "draftsmith.json"), export / name
    size = there.stat().st_size if there.exists() else 2
    write_json(export / "draftsmith.json", {**about, "files": {**about["files"], name: size}})
    with pytest.raises(DraftsmithError, match=r"has no such file of its own|doctor finds .*gone\.json"):
        push(changed(settings, folder=export))
    assert server.requests == []


def test_what_doctor_finds_at_fault_is_not_pushed(server, settings, export):
    config = export / "config.json"
    write_json(config, {**read_json(config), "eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    with pytest.raises(DraftsmithError, match=r"doctor finds .*at fault.*draftsmith doctor"):
        push(changed(settings, folder=export))
    assert server.requests == []


def test_a_text_of_your_own_stays(server, settings, export, tiny_folder, lenient, capsys):
    push(changed(settings, dry_run=True))
    card = export / "README.md"
    assert card.read_text().splitlines()[-1] == OWN_LINE
    card.write_text("---\nlicense: mit\n---\n\nMine.\n")
    push(settings)
    assert card_of(server) == card.read_text() == "---\nlicense: mit\n---\n\nMine.\n"
    assert "your own text" in capsys.readouterr().err
    about = read_json(export / "draftsmith.json")  # as if it were an export of other weights: it is made anew
    write_json(export / "draftsmith.json", {**about, "provenance": {}})
    push(changed(settings, target=str(tiny_folder)))
    assert read_json(export / "draftsmith.json") == about
    assert card.read_text().endswith("Mine.\n")


def test_a_text_of_your_own_that_is_no_utf8_is_named(server, settings, export):
    (export / "README.md").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(DraftsmithError, match=r"README\.md is no UTF-8 text"):
        push(settings)
    assert server.requests == []


def test_a_card_that_was_changed_on_the_hub_stays_and_is_named(server, settings, export):
    push(settings)
    by_hand = b"---\nlicense: mit\n---\n\nMine.\n"
    server.repos["me/Head"].commit("main", {**server.files("me/Head"), "README.md": by_hand}, "by hand")
    result = push(changed(settings, license="mit"))
    assert server.files("me/Head")["README.md"] == by_hand
    assert any("left as it is" in line and str(export / "README.md") in line for line in result_lines(result))


def test_an_export_without_its_run(server, export, tmp_path, capsys):
    """Whoever has the directory alone can push it; the card says what the directory knows."""
    alone = tmp_path / "elsewhere"
    shutil.copytree(export, alone)
    push(PushSettings(alone, "me/Head", runs=tmp_path / "no-runs"))
    assert "| optimizer steps | 40 |" in card_of(server)
    assert "recipe" not in card_of(server)
    assert "nothing is claimed" in card_of(server)
    assert "is not in" in capsys.readouterr().err
    shutil.copyfile(export.parents[1] / "report.json", alone / "report.json")
    result = push(PushSettings(alone, "me/Head", runs=tmp_path / "no-runs"))
    assert sorted(file["name"] for file in result["files"] if file["sent"]) == ["README.md", "report.json"]
    assert "2.25 (2.10–2.40)" in card_of(server)


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_what_is_no_head_is_one_line(server, settings, tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(DraftsmithError, match=name) as caught:
        push(changed(settings, folder=tmp_path / name))
    assert "\n" not in str(caught.value)
    assert server.requests == []


def test_what_a_run_could_not_push_is_refused_before_it(server, monkeypatch):
    check_asked("me/Head", "eagle3")
    with pytest.raises(DraftsmithError, match="hydra"):
        check_asked("me/Head", "hydra")
    with pytest.raises(DraftsmithError, match="me/Name"):
        check_asked("Head", "eagle3")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DraftsmithError, match="needs a token"):
        check_asked("me/Head", "eagle3")
    assert server.requests == []


def test_run_pushes_what_it_finished(server, run, tiny_folder, lenient, monkeypatch):
    config = resolve("run", {"model": str(tiny_folder), "runs": run.parent.parent, "push": "me/Head"}, None, [])
    monkeypatch.setattr(pipeline, "run_all", lambda config: {"report": str(run / "report.json")})
    result = pipeline.COMMANDS["run"](config)
    assert sorted(server.files("me/Head")) == PUSHED
    assert result["push"]["repo"] == "me/Head"
    server.repos["me/Head"].private = False
    with pytest.raises(DraftsmithError, match=r"the run is finished .*is public.*draftsmith push .* me/Head --target "):
        pipeline.COMMANDS["run"](config)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(pipeline, "run_all", lambda config: pytest.fail("the run began"))
    with pytest.raises(DraftsmithError, match="needs a token"):
        pipeline.COMMANDS["run"](config)


def test_where_a_head_is_pushed_does_not_change_its_run(tiny_folder, tmp_path):
    flags = {"model": str(tiny_folder), "runs": tmp_path}
    keys = [
        pipeline.run_key(pipeline.Run(resolve("run", {**flags, **more}, None, []), writes=False))
        for more in ({}, {"push": "me/Head"})
    ]
    assert keys[0] == keys[1]


def test_a_tour_pushes_the_heads_that_engines_load(server, capsys):
    assert tour._pushed("me/Tiny", ["eagle3", "hydra", "medusa1"]) == {
        "eagle3": "me/Tiny-eagle3",
        "medusa1": "me/Tiny-medusa1",
    }
    assert "push: hydra stays here" in capsys.readouterr().err
    assert tour._pushed(None, ["eagle3"]) == {}
    with pytest.raises(DraftsmithError, match="none of hydra can be pushed"):
        tour._pushed("me/Tiny", ["hydra"])


def test_one_push_of_a_tour_that_fails_stops_no_other(server, run, tiny_folder, lenient, monkeypatch, capsys):
    repos = {"eagle3": "me/T-eagle3", "medusa1": "me/T-medusa1"}
    server.add(repos["medusa1"], private=False)
    found = tour._push({"medusa1": run, "eagle3": run}, repos, str(tiny_folder))
    assert found["eagle3"] == {"url": f"{server.url}/me/T-eagle3"}
    assert "is public" in found["medusa1"]["error"]
    assert "push: medusa1: " in capsys.readouterr().err


def test_the_command_that_pushes_a_run_again_can_be_pasted(monkeypatch):
    def fail(settings):
        raise DraftsmithError("no luck")

    monkeypatch.setattr("draftsmith.push.push", fail)
    with pytest.raises(DraftsmithError, match=r"afterwards: draftsmith push '/my runs/m/h' me/Head --target 'my"):
        push_run(Path("/my runs/m/h"), "me/Head", "my model")


def test_the_command_prints_json_or_lines(server, run, capfd):
    asked = ["push", str(run), "me/Head", "--runs", str(run.parent.parent)]
    done = CliRunner().invoke(cli.app, [*asked, "--dry-run"])
    assert done.exit_code == 0, done.exception
    assert done.stdout.startswith("me/Head (private) would get 6 files")
    done = CliRunner().invoke(cli.app, [*asked, "--json"])
    assert json.loads(done.stdout)["url"] == f"{server.url}/me/Head"
    assert TOKEN not in done.output + "".join(capfd.readouterr())
