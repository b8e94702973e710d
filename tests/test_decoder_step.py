"""What a step may do to the device, long prefixes, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decoder_checks as checks
import kernel_stand_ins
import pytest
import torch
from decoder_checks import NAMES, every_drafter, random_prompts
from decoder_models import save_model
from device_guard import Waited, no_waiting, waiting_allowed
from tiny import make_tiny_target

from draftsmith.eval.decoder import cache as cache_module
from draftsmith.eval.decoder import loop, search
from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.probe import forward_with_cache, kv_shapes
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.transfer import upload
from draftsmith.eval.decoder.types import pack_ancestors
from draftsmith.heads.target import Target

SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def every(tiny_target: Any) -> dict[str, Any]:
    return every_drafter(tiny_target)


# --- waiting for the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "with_kernels"),
    [*((name, False) for name in NAMES), *((name, True) for name in kernel_stand_ins.DRAFTERS)],
)
def test_a_step_waits_for_the_device_once(
    tiny_target: Any, every: dict[str, Any], name: str, with_kernels: bool, sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Drafting, the pass, verification and the commit run in a mode that forbids waiting; one fetch stands between."""
    if with_kernels:
        kernel_stand_ins.install(monkeypatch)
    count = {"steps": 0, "waits": 0}
    search._layout.cache_clear()  # laying a tree out is part of the first step

    class Guarded(loop._Session):
        def step(self) -> Any:
            count["steps"] += 1
            with no_waiting():
                return super().step()

        def _fetch(self, *args: Any) -> Any:
            with waiting_allowed() as waits:
                lines = super()._fetch(*args)
            count["waits"] += len(waits)
            return lines

    monkeypatch.setattr(loop, "_Session", Guarded)
    prompts = random_prompts(tiny_target, [7, 12, 4])
    requests = [Request(f"r{i}", p + p, 8, sampling) for i, p in enumerate(prompts)]
    results = list(decode(tiny_target, every[name], requests, slots=2, capacity=128))
    assert sum(len(r.tokens) for r in results) > 12
    assert count["steps"] > 0
    assert count["waits"] == count["steps"]


def test_the_guard_notices() -> None:
    x = torch.tensor([1, 0, 2])
    for wait in (
        lambda: x[0].item(), lambda: bool(x[0]), lambda: int(x[0]), lambda: x.tolist(), lambda: x[x > 0],
        lambda: x.nonzero(), lambda: x.unique(), lambda: x.cpu(), lambda: torch.where(x > 0), lambda: [1, 2][x[0]],
        lambda: torch.tensor([1], device="cpu"), lambda: torch.as_tensor([1]), lambda: torch.arange(3),
        lambda: torch.zeros(3, dtype=torch.int64),
    ):  # fmt: skip
        with no_waiting(), pytest.raises(Waited):
            wait()
    assert x.tolist() == [1, 0, 2]
    with no_waiting():  # what it must let pass
        assert torch.arange(3, device=x.device).shape == upload([1, 2, 3], x.device).shape


# --- long prefixes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss"])
def long_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Targets with room for several key blocks: full attention, windows of 8 between full layers, sinks."""
    folder = tmp_path_factory.mktemp("long") / request.param
    if request.param == "llama":
        make_tiny_target(folder, layers=2)
    else:
        save_model(request.param, folder)
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    target.max_positions = 4096
    return target


@pytest.mark.parametrize("block", [16, 512])
@torch.inference_mode()
def test_a_tree_over_several_key_blocks_equals_plain_forwards(
    long_target: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged prefixes that end inside, at and across block borders; 70 nodes, two words of ancestor bits."""
    monkeypatch.setattr(cache_module, "BLOCK", block)
    monkeypatch.setattr(cache_module, "exact_widths", cache_module.exact_widths.__wrapped__)
    lengths = [2 * block - 3, block + 2, 2 * block, 5] if block < 100 else [1021, 30]
    nodes, b = 70, len(lengths)
    g = torch.Generator().manual_seed(block)
    parent = torch.cat(
        (torch.full((b, 1), -1), torch.tensor([[int(torch.randint(max(0, i - 6), i, (), generator=g))
         for i in range(1, nodes)] for _ in range(b)])), 1
    )  # fmt: skip
    depth = torch.zeros(b, nodes, dtype=torch.int64)
    for i in range(1, nodes):
        depth[:, i] = depth.gather(1, parent[:, i : i + 1])[:, 0] + 1
    prompts = random_prompts(long_target, lengths, seed=block)
    tokens = torch.randint(3, 300, (b, nodes), generator=g)
    cache = TreeCache(kv_shapes(long_target), b, max(lengths) + nodes, torch.device("cpu"), torch.float32)
    for row, prompt in enumerate(prompts):
        for at in range(0, len(prompt), 300):
            part = torch.tensor([prompt[at : at + 300]])
            with cache.step(row, 1, torch.arange(part.shape[1])[None], None) as context:
                forward_with_cache(long_target, part, context.positions, cache)
            cache.advance(row, part.shape[1])
    with cache.step(0, b, depth, pack_ancestors(parent, int(depth.max()))) as context:
        logits = forward_with_cache(long_target, tokens, context.positions, cache)
    with long_target.attention():
        for row, prompt in enumerate(prompts):
            for node in (0, 1, 17, 63, 64, 69):
                path = [node]
                while path[0] > 0:
                    path.insert(0, int(parent[row, path[0]]))
                text = torch.tensor([prompt + tokens[row, path].tolist()])
                want = long_target.model(input_ids=text, use_cache=False, logits_to_keep=1).logits[0, -1]
                checks.close(logits[row, node], want, f"sequence {row}, node {node}")


