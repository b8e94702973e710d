"""The Triton kernels: run by its interpreter (and on a GPU where there is one), and compiled for a GPU without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not made for this machine")

from kernel_checks import CASES  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from draftsmith.errors import DraftsmithError  # noqa: E402
from draftsmith.eval.decoder import kernels  # noqa: E402
from draftsmith.eval.decoder.kernels import compaction, tree_attention, usable, verification  # noqa: E402
from draftsmith.eval.decoder.types import Proposal, chain  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024


# --- run --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What went wrong in each of the selected cases, all run by one process: Triton reads its switch at import."""
    names = [x.callspec.params["name"] for x in request.session.items if "outcomes" in getattr(x, "fixturenames", ())]
    env = {**os.environ, "TRITON_INTERPRET": "1" if request.param == "cpu" else "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).with_name("kernel_checks.py")), request.param, *dict.fromkeys(names)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    return {x["name"]: x["wrong"] for x in lines} | {"": f"the process ended early:\n{done.stderr[-3000:]}"}


@pytest.mark.parametrize("name", list(CASES))
def test_run(outcomes: dict[str, Any], name: str) -> None:
    wrong = outcomes.get(name, outcomes[""])
    assert wrong is None, wrong


# --- compile ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """One kernel as a launch would have it: pointers' types (other arguments are int32), constants, options."""

    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


def attend(dtype: str, rows: int, sizes: tuple[int, int], plain: bool) -> Build:
    """Attention; plain = no tree, window, cap, sinks, and no pieces."""
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    block = [triton.next_power_of_2(x) for x in sizes]
    rows, tiles = tree_attention._choose_tiles(rows, max(block), kind)
    types = dict.fromkeys(("q", "k", "v", "sinks"), f"*{dtype}") | dict.fromkeys(("tops", "masses"), "*fp32")
    types |= dict.fromkeys(("lengths", "depth", "ancestors"), "*i64") | dict.fromkeys(("scale", "cap"), "fp32")
    types["out"] = f"*{dtype}" if plain else "*fp32"
    constants = {
        "GROUP": 4, "D": sizes[0], "DV": sizes[1], "BLOCK_D": block[0], "BLOCK_DV": block[1], "ROWS": rows,
        "KEYS": tiles.keys, "TREE_KEYS": min(64, tiles.keys), "BITS": 64, "SPLIT": not plain,
        **dict.fromkeys(("HAS_TREE", "HAS_WINDOW", "HAS_CAP", "HAS_SINKS"), not plain),
    }  # fmt: skip
    return Build(tree_attention._attend, types, constants, tiles.warps, tiles.stages)


_WALK = {
    **dict.fromkeys(("tokens", "parent", "want", "path", "accepted", "bonus", "q_row"), "*i64"), "valid": "*i1",
    "drawn": "*i1", "column": "*i32", **dict.fromkeys(("p", "q", "p_kept", "q_kept"), "*fp32"),
    "u_token": "*fp64", "u_accept": "*fp64",
}  # fmt: skip
_SIZES = {"NODES": 64, "BLOCK": 8192, "BLOCKS": 32}
BUILDS = {
    "attend_bf16": attend("bf16", 64, (128, 128), plain=False),
    "attend_fp16_large_heads": attend("fp16", 128, (256, 256), plain=False),
    "attend_fp32_odd_sizes": attend("fp32", 16, (64, 48), plain=True),
    "merge": Build(
        tree_attention._merge,
        {**dict.fromkeys(("parts", "tops", "masses"), "*fp32"), "sinks": "*bf16", "out": "*bf16"},
        {"GROUP": 4, "DV": 128, "BLOCK_DV": 128, "HAS_SINKS": True}, 4,
    ),
    "walk_greedy": Build(verification._walk_greedy, _WALK, {"NODES": 64}, 1),
    "walk_match": Build(verification._walk_sampled, _WALK, {**_SIZES, "RATIO": False, "HAS_COLUMN": False}, 16),
    "walk_ratio": Build(verification._walk_sampled, _WALK, {**_SIZES, "RATIO": True, "HAS_COLUMN": True}, 16),
    "compact": Build(
        compaction._compact,
        {"key": "*bf16", "value": "*bf16", **dict.fromkeys(("lengths", "path", "n_rows"), "*i64")},
        {"HEADS": 8, "D": 128, "DV": 80, "BLOCK_D": 128, "BLOCK_DV": 128}, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BUILDS))
def test_compiles_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes much that the compiler doesn't."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set for the whole run: nothing can be compiled")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA devices")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build = BUILDS[name]
    names = build.kernel.arg_names
    types = {x: "constexpr" if x in build.constants else build.pointers.get(x, "i32") for x in names}
    # what a launch would find: addresses and strides are multiples of 16
    even = [i for i, x in enumerate(names) if types[x][0] == "*" or x[:2] in ("q_", "k_", "v_")]
    source = triton.compiler.ASTSource(
        build.kernel, types, build.constants, {(i,): [["tt.divisibility", 16]] for i in even}
    )
    options = {"num_warps": build.warps, "num_stages": build.stages}
    made = triton.compile(source, target=HOPPER, options=options)
    assert made.metadata.shared <= SHARED_MEMORY
    assert len(made.asm["cubin"]) > 0


# --- what the host decides --------------------------------------------------------------------------------------------


def test_pieces_fill_the_device() -> None:
    """Eight K/V heads, 32k slots in blocks of 64, two programs on each of 132 multiprocessors."""
    for sequences in (1, 8, 32):
        programs = 8 * sequences * tree_attention.choose_splits(8 * sequences, 513, 264)
        assert 0.95 * 264 <= programs <= 264
    assert tree_attention.choose_splits(8, 1, 264) == 1
    assert tree_attention.choose_splits(1, 3, 264) <= 3
    assert tree_attention.choose_splits(1000, 8, 264) == 1


def test_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert usable(torch.device("cuda"))
    assert not usable(torch.device("cpu"))
    assert not usable(torch.device("mps"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert usable(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(kernels, "_has_triton", kernels._has_triton.__wrapped__)  # asked once a process
    assert not usable(torch.device("cuda"))


def test_what_the_kernels_cannot_read_is_refused() -> None:
    q, k, v = torch.zeros(1, 4, 3, 64), torch.zeros(1, 2, 9, 64), torch.zeros(1, 2, 9, 64)
    lengths, depth, bits = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, 1)

    def run(q: Any = q, k: Any = k, v: Any = v, depth: Any = depth, earlier: int = 0) -> None:
        tree_attention.tree_attention(
            q, k, v, lengths, depth, bits, earlier=earlier, scale=1.0, window=None, softcap=None, sinks=None
        )

    for match, wrong in (
        ("don't belong together", {"k": torch.zeros(1, 3, 9, 64)}),
        ("size 512", {"v": torch.zeros(1, 2, 9, 512)}),
        ("must be contiguous", {"q": torch.zeros(1, 4, 64, 3).transpose(2, 3)}),
        (r"2 \+ 3 rows", {"earlier": 2}),
        (r"62 \+ 3 rows.*1 words", {"earlier": 62, "depth": torch.zeros(1, 65, dtype=torch.int64)}),
    ):
        with pytest.raises(DraftsmithError, match=match):
            run(**wrong)
    tree, drawn = chain(torch.zeros(1, 2, dtype=torch.int64)), torch.ones(1, 2, dtype=torch.bool)
    tree.proposal = Proposal(torch.ones(1, 1, 4), torch.zeros_like(tree.tokens), drawn, None, 1)
    with pytest.raises(ValueError, match="u_accept is missing"):
        verification.verify_sampled(tree, torch.ones(1, 2, 4), torch.zeros(1, 2).double())
