"""What a step may do to the device, long prefixes, memory, sampled answers, stop tokens, broken logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import NAMES, RandomTreeDrafter, every_drafter, make_truth, random_prompts
from decoder_models import save_model
from device_guard import Waited, no_waiting, waiting_allowed
from tiny import make_tiny_target

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder import cache as cache_module
from draftsmith.eval.decoder import loop
from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.probe import forward_with_cache, kv_shapes
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.types import pack_ancestors
from draftsmith.eval.decoder.typical import Typical
from draftsmith.heads.target import Target

SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def every(tiny_target: Any) -> dict[str, Any]:
    return every_drafter(tiny_target)


# --- waiting for the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_the_device_once(
    tiny_target: Any, every: dict[str, Any], name: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting, the pass, verification and the commit run in a mode that forbids waiting; one fetch stands between."""
    count = {"steps": 0, "waits": 0}

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
    ):  # fmt: skip
        with no_waiting(), pytest.raises(Waited):
            wait()
    assert x.tolist() == [1, 0, 2]


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


# --- sampled answers --------------------------------------------------------------------------------------------------


def sampled_requests(target: Any, sampling: Sampling) -> list[Request]:
    prompts = random_prompts(target, [6, 11, 3, 8])
    return [Request(f"s{i}", p + p, 12, dataclasses.replace(sampling, seed=i)) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_answer_does_not_depend_on_the_batch(tiny_target: Any, every: dict[str, Any], name: str) -> None:
    requests = sampled_requests(tiny_target, SAMPLED)
    requests.insert(1, dataclasses.replace(requests[0], id="greedy", sampling=Sampling()))
    alone = [checks.run_all(tiny_target, every[name], [r], 1)[0] for r in requests]
    for slots in (2, 5):
        together = checks.run_all(tiny_target, every[name], requests, slots)
        assert [r.tokens for r in together] == [r.tokens for r in alone]
        assert [r.steps for r in together] == [r.steps for r in alone]


POINT_MASSES = [n for n in NAMES if not (n.endswith(("chain", "static")))]


@pytest.mark.parametrize("name", POINT_MASSES)
def test_drafts_that_are_not_drawn_leave_a_sampled_answer_as_it_is(
    tiny_target: Any, every: dict[str, Any], name: str
) -> None:
    """Token for token: they read the random number of plain decoding at every position."""
    for sampling in (SAMPLED, Sampling(temperature=1.5), Sampling(repetition_penalty=1.5)):
        requests = sampled_requests(tiny_target, sampling)
        plain = checks.run_all(tiny_target, PlainDrafter(), requests, 2)
        other = checks.run_all(tiny_target, every[name], requests, 2)
        assert [r.tokens for r in other] == [r.tokens for r in plain]


@pytest.mark.parametrize("name", ["head-chain", "head-static", "model-chain", "model-static", "union-chain"])
def test_drawn_drafts_of_the_target_itself_are_accepted(tiny_target: Any, every: dict[str, Any], name: str) -> None:
    """q = p: every draft of the target as its own draft model is accepted; a random head's are not."""
    results = checks.run_all(tiny_target, every[name], sampled_requests(tiny_target, Sampling(temperature=1.0)), 2)
    steps = [s for r in results for s in r.steps]
    share = sum(s.accepted for s in steps) / sum(s.drafted for s in steps)
    assert (share > 0.99) == name.startswith("model")


def test_another_seed_gives_another_answer(tiny_target: Any) -> None:
    prompt = random_prompts(tiny_target, [9])[0]
    made = set()
    for seed in range(4):
        request = Request("r", prompt, 12, Sampling(temperature=1.0, seed=seed))
        (result,) = decode(tiny_target, PlainDrafter(), [request], slots=1, capacity=64)
        made.add(tuple(result.tokens))
    assert len(made) == 4


def test_typical_acceptance_is_reported_as_lossy(tiny_target: Any, every: dict[str, Any]) -> None:
    requests = sampled_requests(tiny_target, Sampling(temperature=1.0))
    requests.append(dataclasses.replace(requests[0], id="greedy", sampling=Sampling()))
    results = list(
        decode(tiny_target, every["head-top"], requests, slots=2, capacity=128, typical=Typical(0.001, 0.001))
    )
    assert {r.id: r.lossy for r in results} == {f"s{i}": True for i in range(4)} | {"greedy": False}
    assert sum(s.accepted for r in results for s in r.steps) > 5
    assert not any(r.lossy for r in decode(tiny_target, every["head-top"], requests, slots=2, capacity=128))


# --- ends and errors --------------------------------------------------------------------------------------------------


def test_a_request_may_bring_its_own_stop_tokens(tiny_target: Any) -> None:
    prompts = random_prompts(tiny_target, [5, 9])
    truth = make_truth(tiny_target, prompts, 30)
    texts = list(truth.values())
    stops = [frozenset({texts[0][7], texts[0][4]}), frozenset()]
    requests = [Request(f"r{i}", p, 16, stop=s) for i, (p, s) in enumerate(zip(prompts, stops, strict=True))]
    for drafter in (PlainDrafter(), RandomTreeDrafter(truth, 9, right=0.9)):
        first, second = checks.run_all(tiny_target, drafter, requests, 2)
        assert (first.tokens, first.finish) == (checks.cut(texts[0], 16, list(stops[0])), "eos")
        assert len(first.tokens) <= 5
        assert (second.tokens, second.finish) == (texts[1][:16], "length")


@pytest.mark.parametrize("where", ["its prompt", "step 3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_named(
    tiny_folder: Path, where: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(str(tiny_folder), dtype=torch.float32, device="cpu")
    calls = []
    forward = target.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) == (1 if where == "its prompt" else 5):  # two prompts, then steps of both
            out.logits[-1, -1, 7] = value
        return out

    kv_shapes(target)
    monkeypatch.setattr(target.model, "forward", broken)
    requests = [Request("good", [5, 6, 7], 9), Request("bad", [8, 9], 9)]
    name = "bad" if where == "its prompt" else "good"  # the shorter prompt is read first
    with pytest.raises(DraftsmithError, match=rf"request '{name}', {where}: the target's logits are not finite"):
        list(decode(target, PlainDrafter(), requests, slots=2, capacity=64))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=-1), "temperature = -1 must be at least 0"),
        (Sampling(top_k=321), "top_k = 321 must be between 0 .= all. and the vocabulary of 320"),
        (Sampling(top_p=0), "top_p = 0 must be above 0"),
        (Sampling(min_p=1.0), "min_p = 1.0"),
        (Sampling(repetition_penalty=0), "repetition_penalty = 0"),
        (Sampling(temperature=float("inf")), "temperature = inf"),
        (Sampling(temperature=float("nan")), "temperature = nan"),
        (Sampling(repetition_penalty=float("inf")), "repetition_penalty = inf"),
        (Sampling(seed=1 << 63), "seed = 9223372036854775808 must be a whole number of 64 bits"),
    ],
)
def test_sampling_values_out_of_range_are_named(tiny_target: Any, sampling: Sampling, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        list(decode(tiny_target, PlainDrafter(), [Request("r", [5], 3, sampling)], slots=1, capacity=16))


def test_a_list_is_checked_before_work_starts(tiny_target: Any) -> None:
    told: list[str] = []
    requests = [Request("good", [5, 6], 3), Request("bad", [], 3)]
    with pytest.raises(DraftsmithError, match="'bad' has an empty prompt"):
        list(decode(tiny_target, PlainDrafter(), requests, slots=1, capacity=16, on_token=lambda n, _: told.append(n)))
    assert told == []


def test_slots_and_capacity_may_be_anything(tiny_target: Any) -> None:
    with pytest.raises(DraftsmithError, match="slots = 0"):
        list(decode(tiny_target, PlainDrafter(), [Request("r", [5], 3)], slots=0, capacity=16))
    with pytest.raises(DraftsmithError, match="exceed the target's context of 512"):  # not an allocator's complaint
        list(decode(tiny_target, PlainDrafter(), [Request("r", [5], 10**9)], slots=1, capacity=10**9 + 2))


def test_many_slots_are_lossless_too(tiny_target: Any) -> None:
    """Prompts are sorted, admitted some at a time, and read together; windows of exact bits don't hold there."""
    prompts = [[*random_prompts(tiny_target, [12], seed=1)[0], *p] for p in random_prompts(tiny_target, [3, 9, 1] * 11)]
    truth = make_truth(tiny_target, prompts, 9)
    for drafter in (PlainDrafter(), RandomTreeDrafter(truth, 6)):
        checks.check_lossless(tiny_target, drafter, truth, 20, lambda i: 9 - i % 5)


def test_the_callback_runs_in_the_callers_mode(tiny_target: Any) -> None:
    modes = []

    def listen(_name: str, tokens: list[int]) -> None:
        modes.append((torch.is_inference_mode_enabled(), torch.tensor(tokens).is_inference()))

    list(decode(tiny_target, PlainDrafter(), [Request("r", [5], 3)], slots=1, capacity=16, on_token=listen))
    assert set(modes) == {(False, False)}


# --- memory -----------------------------------------------------------------------------------------------------------

_PREFIX, _NODES = 32 * 1024, 64
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
        return make_drafter(random_head(target), target.embed, Dynamic(10, 7, 64))
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
@pytest.mark.parametrize("head", [False, True])
def test_a_long_prefix_needs_little_more_than_its_cache(tmp_path: Path, head: bool) -> None:
    """32k tokens and a 64-node tree: at most 20 % above the K/V themselves, in a process of its own.

    With a head: its K/V and the states that it reads of the prompt are needed, too.
    """
    import os
    import subprocess
    import sys

    layers, heads, dim, hidden = 4, 1, 128, 64
    folder = make_tiny_target(tmp_path / "t", layers=layers, hidden=hidden, heads=2, kv_heads=heads, head_dim=dim,
                              positions=2 * _PREFIX)  # fmt: skip
    program = _MEMORY_PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), prefix=_PREFIX, head=head)
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert out.returncode == 0, out.stderr
    values = 2 * layers * heads * dim + (2 * 2 * 16 + 3 * hidden if head else 0)
    needed = values * 4 * (_PREFIX + 512)
    used = int(out.stdout.split()[-1])
    print(f"{used / needed:.3f} of the cache")
    assert 0.9 * needed <= used <= 1.2 * needed, f"{used / needed:.3f} of the cache"
