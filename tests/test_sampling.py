"""Sampling: the warp against transformers', and random numbers that depend on their key alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.sampling import (
    DRAFT,
    GREEDY,
    TOKEN,
    Draws,
    Sampling,
    SlotSampling,
    draw,
    largest,
    uniform,
    warp,
)

LIMIT = 1e-6

# --- the warp ---------------------------------------------------------------------------------------------------------


def processed(logits: Tensor, tokens: list[int], s: Sampling) -> Tensor:
    """Probabilities [V] of logits [V] after transformers' processors, in the order of its `generate`."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(s.repetition_penalty)])
    if s.temperature > 0:
        steps.append(TemperatureLogitsWarper(s.temperature))
        steps += [TopKLogitsWarper(s.top_k)] if s.top_k else []
        steps += [TopPLogitsWarper(s.top_p), MinPLogitsWarper(s.min_p)]
    scores = steps(torch.tensor([tokens]), logits[None].clone())[0]
    if s.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).float()
    return scores.softmax(-1)


def many_samplings() -> list[Sampling]:
    values = itertools.product(
        (0.0, 0.3, 1.0, 1.9), (0, 1, 7, 50), (1.0, 0.9, 0.2), (0.0, 0.05, 0.4), (1.0, 1.31, 0.83)
    )
    return [Sampling(*v) for i, v in enumerate(values) if i % 5 == 0]


