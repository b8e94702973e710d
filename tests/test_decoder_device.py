"""What the decoder does for a GPU, run on a CPU: the path with kernels, captured passes, states that are recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import decoder_checks as checks
import kernel_stand_ins
import pytest
import torch
from decoder_checks import RandomTreeDrafter, every_drafter, random_prompts

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder import graphs, kernels, loop, search, types
from draftsmith.eval.decoder import verify as verify_module
from draftsmith.eval.decoder.cache import TreeCache, bucket
from draftsmith.eval.decoder.drafters import plain
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.probe import kv_shapes, tree_pass
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.heads.base import Needs

SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def every(tiny_target: Any) -> dict[str, Any]:
    return every_drafter(tiny_target)


# --- what comes to the host -------------------------------------------------------------------------------------------


def test_recorded_states_come_over_without_waiting(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's rows are taken from their copy in the step after it, or when the sequence ends."""
    taken: list[int] = []
    value = plain.Download.value

    def listen(self: Any) -> Any:
        taken.append(drafter_steps[0])
        return value(self)

    monkeypatch.setattr(plain.Download, "value", listen)
    drafter_steps = [0]

    class Counting(PlainDrafter):
        def propose(self, *args: Any) -> Any:
            drafter_steps[0] += 1
            return super().propose(*args)

    drafter = Counting(record=Needs((1, 2), last=True))
    prompt = random_prompts(tiny_target, [6])[0]
    (result,) = decode(tiny_target, drafter, [Request("r", prompt, 5, stop=frozenset())], slots=1, capacity=32)
    assert taken == [2, 3, 4, 4]  # of step 1 in step 2, ..., of the last step at the end
    aux, last = tiny_target.states(torch.tensor([prompt + result.tokens[:-1]]), Needs((1, 2), last=True))
    assert result.states is not None
    assert last is not None
    torch.testing.assert_close(result.states.float(), torch.cat((aux, last), -1)[0], rtol=0.02, atol=0.02)


