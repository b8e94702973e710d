"""Bringing files into a repository, against a server that speaks the Hub's HTTP API."""

from __future__ import annotations

import hashlib
import re

import pytest
from fake_hub import READ_ONLY, TOKEN, git_blob, talking_hub

from draftsmith import hub
from draftsmith.card import OWN_LINE
from draftsmith.errors import DraftsmithError
from draftsmith.hub import Destination, upload

CARD = "---\nlicense: other\n---\n\n# A head\n"


@pytest.fixture
def server(monkeypatch, tmp_path):
    with talking_hub(monkeypatch, tmp_path / "no-token") as fake:
        yield fake


@pytest.fixture
def files(tmp_path):
    """An export: two files that go through LFS, the mark and a card."""
    content = {
        "README.md": CARD.encode(),
        "draftsmith.json": b"{}",
        "a.safetensors": b"first" * 1000,
        "b.safetensors": b"second" * 1000,
    }
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    return {name: tmp_path / name for name in content}


def contents(files):
    return {name: path.read_bytes() for name, path in files.items()}


def test_blobs_are_named_as_git_names_them():
    assert hub.git_blob(b"Hello, World!") == "b45ef6fec89518d314f546fd6c3025367b721684"  # git hash-object
    assert hub.git_blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert git_blob(b"x") == hub.git_blob(b"x")


def test_a_first_push_creates_a_private_repository_and_makes_one_commit(server, files):
    found = upload(Destination("me/Head"), files, "the message")
    assert server.files("me/Head") == contents(files)
    assert server.repos["me/Head"].private
    assert server.repos["me/Head"].messages == ["initial commit", "the message"]
    assert (found.created, found.private, found.kept, found.others) == (True, True, [], [])
    assert found.sent == list(files)
    assert found.url == f"{server.url}/me/Head"
    assert found.commit == server.repos["me/Head"].branches["main"][-1][0]
    assert sorted(server.put) == sorted(hashlib.sha256(b).hexdigest() for b in (b"first" * 1000, b"second" * 1000))


def test_a_second_push_sends_nothing(server, files):
    upload(Destination("me/Head"), files, "first")
    server.requests.clear()
    found = upload(Destination("me/Head"), files, "second")
    assert (found.sent, found.commit, found.created) == ([], None, False)
    assert found.kept == list(files)
    assert all(line.startswith("GET") for line in server.requests)
    assert server.repos["me/Head"].messages == ["initial commit", "first"]


def test_only_what_changed_is_sent(server, files):
    upload(Destination("me/Head"), files, "first")
    server.requests.clear()
    server.put.clear()
    files["README.md"].write_text(CARD + "more\n")
    found = upload(Destination("me/Head"), files, "second")
    assert found.sent == ["README.md"]
    assert (server.put, server.count("put"), server.count("commit")) == ([], 0, 1)
    assert server.files("me/Head") == contents(files)


def test_weights_of_the_same_size_are_told_apart(server, files):
    upload(Destination("me/Head"), files, "first")
    files["a.safetensors"].write_bytes(b"other" * 1000)
    assert upload(Destination("me/Head"), files, "second").sent == ["a.safetensors"]
    assert server.files("me/Head")["a.safetensors"] == b"other" * 1000


@pytest.mark.parametrize(("public", "private"), [(False, True), (True, False)])
def test_who_may_read_is_asked_for(server, files, public, private):
    found = upload(Destination("me/Head", public=public), files, "first")
    assert server.repos["me/Head"].private is private
    assert found.private is private


def test_what_is_public_is_not_pushed_to_by_accident(server, files):
    server.add("me/Head", private=False)
    with pytest.raises(DraftsmithError, match=r"me/Head is public.*--public"):
        upload(Destination("me/Head"), files, "first")
    assert server.count("commit") == 0
    assert upload(Destination("me/Head", public=True), files, "first").private is False


def test_a_private_repository_stays_private(server, files, capsys):
    server.add("me/Head", private=True)
    assert upload(Destination("me/Head", public=True), files, "first").private is True
    assert server.repos["me/Head"].private
    assert "stays private" in capsys.readouterr().err


def test_a_branch_is_made_where_it_is_not_there(server, files):
    server.add("me/Head")
    upload(Destination("me/Head", revision="v2"), files, "first")
    assert server.files("me/Head", "v2") == contents(files)
    assert server.files("me/Head") == {}
    assert upload(Destination("me/Head", revision="v2"), files, "second").commit is None


def test_other_content_is_left_alone(server, files):
    server.add("me/Head", {"config.json": b"{}", "pytorch_model.bin": b"mine"})
    with pytest.raises(DraftsmithError, match=r"holds config.json, pytorch_model.bin, and no draftsmith.json.*another"):
        upload(Destination("me/Head"), files, "first")
    assert server.count("commit") == 0


