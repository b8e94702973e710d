"""Sampled answers, stop tokens, broken logits, requests that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import NAMES, RandomTreeDrafter, every_drafter, make_truth, random_prompts

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.probe import kv_shapes
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.typical import Typical
from draftsmith.heads.target import Target

SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def every(tiny_target: Any) -> dict[str, Any]:
    return every_drafter(tiny_target)


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
