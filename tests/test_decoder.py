"""The decode loop: cache truth, greedy losslessness, bits, limits, records (invariants 4 and 5)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import (
    FAMILY_SHAPES,
    SHAPES,
    PartlyRight,
    RandomTreeDrafter,
    RandomTrees,
    ScriptedEagle3,
    make_truth,
    of_family,
    pieces,
    random_head,
    random_prompts,
)
from decoder_models import save_model
from families import FAMILIES

from draftsmith.eval.decoder import loop, prefill, probe
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.eagle3 import Eagle3Drafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, StepTimer, decode
from draftsmith.eval.decoder.search import Chain
from draftsmith.heads.base import Needs
from draftsmith.heads.target import Target

LENGTHS = [1, 9, 14, 3, 22, 6, 11]  # the windows of the windowed models hold 8
NEW = 16
OTHERS = ["qwen3", "mistral", "gemma3", "gemma2", "gpt_oss", "gpt_neox"]


@pytest.fixture(scope="module")
def truth(tiny_target: Any) -> checks.Truth:
    """Greedy texts, long enough for drafts beyond the answers."""
    return make_truth(tiny_target, random_prompts(tiny_target, LENGTHS), NEW + 12)


@pytest.fixture(scope="module")
def head(tiny_target: Any) -> Any:
    return random_head(tiny_target)


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, checks.Truth]:
    folder = save_model(request.param, tmp_path_factory.mktemp("other") / request.param)
    target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    return target, make_truth(target, random_prompts(target, LENGTHS[:5]), NEW + 10)


def limits(i: int) -> int:
    """Answers of different length, so that slots are refilled at different times."""
    return NEW - 2 * (i % 4)


# --- cache truth (invariant 4) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("nodes", [1, 6, 13])
def test_target_cache_is_a_fresh_prefill_under_random_trees(
    tiny_target: Any, truth: checks.Truth, nodes: int, slots: int
) -> None:
    accepted = checks.check_cache_truth(tiny_target, RandomTreeDrafter(truth, nodes), truth, slots, limits)
    assert accepted > (10 if nodes > 1 else -1)


@pytest.mark.parametrize(("kind", "shape"), [(RandomTrees, "dynamic"), *((PartlyRight, s) for s in FAMILY_SHAPES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_cache_is_a_fresh_prefill(
    tiny_target: Any, truth: checks.Truth, family: str, kind: type[checks.Scripted], shape: str
) -> None:
    """K/V, recycled state and logits of the first draft after every step, and the answers are the target's own."""
    head = random_head(tiny_target, family=family)
    drafter = of_family(kind, family)(head, pieces(tiny_target), SHAPES[shape]).script(truth, 0.8)
    some = dict(list(truth.items())[:5])
    assert checks.check_cache_truth(tiny_target, drafter, some, 3, limits, head) > 10


def test_other_architectures_keep_a_true_cache(other: tuple[Any, checks.Truth]) -> None:
    target, truth = other
    assert checks.check_cache_truth(target, RandomTreeDrafter(truth, 9), truth, 3, limits) > 10


# --- losslessness (invariant 5) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_plain_decoding_is_dense_greedy(tiny_target: Any, truth: checks.Truth, slots: int) -> None:
    for result in checks.check_lossless(tiny_target, PlainDrafter(), truth, slots, limits):
        assert all((s.drafted, s.accepted, s.emitted) == (0, 0, 1) for s in result.steps)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_chains_are_lossless(tiny_target: Any, truth: checks.Truth, head: Any, depth: int, slots: int) -> None:
    for right in (0.6, 1.0):
        drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(depth)).script(truth, right)
        results = checks.check_lossless(tiny_target, drafter, truth, slots, limits)
        steps = [s for r in results for s in r.steps]
        assert all(s.drafted == depth for s in steps)
        if right == 1.0:
            assert all(s.accepted == depth for s in steps)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("nodes", [2, 7, 16])
def test_random_trees_are_lossless(tiny_target: Any, truth: checks.Truth, nodes: int, slots: int) -> None:
    results = checks.check_lossless(tiny_target, RandomTreeDrafter(truth, nodes, seed=nodes), truth, slots, limits)
    assert max(s.accepted for r in results for s in r.steps) > 0


@pytest.mark.parametrize("slots", [1, 4])
def test_other_architectures_are_lossless(other: tuple[Any, checks.Truth], slots: int) -> None:
    target, truth = other
    checks.check_lossless(target, PlainDrafter(), truth, slots, limits)
    checks.check_lossless(target, RandomTreeDrafter(truth, 11), truth, slots, limits)
    drafter = ScriptedEagle3(random_head(target), pieces(target), Chain(4)).script(truth, 0.7)
    checks.check_lossless(target, drafter, truth, slots, limits)


def test_an_untrained_head_through_its_family_is_lossless(tiny_target: Any, truth: checks.Truth, head: Any) -> None:
    checks.check_lossless(tiny_target, make_drafter(head, tiny_target.parts(), Chain(3)), truth, 3, limits)