def test_other_weights_beside_ours_are_refused_and_other_files_are_named(server, files):
    upload(Destination("me/Head"), files, "first")
    del files["b.safetensors"]
    with pytest.raises(DraftsmithError, match=r"holds b.safetensors, which this export doesn't have"):
        upload(Destination("me/Head"), files, "second")
    server.add("me/Other", {"draftsmith.json": b"{}", "notes.md": b"my own"})
    assert upload(Destination("me/Other"), files, "first").others == ["notes.md"]
    assert server.files("me/Other")["notes.md"] == b"my own"


def test_a_repository_made_on_the_hubs_page_is_taken(server, files):
    server.add("me/Head", {"README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"MIT"})
    assert upload(Destination("me/Head"), files, "first").commit is not None


def test_stale_files_go_in_the_same_commit(server, files):
    pages = ["report.json", "report.html"]
    server.add("me/Head", {"draftsmith.json": b"{}", "report.json": b"{}", "notes.md": b"mine"})
    found = upload(Destination("me/Head"), files, "first", pages)
    assert (found.deleted, found.others) == (["report.json"], ["notes.md"])
    assert server.files("me/Head") == {**contents(files), "notes.md": b"mine"}
    assert server.repos["me/Head"].messages == ["initial commit", "first"]
    assert upload(Destination("me/Head"), files, "second", pages).commit is None


def test_a_stale_file_alone_is_worth_a_commit_that_is_made_once(server, files):
    server.add("me/Head", {**contents(files), "report.html": b"old"})
    server.lost, server.faults["commit"] = {"commit"}, ["cut"]
    found = upload(Destination("me/Head"), files, "first", ["report.html"])
    assert (found.sent, found.deleted) == ([], ["report.html"])
    assert found.commit == server.repos["me/Head"].branches["main"][-1][0]
    assert server.count("commit") == 1
    assert server.files("me/Head") == contents(files)


BY_HAND = "---\nlicense: mit\n---\n\nWhat I wrote on the Hub.\n"


@pytest.mark.parametrize("there", [BY_HAND, "No metadata.\n", "---\n", "---\nlicense: mit\n---\n\ntext\n---\n"])
def test_a_card_that_was_written_on_the_hub_stays(server, files, there):
    files["README.md"].write_text(f"{CARD}{OWN_LINE}\n")
    server.add("me/Head", {"draftsmith.json": b"{}", "README.md": there.encode()})
    found = upload(Destination("me/Head"), files, "first")
    assert found.untouched == ["README.md"]
    assert sorted(found.sent) == ["a.safetensors", "b.safetensors"]
    assert server.files("me/Head") == {**contents(files), "README.md": there.encode()}
    files["README.md"].write_text(CARD + "My own.\n")
    assert upload(Destination("me/Head"), files, "second").sent == ["README.md"]
    assert server.files("me/Head") == contents(files)


@pytest.mark.parametrize("there", [f"{CARD}old\n{OWN_LINE}\n", "---\nlicense: mit\n---\n", "---\n---\n\n", ""])
def test_a_card_of_ours_or_of_the_hub_itself_is_written_anew(server, files, there):
    files["README.md"].write_text(f"{CARD}{OWN_LINE}\n")
    server.add("me/Head", {"README.md": there.encode()})
    found = upload(Destination("me/Head"), files, "first")
    assert found.untouched == []
    assert server.files("me/Head") == contents(files)


def test_without_a_token_nothing_is_asked(server, files, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DraftsmithError, match=r"needs a token.*HF_TOKEN.*hf auth login"):
        upload(Destination("me/Head"), files, "first")
    monkeypatch.setenv("HF_TOKEN", "hf_with a blank")
    with pytest.raises(DraftsmithError, match="copy it again") as caught:
        upload(Destination("me/Head"), files, "first")
    assert "blank" not in str(caught.value).replace("holds a blank", "")
    assert server.requests == []


def test_a_bad_token_is_refused_in_one_line_that_does_not_hold_it(server, files, monkeypatch, capsys):
    bad = "hf_NobodyKnowsThisOne"
    monkeypatch.setenv("HF_TOKEN", bad)
    server.echo = True
    with pytest.raises(DraftsmithError, match=r"refuses the token.*HTTP 401.*\*\*\*") as caught:
        upload(Destination("me/Head"), files, "first")
    assert bad not in str(caught.value)
    assert bad not in "".join(capsys.readouterr())
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(("token", "repo"), [(TOKEN, "someone/Head"), (READ_ONLY, "me/Head")])
def test_no_right_to_write_names_the_account(server, files, monkeypatch, token, repo):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DraftsmithError, match=rf"may not write to {repo}.*write rights to {repo.split('/')[0]}"):
        upload(Destination(repo), files, "first")


def test_a_name_that_is_taken(server, files):
    server.add("me/Head", visible=False)
    with pytest.raises(DraftsmithError, match=r"me/Head is taken.*choose another name.*HTTP 409"):
        upload(Destination("me/Head"), files, "first")


def test_a_failure_in_mid_upload_keeps_what_arrived(server, files, capsys):
    """The second large file fails for good: the first is kept, the same call goes on with the rest."""
    digest = {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in files}
    server.faults["put"] = [None, *["503"] * 99]
    with pytest.raises(
        DraftsmithError, match=r"safetensors: HTTP 503.*nothing.*to be seen.*the same command"
    ) as caught:
        upload(Destination("me/Head"), files, "first")
    assert "\n" not in str(caught.value)
    assert len(server.put) == 1
    assert server.files("me/Head") == {}
    server.faults["put"].clear()
    found = upload(Destination("me/Head"), files, "first")
    assert sorted(server.put) == sorted([digest["a.safetensors"], digest["b.safetensors"]])
    assert server.files("me/Head") == contents(files)
    assert (found.created, found.sent) == (False, list(files))


@pytest.mark.parametrize("route", ["info", "create", "info_at", "tree", "validate", "commit"])
@pytest.mark.parametrize("fault", ["503", "cut"])
def test_a_moment_of_failure_is_passed_over(server, files, route, fault):
    server.faults[route] = [fault]
    assert upload(Destination("me/Head"), files, "first").commit is not None
    assert server.files("me/Head") == contents(files)
    assert len(server.repos["me/Head"].messages) == 2


@pytest.mark.parametrize("route", ["create", "commit"])
def test_an_answer_that_is_lost_is_not_asked_for_twice(server, files, route):
    """The server did it, the connection broke before it said so: the next try sees it done."""
    server.lost, server.faults[route] = {route}, ["cut"]
    found = upload(Destination("me/Head"), files, "first")
    assert (found.sent, found.commit) == (list(files), server.repos["me/Head"].branches["main"][-1][0])
    assert server.count(route) == 1
    assert server.repos["me/Head"].messages == ["initial commit", "first"]
    assert server.files("me/Head") == contents(files)


def test_a_commit_in_the_meantime_is_not_overwritten(server, files):
    server.faults["commit"] = ["412"]
    with pytest.raises(DraftsmithError, match=r"another commit in the meantime.*HTTP 412"):
        upload(Destination("me/Head"), files, "first")


def test_a_file_that_the_server_leaves_out_is_named(server, files):
    server.ignored = {"b.safetensors"}
    with pytest.raises(DraftsmithError, match=r"took the commit without b.safetensors.*gitignore"):
        upload(Destination("me/Head"), files, "first")


def test_a_card_that_the_hub_refuses(server, files):
    files["README.md"].write_text("---\nlicense: my-own-words\n---\n")
    with pytest.raises(DraftsmithError, match=r'"license" must be valid.*--license'):
        upload(Destination("me/Head"), files, "first")
    assert server.count("put") == 0


@pytest.mark.parametrize("before", ["", "x" * 180, "x" * 195])
def test_any_other_error_is_one_line_without_the_token(server, files, monkeypatch, before):
    """The native client has errors of its own; a token at the place where the text is cut leaves no piece of it."""

    def fail(*_, **__):
        raise RuntimeError(f"{before} native\nclient with {TOKEN}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", fail)
    with pytest.raises(DraftsmithError, match=r"pushing to me/Head stopped.*the same command") as caught:
        upload(Destination("me/Head"), files, "first")
    assert "\n" not in str(caught.value)
    assert TOKEN[:6] not in str(caught.value)


def test_offline(server, files, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DraftsmithError, match=r"HF_HUB_OFFLINE is set.*--dry-run"):
        upload(Destination("me/Head"), files, "first")
    assert server.requests == []


def test_no_network(server, files, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(DraftsmithError, match=r"http://127.0.0.1:9 can't be reached.*HF_ENDPOINT"):
        upload(Destination("me/Head"), files, "first")


@pytest.mark.parametrize("name", ["Head", "a/b/c", "me/--Head", "me/He ad", "me/", "", "/Head"])
def test_names_that_are_none(name):
    with pytest.raises(DraftsmithError, match="me/Name"):
        Destination(name)


@pytest.mark.parametrize("revision", ["", "-x", "a b", "../x"])
def test_branches_that_are_none(revision):
    with pytest.raises(DraftsmithError, match=re.escape(f"--revision {revision!r}")):
        Destination("me/Head", revision=revision)
