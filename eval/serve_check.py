"""Command `serve-check`: the exported head in a real engine, beside the decoder here, on the same prompts.

vLLM decodes greedily in fp32, one request at a time, without speculation, with n-gram drafts, and with the exported
head as a chain. Its outputs must be equal to its own plain ones, and 1 + accepted / drafts as it counts must agree with
the decoder's `mal` for the same exported weights, token ids and stops: that is what shows that both mean the same by
layer ids, norms, rope and vocabulary offsets, which a head that loads without an error doesn't.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..files import read_json, sha256_file, write_json
from ..heads.checkpoint import CONFIG
from ..heads.config import load_config
from ..heads.formats.contracts import contract, contracts_of
from ..heads.formats.export import export_head
from ..heads.formats.export_layouts import facts_of
from ..heads.formats.load import load_any
from ..heads.loading import resolve_folder
from ..heads.resolve import TargetSource, require_reachable, resolve_target
from ..heads.target import Target, fingerprint
from ..manifest import Stage
from ..progress import say
from .benchmarks import PromptSet, builtin_set
from .decoder.drafters import make_drafter
from .decoder.drafters.plain import PlainDrafter
from .decoder.loop import decode, rows_needed
from .decoder.search import parse_shape
from .decoder.types import Drafter
from .journal import Journal, result_from_dict, result_to_dict
from .served import CONVERTED, NGRAM, PLAIN, SPECULATORS, Here, ServeSettings, served_result
from .trained import Trained, trained_head

STAGE, VERSION = "serve", 1
RESULT = "serve_check.json"
CONVERSION = "conversion"
"""Key of the journal beside the ways of serving; the decoder's answers are under `decoder/` and the way."""
_WORKER = Path(__file__).with_name("engine_worker.py")
_SPARE = 16
"""Positions beyond prompt, answer and drafts that an engine is given."""
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""In the same process, without the network; 1 GiB of cache is enough for one request."""


def serve_check(settings: ServeSettings) -> dict[str, Any]:
    """Export, serve, count, compare; what was measured already is not measured again.

    Returns:
        The content of RUNS/<model>/<head>/serve_check.json: `passed`, `outputs_equal`, `vllm_tau`, `decoder_tau`,
        `tokens_per_s` by way (prefill included), and what is behind them.

    Raises:
        DraftsmithError: no such head, no contract with vLLM for it, vLLM is not installed or fails.
    """
    source = require_reachable(resolve_target(settings.model, notify=say))
    trained = trained_head(settings.runs / source.name, settings.head)
    method = _method(trained)
    if not settings.python("vllm").is_file():
        raise DraftsmithError(f"vLLM is not installed in {settings.installed / 'vllm'}: run 'make engines' first")
    folder = resolve_folder(source.location, None if source.is_local else source.revision)
    stage = Stage.open(trained.folder / STAGE, STAGE, VERSION, _identity(trained, folder, settings))
    path = trained.folder / RESULT
    if stage.manifest is None:
        journal = Journal.open(stage.folder / "journal.jsonl")
        exports = _exports(trained, folder, stage.folder)
        here = _decoded(source, exports, settings, journal)
        served = _served(folder, exports, method, here, settings, journal, stage.folder)
        write_json(stage.folder / RESULT, served_result(settings, trained, here, served, journal.get(CONVERSION)))
        stage.finish()
    else:
        say(f"everything is measured already; to measure again delete {stage.folder}")
    result: dict[str, Any] = read_json(stage.folder / RESULT)
    write_json(path, result)
    return {**result, "path": str(path)}


def _identity(trained: Trained, folder: Path, settings: ServeSettings) -> dict[str, Any]:
    """All that the result depends on."""
    values = {
        f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name not in ("runs", "installed")
    }
    return {
        "weights": trained.weights_sha256,
        "fingerprint": fingerprint(folder),
        "settings": values,
        "engines": {name: _stamp(settings, name) for name in ("vllm", SPECULATORS)},
        "worker": sha256_file(_WORKER),
    }


def _stamp(settings: ServeSettings, engine: str) -> str | None:
    """What scripts/engines.py installed; None where the engine isn't there."""
    if not settings.python(engine).is_file():
        return None
    path = settings.installed / engine / ".draftsmith-engine"
    return path.read_text("utf-8") if path.is_file() else "made by hand"


def _method(trained: Trained) -> str:
    """What vLLM calls the head's way to draft; raises DraftsmithError where it has none, or none that is meant."""
    if trained.adapter is not None:
        raise DraftsmithError(
            f"{trained.name} drafts for its target with the adapter beside it: merge that into the target first, vLLM "
            "serves the head with the target as it is"
        )
    found = contract("vllm", _kind(trained))
    if found.layout.native:
        raise DraftsmithError(
            f"{trained.name} lies inside its target when it is served, and heads beside their target are compared "
            "here: see 'draftsmith doctor DIR --target MODEL'"
        )
    return found.method


def _kind(trained: Trained) -> str:
    """Name of the head in configs/heads/."""
    return trained.name.partition("@")[0]


def _exports(trained: Trained, target: Path, folder: Path) -> dict[str, Path]:
    """The head in fp32, in the layout that vLLM loads and, where there is one, in speculators' own."""
    found = {trained.name: "vllm"}
    facts = facts_of(load_config(trained.checkpoint / CONFIG).to_dict())
    if any(one.engine == SPECULATORS for one in contracts_of(_kind(trained), facts)):
        found[SPECULATORS] = SPECULATORS
    for engine in found.values():
        out = folder / engine
        if not out.is_dir():
            export_head(trained.checkpoint, out, engine, head=_kind(trained), dtype="fp32", target=target)
        if engine == SPECULATORS:
            _name_target(out / "config.json", target)
    return {way: folder / engine for way, engine in found.items()}