# --- where answers end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
def test_an_answer_ends_at_a_stop_token_inside_an_accepted_block(
    tiny_target: Any, truth: checks.Truth, head: Any, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list(truth.values())
    # with K = 5 all right, a step emits tokens 1..6, 7..12, ...: these stops lie inside the first and second block
    stops = [texts[0][3], texts[1][8], texts[2][5]]
    monkeypatch.setattr(tiny_target, "eos_ids", stops)
    drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(5)).script(truth, 1.0)
    results = checks.check_lossless(tiny_target, drafter, truth, slots, limits)
    assert {r.finish for r in results[:3]} == {"eos"}
    assert any(r.steps[-1].emitted < r.steps[-1].accepted + 1 for r in results[:3])
    checks.check_lossless(tiny_target, RandomTreeDrafter(truth, 12), truth, slots, limits)
    checks.check_lossless(tiny_target, PlainDrafter(), truth, slots, limits)


def test_an_answer_may_end_with_its_first_token(
    tiny_target: Any, truth: checks.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_target, "eos_ids", [text[0] for text in list(truth.values())[::2]])
    results = checks.check_lossless(tiny_target, RandomTreeDrafter(truth, 5), truth, 2, limits)
    assert [r.steps for r in results[::2]] == [[]] * 4


@pytest.mark.parametrize("slots", [1, 4])
def test_max_new_tokens_is_exact(tiny_target: Any, truth: checks.Truth, head: Any, slots: int) -> None:
    drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(5)).script(truth, 1.0)
    results = checks.check_lossless(tiny_target, drafter, truth, slots, lambda i: i + 1)
    assert [len(r.tokens) for r in results] == list(range(1, len(LENGTHS) + 1))


def test_the_last_cache_row_can_be_used(tiny_target: Any, head: Any) -> None:
    """Prompt + answer + tree fill the capacity to the last row, everything is accepted."""
    depth, new = 6, 20
    prompts = random_prompts(tiny_target, [512 - depth - 1 - new, 4], seed=5)
    truth = make_truth(tiny_target, prompts, new + depth + 1)
    for slots in (1, 2):
        drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(depth)).script(truth, 1.0)
        checks.check_lossless(tiny_target, drafter, truth, slots, lambda _: new)


# --- prefill, bits, records -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_prompts_are_read_in_chunks(
    tiny_target: Any, truth: checks.Truth, head: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_ROWS", rows)
    drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(3)).script(truth, 0.6)
    checks.check_cache_truth(tiny_target, drafter, truth, 3, limits, head)
    checks.check_lossless(tiny_target, PlainDrafter(), truth, 2, limits)
    check_records(tiny_target, truth)