def test_lookahead_takes_the_choice_that_verification_made(
    tiny_target: Any, every: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searching all logits for their largest once a step is enough."""
    searched = []
    monkeypatch.setattr(loop, "largest", lambda x: searched.append(1) or verify_module.largest(x))
    prompt = random_prompts(tiny_target, [9])[0]
    for sampling, count in ((Sampling(), 0), (SAMPLED, 1)):
        searched.clear()
        request = Request("r", prompt, 6, sampling)
        (result,) = decode(tiny_target, every["lookahead"], [request], slots=1, capacity=128)
        assert len(searched) == count * len(result.steps)


# --- the path with kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kernel_stand_ins.DRAFTERS)
def test_the_path_with_kernels_answers_as_the_other(
    tiny_target: Any, every: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, ragged batches, mixed; the target's law of all nodes in several parts."""
    prompts = random_prompts(tiny_target, [6, 11, 3])
    requests = [Request(f"s{i}", p + p, 12, dataclasses.replace(SAMPLED, seed=i)) for i, p in enumerate(prompts)]
    requests += [dataclasses.replace(r, id=f"g{r.id}", sampling=Sampling()) for r in requests]
    want = checks.run_all(tiny_target, every[name], requests, 3)
    kernel_stand_ins.install(monkeypatch)
    monkeypatch.setattr(verify_module, "_MOST_VALUES", 2000)
    got = checks.run_all(tiny_target, every[name], requests, 3)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert [r.steps for r in got] == [r.steps for r in want]


@torch.inference_mode()
def test_with_kernels_a_pass_depends_on_the_hosts_lengths_by_its_bucket_alone(
    tiny_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_stand_ins.install(monkeypatch)
    g = torch.Generator().manual_seed(1)
    made = []
    for told in ([20, 20], [0, 7], [400, 11]):
        cache = TreeCache(kv_shapes(tiny_target), 2, 500, torch.device("cpu"), torch.float32)
        for pair in cache.arenas:
            for x in pair:
                x.copy_(torch.randn(x.shape, generator=g.manual_seed(2)))
        cache.lengths[:] = torch.tensor([20, 13])
        cache.host_lengths = told
        tree = RandomTreeDrafter({}, 7)
        tree.at = {0: ([], 0), 1: ([], 0)}
        drafted = tree.random_tree(torch.tensor([5, 6]), 7)
        made.append(tree_pass(tiny_target, cache, drafted.tokens, drafted.depth, drafted.ancestors()))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_heads_larger_than_the_kernels_hold_take_the_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys or values, of any layer; the kernel itself refuses the same sizes (test_kernels.py)."""
    kernel_stand_ins.install(monkeypatch)

    def chosen(*shapes: tuple[int, int, int]) -> bool:
        return TreeCache([(1, 64, 64), *shapes], 1, 8, torch.device("cpu"), torch.float32).kernels

    most = kernels.LARGEST_HEAD
    assert chosen((2, most, most))
    assert not chosen((2, most + 1, 64))
    assert not chosen((2, 64, most + 1), (1, 64, 64))


@pytest.mark.parametrize("name", ["head-static", "head-chain"])
def test_a_known_trees_ancestors_are_packed_once(
    tiny_target: Any, every: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []
    pack = search.pack_ancestors
    for module in (search, types):
        monkeypatch.setattr(module, "pack_ancestors", lambda *x: packed.append(pack(*x)) or packed[-1])
    search._layout.cache_clear()
    trees = []
    draft = every[name].propose
    monkeypatch.setattr(every[name], "propose", lambda *x: trees.append(draft(*x)) or trees[-1])
    requests = [Request(f"r{i}", p, 9) for i, p in enumerate(random_prompts(tiny_target, [6, 11]))]
    results = list(decode(tiny_target, every[name], requests, slots=2, capacity=64))
    assert min(len(r.steps) for r in results) > 1
    assert len(packed) == (name == "head-static")
    for tree in trees:
        bits = tree.ancestors()
        assert (bits is None) == tree.is_chain
        assert bits is None or torch.equal(bits, pack(tree.parent, tree.deepest))


def test_buckets_are_few_and_close() -> None:
    ends = range(1, 70_000, 37)
    assert all(end <= bucket(end) <= max(512, end * 1.25 + 512) for end in ends)
    assert all(bucket(bucket(end)) == bucket(end) for end in ends)
    assert len({bucket(end) for end in range(32_769, 65_537)}) == 4


class FakeGraphs:
    """Instead of capturing: what was run is run again at each replay, and written to the tensors of the first time."""

    def __init__(self, states: dict[int, Any]) -> None:
        self.states, self.captures, self.replays = states, 0, 0

    def record(self, run: Callable[[], Any], pool: Any) -> Any:
        logits = run()
        held = dict(self.states)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            logits.copy_(run())
            for k, x in held.items():
                x.copy_(self.states[k])

        return logits, replay, (0, 1)


@torch.inference_mode()
def test_captured_passes_give_what_passes_give(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, chains and batches of several sizes in turn; logits, states and cached rows, with one capture a shape."""
    kernel_stand_ins.install(monkeypatch)
    needs = Needs((1, 3), last=True)
    monkeypatch.setattr(graphs, "_MOST", 2)
    caches = [TreeCache(kv_shapes(tiny_target), 3, 600, torch.device("cpu"), torch.float32) for _ in range(2)]
    with tiny_target.capture(needs) as states:
        fake = FakeGraphs(states)
        monkeypatch.setattr(graphs, "record", fake.record)
        captured = graphs.CapturedPass(tiny_target, caches[1])
        drafter = RandomTreeDrafter({}, 9, seed=3)
        drafter.at = {i: ([], 0) for i in range(3)}
        shapes = [(3, 5), (3, 5), (2, 5), (3, 5), (3, 1), (3, 5), (2, 5)]
        for b, n in shapes:
            tree = drafter.random_tree(torch.tensor([5, 6, 7][:b]), n)
            given = (tree.tokens, tree.depth, None if n == 1 else tree.ancestors())
            want = tree_pass(tiny_target, caches[0], *given)
            known = {k: x.clone() for k, x in states.items()}
            got = captured.run(*given, states)
            assert torch.equal(got, want)
            assert all(torch.equal(states[k], x) for k, x in known.items())
            for cache in caches:
                cache.keep(b, None, torch.ones(b, dtype=torch.int64), [1] * b)
        assert all(torch.equal(x, y) for one, two in zip(caches[0].arenas, caches[1].arenas, strict=True)
                   for x, y in zip(one, two, strict=True))  # fmt: skip
    assert fake.replays == len(shapes)
    assert fake.captures == 4  # (3, 5), (2, 5), (3, 1); (2, 5) gave way to it and comes again


def test_decoding_by_graphs_is_off_and_needs_the_kernels(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("r", random_prompts(tiny_target, [7])[0] * 2, 9)

    def run(**more: Any) -> list[int]:
        (result,) = decode(tiny_target, PromptLookupDrafter(), [request], slots=1, capacity=64, **more)
        return result.tokens

    want = run()
    with pytest.raises(DraftsmithError, match=r"CUDA graphs need .*float32 on cpu .*: leave graphs off"):
        run(graphs=True)
    kernel_stand_ins.install(monkeypatch)
    fake = FakeGraphs({})
    monkeypatch.setattr(graphs, "record", fake.record)
    assert run() == want
    assert fake.captures == 0
    assert run(graphs=True) == want
    assert 0 < fake.captures < fake.replays


def test_a_model_that_cannot_be_captured_is_named(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any, pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    kernel_stand_ins.install(monkeypatch)
    monkeypatch.setattr(graphs, "record", refuse)
    with pytest.raises(DraftsmithError, match=r"LlamaForCausalLM.*not permitted when stream is capturing\)"):
        list(decode(tiny_target, PlainDrafter(), [Request("r", [5], 3)], slots=1, capacity=16, graphs=True))