def _name_target(path: Path, target: Path) -> None:
    """Let a config in speculators' layout name the target's folder: without the network its hub id leads nowhere."""
    config = read_json(path)
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    write_json(path, config)


# --- here -------------------------------------------------------------------------------------------------------------


def _decoded(source: TargetSource, exports: Mapping[str, Path], settings: ServeSettings, journal: Journal) -> Here:
    """Decode the prompts, plainly and with the exported head as a chain."""
    say("decoding here")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        revision = None if source.is_local else source.revision
        target = Target.load(source.location, revision=revision, dtype=torch.float32)
        name, folder = next(iter(exports.items()))
        head = load_any(folder, target, as_served=True)
        drafter = make_drafter(head, target.parts(), parse_shape(f"chain:{settings.depth}"))
        room = target.max_positions - settings.depth - _SPARE
        prompts = builtin_set(
            "heldout", target.tokenizer, limit=settings.prompts, max_new_tokens=settings.max_new_tokens, room=room
        )
        found, seconds = {}, {}
        for way, one in {PLAIN: PlainDrafter(), name: drafter}.items():
            stored = journal.get(f"decoder/{way}")
            if stored is None:
                stored = _decode_all(target, one, prompts)
                journal.put(f"decoder/{way}", stored)
            found[way] = [result_from_dict(values) for values in stored["answers"]]
            seconds[way] = stored["seconds"]
        return Here(prompts, target.eos_ids, found, seconds)
    finally:
        torch.set_num_threads(before)


def _decode_all(target: Target, drafter: Drafter, prompts: PromptSet) -> dict[str, Any]:
    """One after the other, after one that warms up; plain JSON values."""
    capacity = rows_needed(prompts.requests, drafter)
    short = dataclasses.replace(prompts.requests[0], max_new_tokens=min(8, prompts.requests[0].max_new_tokens))
    list(decode(target, drafter, [short], slots=1, capacity=capacity))
    started = time.perf_counter()
    answers = [
        result_to_dict(result)
        for request in prompts.requests
        for result in decode(target, drafter, [request], slots=1, capacity=capacity)
    ]
    return {"answers": answers, "seconds": time.perf_counter() - started}


# --- in the engine ----------------------------------------------------------------------------------------------------


def _served(
    target: Path,
    exports: Mapping[str, Path],
    method: str,
    here: Here,
    settings: ServeSettings,
    journal: Journal,
    folder: Path,
) -> dict[str, dict[str, Any]]:
    """Serve the prompts in every way, each in a process of its own; what `engine_worker.serve` returns, by way."""
    drafts = {"num_speculative_tokens": settings.depth}
    ways: dict[str, dict[str, Any] | None] = {
        PLAIN: None,
        NGRAM: {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, **drafts},
    }
    ways |= {name: {"method": method, "model": str(out), **drafts} for name, out in exports.items()}
    if SPECULATORS in exports and settings.python(SPECULATORS).is_file():
        converted = folder / CONVERTED
        _convert(target, exports, converted, settings, journal, folder)
        ways[CONVERTED] = {"method": method, "model": str(converted), **drafts}
    longest = max(len(r.tokens) for r in here.prompts.requests) + settings.max_new_tokens
    found = {}
    for way, speculative in ways.items():
        stored = journal.get(way)
        if stored is None:
            say(f"serving {len(here.prompts.requests)} prompts in vLLM: {way}")
            job = {
                "do": "serve", "model": str(target), "dtype": "float32", "speculative": speculative,
                "max_model_len": longest + settings.depth + _SPARE,
                "prompts": [r.tokens for r in here.prompts.requests], "max_new_tokens": settings.max_new_tokens,
                "stop": here.stop,
            }  # fmt: skip
            stored = _work("vllm", job, settings, folder / f"vllm-{way}")
            journal.put(way, stored)
        found[way] = stored
    return found


def _convert(
    target: Path, exports: Mapping[str, Path], out: Path, settings: ServeSettings, journal: Journal, folder: Path
) -> None:
    """Have speculators load its own layout and convert the portable one into `out`."""
    if journal.get(CONVERSION) is not None and out.is_dir():
        return
    say("loading and converting in speculators")
    portable = next(iter(exports.values()))
    ids = read_json(portable / "config.json")["eagle_aux_hidden_state_layer_ids"]
    job = {
        "do": "convert", "own": str(exports[SPECULATORS]), "portable": str(portable), "converted": str(out),
        "target": str(target), "layer_ids": ids,
    }  # fmt: skip
    journal.put(CONVERSION, _work(SPECULATORS, job, settings, folder / CONVERSION))


def _work(engine: str, job: Mapping[str, Any], settings: ServeSettings, name: Path) -> dict[str, Any]:
    """Do a job in an engine's environment.

    Args:
        name: of the job's files: name.json, name.result.json and name.log, all that the engine said.

    Raises:
        DraftsmithError: it failed; names the last line that it said, and where the others are.
    """
    asked, result, log = (name.with_name(name.name + end) for end in (".json", ".result.json", ".log"))
    write_json(asked, job)
    result.unlink(missing_ok=True)
    threads = str(settings.threads)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {**_QUIET, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with open(log, "wb") as out:
        command = [str(settings.python(engine).absolute()), str(_WORKER), str(asked), str(result)]
        done = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0 or not result.is_file():
        said = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        raise DraftsmithError(f"{engine} failed: {said[-1] if said else done.returncode} (all it said: {log})")
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found
