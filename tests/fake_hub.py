"""A server that speaks the Hub's HTTP API as `huggingface_hub` uses it to push, and fails as it is told to.

Repositories have branches of commits; files that end in .safetensors or are large go through LFS, the others are blobs
of git.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from card_rules import card_problems

TOKEN, USER = "hf_ThisTokenMustNeverBePrinted", "me"
READ_ONLY = "hf_ThisOneMayOnlyRead"
LFS_FROM = 1 << 20
"""Bytes from which on a file goes through LFS, whatever its name (the Hub: 10 MB)."""


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """Commits are (hash, files by name); a branch is a list of them."""

    private: bool
    visible: bool = True
    branches: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        line = self.branches[branch]
        sha = hashlib.sha1(f"{branch}/{len(self.messages)}".encode()).hexdigest()
        line.append((sha, files))
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        commits = {sha: (sha, files) for line in self.branches.values() for sha, files in line}
        return commits.get(revision)


class FakeHub:
    """Runs in threads of this process.

    Attributes:
        repos: by namespace/name.
        requests: "METHOD route" of each request, in order; routes are the names in `_ROUTES`.
        put: sha256 of each LFS file whose bytes arrived whole.
        faults: by route, what its next requests meet, one each: a status like "503", "cut" (the connection ends), or
            None (nothing).
        lost: by route, what is done although the answer is lost.
        ignored: names that the server leaves out of commits, as a .gitignore there would.
        echo: repeat the request's Authorization header in errors.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.put: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.faults: dict[str, list[str | None]] = collections.defaultdict(list)
        self.lost: set[str] = set()
        self.ignored: set[str] = set()
        self.echo = False
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each answer, which is sent in two pieces, waits 40 ms

            def do_GET(self) -> None:
                _Request(fake, self, "GET").answer()

            def do_HEAD(self) -> None:
                _Request(fake, self, "HEAD").answer()

            def do_POST(self) -> None:
                _Request(fake, self, "POST").answer()

            def do_PUT(self) -> None:
                _Request(fake, self, "PUT").answer()

            def log_message(self, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *args: object) -> None:
                """A client that was cut off."""

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def add(self, name: str, files: dict[str, bytes] | None = None, private: bool = True, visible: bool = True) -> Repo:
        """Make a repository as the Hub's page does: with a .gitattributes."""
        repo = Repo(private, visible, {"main": []})
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})}, "initial commit")
        self.repos[name] = repo
        return repo

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """What a branch holds now, without .gitattributes."""
        found = self.repos[name].branches[branch][-1][1]
        return {path: data for path, data in found.items() if path != ".gitattributes"}

    def count(self, route: str) -> int:
        """Requests of a route so far."""
        return sum(line.split()[1] == route for line in self.requests)


