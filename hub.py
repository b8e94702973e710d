"""One model repository on the Hub: what it holds, what it lacks, and the one commit that brings that there.

Everything goes through `huggingface_hub`, which tries uploads of large files again itself; what it tries only once
(looking, creating, committing) is tried again here. Whatever fails in the end becomes one line with the way out, and no
line holds the token.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .card import OWN_LINE
from .errors import DraftsmithError
from .files import sha256_file
from .progress import say

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

CARD = "README.md"
MARK = "draftsmith.json"
"""The file by which a repository is known as one that holds an export of ours."""
_FRESH = {".gitattributes", ".gitignore", CARD, "LICENSE"}
"""What a repository may hold that was made by hand on the Hub's page, for this very push."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Engines read every file that ends so: one of another head beside ours would be taken for a part of it."""
_TRIES, _FIRST_WAIT_S = 3, 2.0


@dataclass(frozen=True)
class Destination:
    """Where a push goes.

    Attributes:
        repo: namespace/name of a model repository.
        public: whether everybody may read it; False creates it private, and refuses one that is public.
        revision: its branch; made from `main` where it isn't there yet.
    """

    repo: str
    public: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise DraftsmithError(f"{self.repo!r} is no name on the Hub ({error}): write me/Name") from error
        if self.repo.count("/") != 1:
            raise DraftsmithError(f"{self.repo!r} names no account: write me/Name, with your own or an organisation's")
        if self.revision is not None and not re.fullmatch(r"[\w][\w./-]*", self.revision):
            raise DraftsmithError(f"--revision {self.revision!r} is no name of a branch: take letters, digits, . _ - /")

    @property
    def namespace(self) -> str:
        """The account that the repository belongs to."""
        return self.repo.partition("/")[0]


@dataclass(frozen=True)
class Upload:
    """What became of a push.

    Attributes:
        url: page of the repository.
        private: whether it is.
        created: whether this push made it.
        commit: hash of the commit; None where nothing was lacking.
        sent, kept: files of this push that were sent, and that were there already.
        deleted: stale files that this push took away.
        untouched: files of this push that were not sent, as the server's was written by hand.
        others: files of the repository that are none of this push.
    """

    url: str
    private: bool
    created: bool
    commit: str | None
    sent: list[str]
    kept: list[str]
    deleted: list[str]
    untouched: list[str]
    others: list[str]


def usable_token(repo: str) -> str:
    """The token that `huggingface_hub` finds (HF_TOKEN, or what `hf auth login` kept).

    Raises:
        DraftsmithError: there is none, or it can't be one.
    """
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise DraftsmithError(
            f"pushing to {repo} needs a token with write rights: set HF_TOKEN, or run 'hf auth login'"
        )
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise DraftsmithError("HF_TOKEN holds a blank or a character that no token has: copy it again")
    return token