def slot_draws(samplings: list[Sampling], tokens: list[list[int]], vocab_size: int) -> Draws:
    slots = SlotSampling(len(samplings), vocab_size, torch.device("cpu"))
    for i, (s, t) in enumerate(zip(samplings, tokens, strict=True)):
        slots.begin(i, f"request {i}", s, torch.tensor(t))
    return slots.draws(0, len(samplings), torch.tensor([len(t) - 1 for t in tokens]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_warp_is_that_of_transformers(dtype: torch.dtype) -> None:
    """All settings in one batch, and each alone."""
    g = torch.Generator().manual_seed(0)
    samplings, size = many_samplings(), 60
    logits = torch.randn(len(samplings), 2, size, generator=g) * 3
    if dtype == torch.bfloat16:  # distinct values, so that no cut falls among equals
        grid = torch.arange(size) / 8.0 - 4
        logits = grid[torch.rand(len(samplings), 2, size, generator=g).argsort(-1)]
    tokens = torch.randint(0, size, (len(samplings), 9), generator=g).tolist()
    draws = slot_draws(samplings, tokens, size)
    assert draws.seen is not None
    got = warp(logits.to(dtype), draws.warp, draws.seen[:, None])
    for i, s in enumerate(samplings):
        want = torch.stack([processed(row, tokens[i], s) for row in logits[i]])
        torch.testing.assert_close(got[i], want, rtol=1e-5, atol=1e-6, msg=lambda m, s=s: f"{s}: {m}")
        assert torch.equal(got[i] > 0, want > 0), s
        alone = slot_draws([s], [tokens[i]], size)
        seen = None if alone.seen is None else alone.seen[:, None]
        assert torch.equal(warp(logits[i : i + 1].to(dtype), alone.warp, seen)[0], got[i]), s


def test_equals_of_the_last_token_kept_stay_in_every_batch() -> None:
    """Low precision makes equals common; which of them count must not depend on the neighbours' settings."""
    logits = torch.tensor([5.0, 4, 4, 4, 1, 0, 0]).expand(3, 1, 7)
    samplings = [Sampling(1.0, 2, 0.6), Sampling(1.0, 6, 0.9), Sampling(1.0, 0, 0.6)]
    tokens = [[0]] * 3
    together = warp(logits, slot_draws(samplings, tokens, 7).warp)
    for i, s in enumerate(samplings):
        assert torch.equal(warp(logits[:1], slot_draws([s], [[0]], 7).warp)[0], together[i])
        assert (together[i, 0] > 0).tolist() == [True] * 4 + [False] * 3
    top = logits.softmax(-1)[0, 0, :4]
    torch.testing.assert_close(together[0, 0, :4], top / top.sum())


def test_greedy_takes_the_lowest_of_equals() -> None:
    p = warp(torch.tensor([[[1.0, 3, 3, 0]]]), slot_draws([GREEDY], [[0]], 4).warp)
    assert p.tolist() == [[[0, 1, 0, 0]]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature = -0.1 must be at least 0"),
        ({"top_k": 8}, "top_k = 8 must be between 0 .* vocabulary of 7"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"min_p": 1.0}, "min_p = 1.0 must be .* below 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        SlotSampling(1, 7, torch.device("cpu")).begin(0, "r", Sampling(**values), torch.tensor([1]))


def test_a_slots_parameters_move_with_its_sequence() -> None:
    samplings = [Sampling(0.5, seed=1), Sampling(1.0, 3), Sampling(1.5, 5, 0.9, 0.1, 1.2, seed=3)]
    slots = SlotSampling(3, 9, torch.device("cpu"))
    for i, s in enumerate(samplings):
        slots.begin(i, f"r{i}", s, torch.tensor([i]))
    slots.extend(2, torch.tensor([[7, 8]]))
    slots.release(0, 2)
    after = slots.draws(0, 1, torch.tensor([4]))
    fresh = SlotSampling(1, 9, torch.device("cpu"))
    fresh.begin(0, "r2", samplings[2], torch.tensor([2, 7, 8]))
    want = fresh.draws(0, 1, torch.tensor([4]))
    assert after.seen is not None
    assert want.seen is not None
    assert torch.equal(after.seen, want.seen)
    assert (after.seeds, after.keys, after.roots) == (want.seeds, want.keys, want.roots)
    logits = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(after.probabilities(logits, after.seen), want.probabilities(logits, want.seen))
    assert slots.draws(1, 1, torch.tensor([4])).seen is None  # nothing penalised there


# --- random numbers ---------------------------------------------------------------------------------------------------


def fits_uniform(u: Tensor) -> float:
    """p-value of chi-square over 64 bins."""
    seen = torch.bincount((u * 64).long(), minlength=64).double()
    want = len(u) / 64
    return float(torch.special.gammaincc(torch.tensor(31.5).double(), ((seen - want) ** 2 / want).sum() / 2))


def test_random_numbers_are_uniform_along_every_part_of_the_key() -> None:
    n = torch.arange(100_000)
    zero = torch.zeros_like(n)
    streams = [
        uniform(n, zero, zero, TOKEN),
        uniform(zero, n, zero, TOKEN),
        uniform(zero, zero, n, TOKEN),
        uniform(zero, n << 40, zero, DRAFT + 3),
        torch.cat([uniform(zero[:100], n[:100], n[:100], i) for i in range(1000)]),
    ]
    for u in streams:
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        assert fits_uniform(u) > LIMIT
    for a, b in itertools.combinations(streams[:4], 2):
        assert len(set(a[1:].tolist()) & set(b[1:].tolist())) == 0  # all four share the key of zeros
        assert fits_uniform((a + b) % 1) > LIMIT
    for u in streams:
        assert fits_uniform((u[1:] - u[:-1]) % 1) > LIMIT  # neighbours don't depend on each other


def test_random_numbers_dont_depend_on_the_batch() -> None:
    g = torch.Generator().manual_seed(0)
    seeds, keys = torch.randint(0, 1 << 62, (2, 9), generator=g)
    positions = torch.randint(0, 9999, (9, 4), generator=g)
    together = uniform(seeds, keys, positions, 5)
    for i in range(9):
        assert torch.equal(uniform(seeds[i : i + 1], keys[i : i + 1], positions[i : i + 1], 5), together[i : i + 1])
        for j in range(4):
            assert torch.equal(uniform(seeds[i, None], keys[i, None], positions[i, j, None], 5)[0], together[i, j])


def test_a_token_without_probability_is_never_drawn() -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.rand(4000, 50, generator=g) * (torch.rand(4000, 50, generator=g) < 0.1)
    p[:, 7] += 1e-30
    for u in (torch.rand(4000, generator=g).double(), torch.zeros(4000), torch.full((4000,), 1 - 2.0**-53).double()):
        token = draw(p, u)
        assert (p.gather(1, token[:, None]) > 0).all()
    few = torch.tensor([0.0, 0.25, 0.0, 0.75]).expand(3, 4)
    assert draw(few, torch.tensor([0.0, 0.249, 0.25])).flatten().tolist() == [1, 1, 3]


def test_tokens_too_rare_for_sums_in_fp32_are_drawn() -> None:
    rare = 2.0**-27  # adds nothing to 1 in fp32
    p = torch.full((20_001,), rare)
    p[0] = 1.0
    want = torch.arange(1, 20_001, 1000)
    u = (1 + rare * (want.double() - 0.5)) / (1 + rare * 20_000)
    assert torch.equal(draw(p.expand(len(u), -1), u), want)


def test_a_tiny_temperature_is_greedy() -> None:
    """Logits over a temperature overflow long before it is 0."""
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(4))
    slots = SlotSampling(1, 50, torch.device("cpu"))
    for temperature in (1e-20, 1e-38):
        slots.begin(0, "r", Sampling(temperature=temperature), torch.tensor([1]))
        p = slots.draws(0, 1, torch.tensor([5])).probabilities(logits)
        assert torch.equal(p, torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


def test_the_largest_of_long_rows_is_the_first_of_equals() -> None:
    g = torch.Generator().manual_seed(5)
    for size in (7, 255, 4096, 4099, 49152):
        x = torch.randint(0, size // 3 + 2, (4, 3, size), generator=g).float()
        x[0, 0, size // 2] = float("nan")
        values, index = largest(x)
        assert torch.equal(index[1:], x[1:].argmax(-1))
        assert torch.equal(values[1:], x[1:].amax(-1))
        assert values[0, 0].isnan()