@contextlib.contextmanager
def talking_hub(monkeypatch: pytest.MonkeyPatch, empty: Path) -> Iterator[FakeHub]:
    """A server that this process takes for the Hub, with a token that may write; nobody waits between tries.

    Args:
        empty: a path where no token is kept.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with FakeHub() as fake:
        for name, value in {
            "ENDPOINT": fake.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": fake.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(empty),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield fake
        close_session()


class _Request:
    """One request: what it asks for, and its answer."""

    def __init__(self, fake: FakeHub, handler: BaseHTTPRequestHandler, method: str) -> None:
        self.fake, self.handler, self.method = fake, handler, method
        self.path = urlsplit(handler.path).path
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.auth = handler.headers.get("Authorization", "")

    def answer(self) -> None:
        for name, (method, pattern) in _ROUTES.items():
            if self.method in method.split() and (match := re.fullmatch(pattern, self.path)):
                self._answer(name, [unquote(part) for part in match.groups()])
                return
        self.send(404, {"error": f"no such route: {self.method} {self.path}"})

    def _answer(self, name: str, parts: list[str]) -> None:
        with self.fake.lock:
            self.fake.requests.append(f"{self.method} {name}")
            fault = self.fake.faults[name].pop(0) if self.fake.faults[name] else None
        if fault is not None and name in self.fake.lost:
            with self.fake.lock:
                getattr(self, name)(*parts, sends=False)
        if fault == "cut":
            self.handler.close_connection = True
        elif fault is not None:
            said = f"no luck with {self.auth}" if self.fake.echo else "no luck"
            self.send(int(fault), {"error": said})
        elif name not in ("put", "verify") and self.auth not in (f"Bearer {TOKEN}", f"Bearer {READ_ONLY}"):
            said = f"Invalid credentials: {self.auth}" if self.fake.echo else "Invalid username or password."
            message = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self.send(401, {"error": said}, message)
        else:
            with self.fake.lock:
                getattr(self, name)(*parts)

    def send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.handler.send_response(status)
        for name, text in (headers or {}).items():
            self.handler.send_header(name, text)
        self.handler.send_header("Content-Type", "application/json")
        self.handler.send_header("Content-Length", str(len(data)))
        self.handler.end_headers()
        self.handler.wfile.write(data)

    def repo(self, name: str) -> Repo | None:
        """A repository that this token sees; else the answer is sent."""
        found = self.fake.repos.get(name)
        if found is None or not found.visible:
            self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def writable(self, namespace: str) -> bool:
        if self.auth == f"Bearer {TOKEN}" and namespace == USER:
            return True
        said = f"You don't have the rights to write under the namespace {namespace!r}"
        self.send(403, {"error": said}, {"X-Error-Message": said})
        return False

    # the routes

    def info(self, name: str, revision: str | None = None) -> None:
        if (repo := self.repo(name)) is None:
            return
        at = repo.at(revision or "main")
        if at is None:
            self.send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
            return
        self.send(200, {"id": name, "sha": at[0], "private": repo.private, "siblings": [], "tags": []})

    info_at = info

    def tree(self, name: str, revision: str) -> None:
        repo = self.repo(name)
        at = repo.at(revision) if repo else None
        if at is None:
            return
        entries = []
        for path, data in sorted(at[1].items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_blob(data)}
            if is_lfs(path, len(data)):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                entry["oid"] = git_blob(b"pointer of " + path.encode())
            entries.append(entry)
        self.send(200, entries)

    def read(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        at = repo.at(revision) if repo else None
        if at is None:
            return
        data = at[1][path]
        self.handler.send_response(200)
        for key, text in {"ETag": f'"{git_blob(data)}"', "X-Repo-Commit": at[0], "Content-Length": len(data)}.items():
            self.handler.send_header(key, str(text))
        self.handler.end_headers()
        if self.method == "GET":
            self.handler.wfile.write(data)

    def create(self, sends: bool = True) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization'] or USER}/{asked['name']}"
        if sends and not self.writable(name.partition("/")[0]):
            return
        if sends and name in self.fake.repos:
            self.send(409, {"error": "You already created this model repo"})
            return
        self.fake.add(name, private=asked.get("visibility") == "private" or asked.get("private") is True)
        if sends:
            self.send(200, {"url": f"{self.fake.url}/{name}", "id": name})

    def branch(self, name: str, branch: str) -> None:
        if (repo := self.repo(name)) is not None and self.writable(name.partition("/")[0]):
            repo.branches[branch] = list(repo.branches["main"])
            self.send(200, {})

    def validate(self) -> None:
        problems = card_problems(json.loads(self.body)["content"])
        found = [{"message": problem} for problem in problems]
        self.send(400 if problems else 200, {"errors": found, "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        if (repo := self.repo(name)) is None:
            return
        there = (repo.at(revision) or ("", {}))[1]
        files = []
        for file in json.loads(self.body)["files"]:
            old, lfs = there.get(file["path"]), is_lfs(file["path"], file["size"])
            oid = None if old is None else hashlib.sha256(old).hexdigest() if lfs else git_blob(old)
            ignored = file["path"] in self.fake.ignored
            mode = "lfs" if lfs else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        self.send(200, {"files": files})

    def batch(self, name: str) -> None:
        objects = []
        for asked in json.loads(self.body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.fake.stored:
                where = {"href": f"{self.fake.url}/lfs/{asked['oid']}"}
                entry["actions"] = {"upload": where, "verify": {"href": f"{self.fake.url}/lfs-verify"}}
            objects.append(entry)
        self.send(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.send(400, {"error": "other bytes than announced"})
            return
        self.fake.stored[oid] = self.body
        self.fake.put.append(oid)
        self.send(200, {})

    def verify(self) -> None:
        asked = json.loads(self.body)
        self.send(200 if asked["oid"] in self.fake.stored else 404, {})

    def commit(self, name: str, branch: str, sends: bool = True) -> None:
        repo = self.repo(name)
        if repo is None or (sends and not self.writable(name.partition("/")[0])):
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        head, there = repo.branches[branch][-1]
        if header.get("parentCommit") not in (None, head):
            self.send(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(there)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.fake.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(branch, files, header["summary"])
        if sends:
            self.send(200, {"commitUrl": f"{self.fake.url}/{name}/commit/{sha}", "commitOid": sha})


_REPO = r"([^/]+/[^/]+)"
_ROUTES = {
    "info": ("GET", rf"/api/models/{_REPO}"),
    "info_at": ("GET", rf"/api/models/{_REPO}/revision/([^/]+)"),
    "tree": ("GET", rf"/api/models/{_REPO}/tree/([^/]+)"),
    "read": ("GET HEAD", rf"/{_REPO}/resolve/([^/]+)/(.+)"),
    "create": ("POST", r"/api/repos/create"),
    "branch": ("POST", rf"/api/models/{_REPO}/branch/([^/]+)"),
    "validate": ("POST", r"/api/validate-yaml"),
    "preupload": ("POST", rf"/api/models/{_REPO}/preupload/([^/]+)"),
    "batch": ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch"),
    "put": ("PUT", r"/lfs/([0-9a-f]{64})"),
    "verify": ("POST", r"/lfs-verify"),
    "commit": ("POST", rf"/api/models/{_REPO}/commit/([^/]+)"),
}
"""What a route is called, and which requests are its own."""


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(".safetensors") or size >= LFS_FROM