def upload(to: Destination, files: Mapping[str, Path], message: str, stale: Collection[str] = ()) -> Upload:
    """Bring the files there in one commit; what the server has already is not sent.

    A card that we would write anew stays there as it is where the server's was written by hand.

    Args:
        files: where each lies here, by its name in the repository.
        message: of the commit.
        stale: names of files that the same commit deletes where they are there.

    Raises:
        DraftsmithError: no token or one that is refused, no right to write, a repository of another content or
            visibility, a card that the Hub refuses, no network, or a server that fails for good.
    """
    token = usable_token(to.repo)
    from huggingface_hub import HfApi

    repository = _Repository(HfApi(token=token, library_name="draftsmith"), to, token)
    for attempt in range(_TRIES):
        try:
            return repository.bring(files, message, stale)
        except DraftsmithError:
            raise
        except Exception as error:  # of two HTTP libraries and a native client, by version
            if attempt + 1 == _TRIES or not _may_pass(error):
                # no cause is named: the exceptions behind it may hold the request with its token
                raise DraftsmithError(repository.explain(error)) from None
            wait = _FIRST_WAIT_S * 2**attempt
            say(f"push: {repository.reason(error)}; again in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("unreachable")


class _Repository:
    """The repository while it is pushed to."""

    def __init__(self, api: HfApi, to: Destination, token: str) -> None:
        self.api, self.to, self.token = api, to, token
        self.created = self.reached = False
        self.first: tuple[list[str], list[str]] | None = None  # what it lacked, and was to lose, at the first look

    def bring(self, files: Mapping[str, Path], message: str, stale: Collection[str]) -> Upload:
        """Look, create, compare, commit, look again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        private = self._open()
        head, there = self._state()
        _refuse_foreign(self.to.repo, files, there, stale)
        by_hand = [CARD] if self._has_own_card(files, there, head) else []
        files = {name: path for name, path in files.items() if name not in by_hand}
        lacking = [name for name, path in files.items() if not _same(path, there.get(name))]
        gone = sorted(set(stale) & set(there))
        if self.first is None:
            self.first = lacking, gone
        sent, deleted = self.first
        commit = head if sent or deleted else None  # an earlier try's commit, whose answer was lost
        if lacking or gone:
            commit = self.api.create_commit(
                self.to.repo,
                [
                    *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in lacking),
                    *(CommitOperationDelete(path_in_repo=name) for name in gone),
                ],
                commit_message=message,
                revision=self.to.revision,
                parent_commit=head,
            ).oid
            self._check(files)
        return Upload(
            url=f"{self.api.endpoint}/{self.to.repo}",
            private=private,
            created=self.created,
            commit=commit,
            sent=sent,
            kept=[name for name in files if name not in sent],
            deleted=deleted,
            untouched=by_hand,
            others=sorted(set(there) - set(files) - set(gone) - _FRESH),
        )

    def _open(self) -> bool:
        """Find the repository, or create it; returns whether it is private."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = self.api.model_info(self.to.repo)
        except RepositoryNotFoundError as error:
            if _status(error) == 401:  # what the Hub also says of a token that it doesn't know
                raise
            self.reached = True
            self.api.create_repo(self.to.repo, private=not self.to.public, repo_type="model")
            self.created = True
            return not self.to.public
        self.reached = True
        private = bool(info.private)
        if not private and not self.to.public:
            raise DraftsmithError(
                f"{self.to.repo} is public: everybody would see what is pushed; give --public (PUBLIC=1) if that is "
                "meant, or another name"
            )
        if private and self.to.public and not self.created:
            say(f"push: {self.to.repo} stays private: open it in its settings on the Hub")
        return private

    def _state(self) -> tuple[str, dict[str, RepoFile]]:
        """The branch's newest commit, and its files by name."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import RevisionNotFoundError

        branch = self.to.revision or "main"
        try:
            info = self.api.model_info(self.to.repo, revision=branch)
        except RevisionNotFoundError:
            self.api.create_branch(self.to.repo, branch=branch)
            info = self.api.model_info(self.to.repo, revision=branch)
        head = str(info.sha)
        entries = self.api.list_repo_tree(self.to.repo, recursive=True, revision=head)
        return head, {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _has_own_card(self, files: Mapping[str, Path], there: Mapping[str, RepoFile], commit: str) -> bool:
        """Whether the card there was written by hand, and ours wasn't; metadata alone is what the Hub's page makes."""
        if CARD not in files or CARD not in there or _same(files[CARD], there[CARD]):
            return False
        if not _is_ours(files[CARD].read_text(encoding="utf-8")):
            return False
        with tempfile.TemporaryDirectory() as folder:
            file = self.api.hf_hub_download(self.to.repo, CARD, revision=commit, local_dir=folder)
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        return not _is_ours(text) and bool(_FRONT_MATTER.sub("", text).strip())

    def _check(self, files: Mapping[str, Path]) -> None:
        """Look whether everything has arrived: the server leaves out, without a word, what a .gitignore there names."""
        _, there = self._state()
        if left := [name for name, path in files.items() if not _same(path, there.get(name))]:
            raise DraftsmithError(
                f"{self.to.repo} took the commit without {', '.join(left)}: does a .gitignore there name it? mend "
                "that, then run the same command again"
            )

    def explain(self, error: Exception) -> str:
        """One line on an error that isn't ours: what failed, and the way out."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        if isinstance(error, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, and a push needs the network: unset it, or only look with --dry-run"
        status, reason, host = _status(error), self.reason(error), self.api.endpoint
        if isinstance(error, ValueError) and "metadata" in str(error):
            return f"{self.line(str(error))}: change the card (README.md), or its licence with --license"
        if status in _BY_STATUS and not _of_large_file(error):
            text = _BY_STATUS[status].format(repo=self.to.repo, namespace=self.to.namespace, host=host)
            return f"{text} ({reason})"
        if not self.reached:
            return (
                f"{host} can't be reached ({reason}): check the network (HF_ENDPOINT, HF_HUB_OFFLINE), then run again"
            )
        return (
            f"pushing to {self.to.repo} stopped ({reason}): nothing of it is to be seen there yet, files that arrived "
            "whole are kept; the same command goes on with the rest"
        )

    def reason(self, error: Exception) -> str:
        """What an error says, in one short line without the token; with its name where a large file was sent."""
        status = _status(error)
        said = getattr(error, "server_message", None) or getattr(error.__cause__, "server_message", None)
        if (file := _of_large_file(error)) is not None:
            what = f"{file}: {'the connection broke' if status is None else f'HTTP {status}'}"
        elif status is not None:
            what = f"HTTP {status}"
        else:
            what = str(error) or type(error).__name__
        return self.line(f"{what}, {said}" if said else what)

    def line(self, text: str) -> str:
        """A text of others as one short line without the token, which a server may have repeated."""
        return " ".join(text.replace(self.token, "***").split())[:200]


_BY_STATUS = {
    400: "{host} refuses what it was asked for {repo}: look at the reason",
    401: "{host} refuses the token: make one with write rights in its settings (Access Tokens) and set HF_TOKEN",
    402: "{host} wants this account to pay for it: mend that in its billing settings, or take another account",
    403: "the token may not write to {repo}: take a name of your own account, or a token with write rights to "
    "{namespace}",
    404: "{repo} is gone, or the token can't see it: look at {host}/{repo}, then run the same command again",
    409: "{repo} is taken by a repository that this token can't see: choose another name",
    412: "{repo} got another commit in the meantime: run the same command again",
    413: "{repo} has no room for files of this size: look at the account's storage",
}
"""What a status of the Hub means here, and the way out."""


_FRONT_MATTER = re.compile(r"\A\ufeff?---\r?\n(?:.*?\n)??---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


def _is_ours(card: str) -> bool:
    """Whether a card may be written anew."""
    return OWN_LINE in card.splitlines()


def _refuse_foreign(
    repo: str, files: Mapping[str, Path], there: Mapping[str, RepoFile], stale: Collection[str]
) -> None:
    """Refuse a repository whose content is none of ours, or that holds other weights beside ours."""
    more = sorted(set(there) - set(files) - set(stale) - _FRESH)
    if MARK not in there and (found := sorted(set(there) - _FRESH)):
        raise DraftsmithError(
            f"{repo} holds {_some(found)}, and no {MARK}: it is no export of this toolkit and is left as it is; choose "
            "another name, or another branch with --revision"
        )
    if weights := [name for name in more if name.endswith(_WEIGHTS)]:
        raise DraftsmithError(
            f"{repo} holds {_some(weights)}, which this export doesn't have: an engine would load both; delete it "
            "there first, or choose another name or --revision"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same(path: Path, remote: RepoFile | None) -> bool:
    """Whether the server's file has these very bytes."""
    if remote is None or remote.size != path.stat().st_size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == sha256_file(path))
    return bool(remote.blob_id == git_blob(path.read_bytes()))


def git_blob(data: bytes) -> str:
    """The name that git gives to a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error: its own, or that of what caused it."""
    at: BaseException | None = error
    while at is not None:
        status = getattr(getattr(at, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        at = at.__cause__
    return None


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed in a moment, and `huggingface_hub` hasn't tried it again itself."""
    from huggingface_hub.errors import HfHubHTTPError

    if _of_large_file(error) is not None:  # it has been tried six times
        return False
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    of_http_library = HfHubHTTPError.__mro__[1]  # httpx's base class, or that of the library that took its place
    return isinstance(error, (of_http_library, json.JSONDecodeError))  # a gateway's page instead of JSON


def _of_large_file(error: Exception) -> str | None:
    """Name of the file whose upload failed, None for any other error."""
    found = re.match(r"Error while uploading '([^']+)'", str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else found[1]