def test_a_shared_beginning_is_copied_not_run_again(
    tiny_target: Any, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one template: the rows that are copied are those of a fresh prefill, in target, head and records."""
    common, ends = random_prompts(tiny_target, [20], seed=8)[0], random_prompts(tiny_target, [5, 9, 3], seed=9)
    prompts = [common + end for end in ends]
    prompts += [common, common[:9] + ends[0], common[:5] + ends[1]]  # a beginning, a shorter one, one too short
    truth = make_truth(tiny_target, prompts, NEW + 12)
    rows: list[int] = []
    forward = prefill.forward_with_cache

    def counted(target: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(tokens.shape[1])
        return forward(target, tokens, *args, **kwargs)

    monkeypatch.setattr(prefill, "forward_with_cache", counted)
    drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(3)).script(truth, 0.6)
    checks.check_cache_truth(tiny_target, drafter, truth, 3, limits, head)
    assert rows == [25, 9, 3, 1, 5, 14]
    checks.check_lossless(tiny_target, PlainDrafter(), truth, 2, limits)
    check_records(tiny_target, truth)


def test_chains_have_the_bits_of_plain_decoding(
    tiny_target: Any, truth: checks.Truth, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B = 1, fp32: the logits of every emitted token are bit-identical whatever the drafts."""
    plain = logits_by_position(tiny_target, PlainDrafter(), truth, monkeypatch)
    for depth in (1, 2, 3, 4, 5, 7):
        drafter = ScriptedEagle3(head, pieces(tiny_target), Chain(depth)).script(truth, 0.8, seed=depth)
        chain = logits_by_position(tiny_target, drafter, truth, monkeypatch)
        shared = set(plain) & set(chain)
        assert len(shared) == len(plain)
        for key in shared:
            assert torch.equal(plain[key], chain[key]), f"depth {depth}: prompt {key[0]}, answer token {key[1]}"


def logits_by_position(
    target: Any, drafter: Any, truth: checks.Truth, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, int], torch.Tensor]:
    """Logits that gave each answer token: (prompt number, token number) -> [V]."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    verify = loop.verify
    where = [0, 1]

    def listen(tree: Any, logits: torch.Tensor, *args: Any) -> Any:
        verdict = verify(tree, logits, *args)
        if len(args) == 1:  # the prompt's last row
            return verdict
        for i in range(int(verdict.n_accepted[0]) + 1):
            found[where[0], where[1] + i] = logits[0, i].clone()
        where[1] += int(verdict.n_accepted[0]) + 1
        return verdict

    with monkeypatch.context() as patch:
        patch.setattr(loop, "verify", listen)
        for number, prompt in enumerate(list(truth)[:4]):
            where[:] = [number, 1]
            for _ in decode(target, drafter, [Request("r", list(prompt), NEW)], slots=1, capacity=512):
                pass
    return {k: v for k, v in found.items() if k[1] < NEW}


def check_records(target: Any, truth: checks.Truth) -> None:
    needs = Needs((1, 3), last=True)
    requests = [Request(f"r{i}", list(p), limits(i)) for i, p in enumerate(truth)]
    for result in checks.run_all(target, PlainDrafter(record=needs), requests, 3):
        tokens = result.prompt + result.tokens
        assert result.states is not None
        assert result.states.dtype == torch.bfloat16
        assert not result.states.is_inference()
        assert result.states.shape == (len(tokens) - 1, 3 * target.hidden_size)
        aux, last = target.states(torch.tensor([tokens[:-1]]), needs)
        want = torch.cat((aux, last), -1)[0]
        # rounding to bf16 is half a unit of 2^-8; noise of fp32 may tip it over
        assert ((result.states.float() - want).abs() <= 2**-8 * want.abs() + 1e-4).all()


def test_recorded_states_are_the_targets(tiny_target: Any, truth: checks.Truth) -> None:
    check_records(tiny_target, truth)


def test_a_record_may_hold_aux_states_alone(tiny_target: Any, truth: checks.Truth) -> None:
    prompt = next(iter(truth))
    drafter = PlainDrafter(record=Needs((2,)))
    (result,) = decode(tiny_target, drafter, [Request("r", list(prompt), 5)], slots=1, capacity=64)
    assert result.states is not None
    aux, last = tiny_target.states(torch.tensor([result.prompt + result.tokens[:-1]]), Needs((2,)))
    assert last is None
    torch.testing.assert_close(result.states.float(), aux[0], rtol=2**-8, atol=1e-4)


# --- manners ----------------------------------------------------------------------------------------------------------


def test_decoding_leaves_the_callers_modes_alone(tiny_target: Any, truth: checks.Truth) -> None:
    """Between results, after the end and after leaving early: gradients work, states can be taken, no hook stays."""
    requests = [Request(f"r{i}", list(p), 4) for i, p in enumerate(truth)]
    hooks = sum(len(m._forward_pre_hooks) for m in tiny_target.model.modules())
    drafter = PlainDrafter(record=Needs((1,), last=True))
    for result in decode(tiny_target, drafter, requests, slots=2, capacity=64):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        weight = torch.ones(2, requires_grad=True)
        (weight * 2).sum().backward()
        tiny_target.states(torch.tensor([result.prompt]), Needs((1,)))
    leaving = decode(tiny_target, drafter, requests, slots=2, capacity=64)
    next(leaving)
    leaving.close()
    assert sum(len(m._forward_pre_hooks) for m in tiny_target.model.modules()) == hooks


def test_requests_are_taken_as_slots_become_free(tiny_target: Any, truth: checks.Truth) -> None:
    taken = []

    def ask() -> Any:
        for i, p in enumerate(truth):
            taken.append(i)
            yield Request(f"r{i}", list(p), 6)

    results = decode(tiny_target, PlainDrafter(), ask(), slots=2, capacity=64)
    next(results)
    assert len(taken) == 2
    assert len(list(results)) == len(truth) - 1
    assert list(decode(tiny_target, PlainDrafter(), [], slots=2, capacity=64)) == []


def test_the_timer_holds_the_parts_of_a_step(tiny_target: Any, truth: checks.Truth, head: Any) -> None:
    timer = StepTimer()
    drafter = Eagle3Drafter(head, tiny_target.parts(), Chain(2))
    requests = [Request("r", list(next(iter(truth))), 12)]
    (result,) = decode(tiny_target, drafter, requests, slots=1, capacity=64, timer=timer)
    assert timer.steps == len(result.steps)
    assert 0 < timer.target < timer.step
    assert 0 < timer.draft < timer.step
    assert timer.target + timer.draft <= timer.step
    assert result.seconds == pytest.approx(timer.step)


def test_a_target_can_be_reloaded_many_times(tiny_folder: Path, truth: checks.Truth) -> None:
    """What is remembered of one target is forgotten with it: it never serves another in its place in memory."""
    gc.collect()
    remembered = len(probe._SHAPES)
    prompt, text = next(iter(truth.items()))
    for _ in range(3):
        target = Target.load(str(tiny_folder), dtype=torch.float32, device="cpu")
        (result,) = decode(target, PlainDrafter(), [Request("r", list(prompt), 3)], slots=1, capacity=64)
        assert result.tokens == checks.cut(text, 3, target.eos_ids)
        del target
    gc.collect()
    assert len(probe._SHAPES) == remembered