@torch.inference_mode()
def test_rows_of_earlier_passes_of_a_step_are_seen(tiny_target: Any) -> None:
    """A tree that is run level by level, as a drafting network does, has the logits of the tree run at once."""
    parent = torch.tensor([[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 1, 2, 3, 0]])
    depth = torch.tensor([[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 2, 3, 3, 1]])
    tokens = torch.arange(14).view(2, 7) * 5 + 3
    bits = pack_ancestors(parent, 3)
    made = []
    for parts in ([(0, 7)], [(0, 1), (1, 3), (3, 7)]):
        cache = TreeCache(kv_shapes(tiny_target), 2, 40, torch.device("cpu"), torch.float32)
        for row, n in enumerate((9, 5)):
            with cache.step(row, 1, torch.arange(n)[None], None) as context:
                forward_with_cache(tiny_target, torch.arange(n)[None] + 4, context.positions, cache)
            cache.advance(row, n)
        logits = []
        for a, b in parts:
            with cache.step(0, 2, depth[:, :b], bits[:, a:b], earlier=a) as context:
                logits.append(forward_with_cache(tiny_target, tokens[:, a:b], context.positions, cache))
        made.append(torch.cat(logits, 1))
    torch.testing.assert_close(made[0], made[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", [508, 1020])
def test_chains_across_a_block_border_have_the_bits_of_plain_decoding(tmp_path: Path, start: int) -> None:
    target = Target.load(str(make_tiny_target(tmp_path, layers=2)), dtype=torch.float32, device="cpu")
    target.max_positions = 2048
    prompt = random_prompts(target, [start])[0]
    made = []
    for depth in (0, 3, 5):
        cache = TreeCache(kv_shapes(target), 1, start + 20, torch.device("cpu"), torch.float32)
        rows = torch.tensor([[*prompt, 7, 9, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43]])
        logits = []
        with torch.inference_mode():
            for at, stop in [(0, start), *((i, min(i + depth + 1, start + 12)) for i in
                             range(start, start + 12, depth + 1))]:  # fmt: skip
                with cache.step(0, 1, torch.arange(stop - at)[None], None) as context:
                    logits.append(forward_with_cache(target, rows[:, at:stop], context.positions, cache)[0])
                cache.advance(0, stop - at)
        made.append(torch.cat(logits[1:]))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


# --- memory -----------------------------------------------------------------------------------------------------------

_MEMORY_PROGRAM = """
import sys, torch
sys.path.insert(0, {tests!r})
from decoder_checks import RandomTreeDrafter, random_head
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.search import Dynamic
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.heads.target import Target
from draftsmith.eval.decoder.probe import kv_shapes

class Wide(RandomTreeDrafter):
    def begin(self, slot, tokens, aux, last):
        self.at[slot] = ([], 1)
    def commit(self, *args): pass

def drafter():
    if {head}:
        return make_drafter(random_head(target), target.parts(), Dynamic(10, 7, 64))
    return Wide({{}}, 64, 0.0)

target = Target.load({folder!r}, dtype=torch.float32, device="cpu")
kv_shapes(target)
list(decode(target, drafter(), [Request("warm", [5] * 600, 4)], slots=1, capacity=1024))
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again
before = kib("VmRSS")
prompt = (torch.arange({prefix}) % 300 + 3).tolist()
request = Request("r", prompt, 4, stop=frozenset())
(result,) = decode(target, drafter(), [request], slots=1, capacity={prefix} + 4 + 64)
assert len(result.tokens) == 4
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("prefix", [12288, pytest.param(32768, marks=pytest.mark.gate)])
@pytest.mark.parametrize("head", [False, True])
def test_a_long_prefix_needs_little_more_than_its_cache(tmp_path: Path, head: bool, prefix: int) -> None:
    """A long prompt and a 64-node tree: at most 10 % and 8 MiB above the K/V themselves, in a process of its own.

    With a head: its K/V and the states that it reads of the prompt are needed, too.
    """
    import os
    import subprocess
    import sys

    layers, heads, dim, hidden = 4, 1, 128, 64
    folder = make_tiny_target(tmp_path / "t", layers=layers, hidden=hidden, heads=2, kv_heads=heads, head_dim=dim,
                              positions=2 * prefix)  # fmt: skip
    program = _MEMORY_PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), prefix=prefix, head=head)
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert out.returncode == 0, out.stderr
    values = 2 * layers * heads * dim + (2 * 2 * 16 + 3 * hidden if head else 0)
    needed = values * 4 * (prefix + 512)
    used = int(out.stdout.split()[-1])
    print(f"{used / needed:.3f} of the cache")
    assert 0.9 * needed <= used <= 1.1 * needed + 2**23, f"{used / needed:.3f} of the cache"
