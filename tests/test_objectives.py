"""What a head learns: each objective and a mix against autograd over dense fp64 logits, in value and gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from families import Case, first_case, make_documents, pack
from head_checks import total_loss
from reference import Document
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.heads import losses, objectives
from draftsmith.heads.losses import HiddenTeacher, LossRows, TopKTeacher, mixed_losses
from draftsmith.heads.objectives import OBJECTIVES, Laws
from draftsmith.run_config import resolve, to_yaml
from draftsmith.train.settings import TrainSettings, load_head_recipe

EXACT = {"rtol": 1e-10, "atol": 1e-10}
MIX = {"soft_ce": 0.7, "ce": 0.2, "tv": 1.3, "lk": 0.4}
MIXES = [
    {"soft_ce": 1.0},
    {"ce": 1.0},
    {"tv": 1.0},
    {"lk": 1.0},
    {"soft_ce": 0.5, "tv": 0.5},
    {"ce": 0.3, "lk": 2.0},
    MIX,
]
VOCAB, WIDTH, TARGET = 11, 5, 17


# --- the dense reference ----------------------------------------------------------------------------------------------


def dense_row(p: Tensor, w: Tensor, logits: Tensor, label: int, mix: dict[str, float]) -> Tensor:
    """One row's loss from the definitions; p, w [Vd] the teacher's law and weights."""
    log_q = torch.log_softmax(logits, 0)
    q = log_q.exp()
    terms = {
        "soft_ce": -(w * log_q).sum(),
        "ce": -log_q[label],
        "tv": 0.5 * (p - q).abs().sum(),
        "lk": -torch.log(torch.minimum(p, q).sum()),
    }
    return torch.stack([weight * terms[name] for name, weight in mix.items()]).sum()


@dataclasses.dataclass
class Problem:
    """Steps with rows of their own over one teacher, some of which share an output weight."""

    steps: list[LossRows]
    weights: list[Tensor]
    teacher: HiddenTeacher

    @property
    def leaves(self) -> list[Tensor]:
        return [*(s.readout for s in self.steps), *self.weights]

    def dense(self, mix: dict[str, float]) -> Tensor:
        """Sums by step."""
        p = torch.softmax(self.teacher.states @ self.teacher.lm_head[self.teacher.target_ids].t(), -1)
        sums = []
        for s in self.steps:
            rows = zip(s.readout @ s.weight.t(), s.labels.tolist(), p[s.teacher_rows], strict=True)
            sums.append(sum((dense_row(q, weigh(q), x, label, mix) for x, label, q in rows), s.readout.new_zeros(())))
        return torch.stack(sums)


def weigh(p: Tensor) -> Tensor:
    """Weights that don't add up to 1, as EAGLE-1's."""
    return 0.3 * p + p.square()


def make_problem(counts: Sequence[int] = (9, 7, 0, 4), seed: int = 0, teacher_rows: int = 12) -> Problem:
    """Steps 0 and 1 share a weight, so do 2 and 3."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    weights = [randn(VOCAB, WIDTH).requires_grad_() for _ in range(2)]
    ids = torch.randperm(TARGET, generator=g)[:VOCAB].sort().values
    teacher = HiddenTeacher(randn(teacher_rows, WIDTH), randn(TARGET, WIDTH), ids)
    steps = []
    for s, n in enumerate(counts):
        rows = torch.randperm(teacher_rows, generator=g)[:n].sort().values
        labels = torch.randint(0, VOCAB, (n,), generator=g)
        steps.append(LossRows(torch.arange(n), randn(n, WIDTH).requires_grad_(), weights[s // 2], labels, rows))
    return Problem(steps, weights, teacher)


def check_mix(problem: Problem, mix: dict[str, float], scales: list[float] | None = None) -> None:
    """Sums, guesses and all gradients, the latter of sums that are weighted by `factors`."""
    factors = torch.tensor([1.0, 0.5, 2.0, 0.25], dtype=torch.float64)[: len(problem.steps)]
    found, guesses = mixed_losses(problem.steps, mix, problem.teacher, weigh, scales)
    want = problem.dense(mix)
    torch.testing.assert_close(found, want, **EXACT)
    for s, guess in zip(problem.steps, guesses, strict=True):
        assert torch.equal(guess, (s.readout @ s.weight.t()).argmax(-1))
    got = torch.autograd.grad(found @ factors, problem.leaves)
    expected = torch.autograd.grad(want @ factors, problem.leaves, materialize_grads=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.fixture(params=[1, 3, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "rows_per_chunk", lambda *_: request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_values_and_gradients_equal_dense_ones(mix: dict[str, float]) -> None:
    check_mix(make_problem(), mix)


@pytest.mark.usefixtures("chunk")
def test_one_gradient_a_weight_is_the_same_gradient() -> None:
    """`scales` need only be in proportion to what the sums are multiplied by."""
    check_mix(make_problem(), MIX, scales=[4.0, 2.0, 8.0, 1.0])


def test_scales_out_of_proportion_are_refused() -> None:
    problem = make_problem()
    found, _ = mixed_losses(problem.steps, MIX, problem.teacher, weigh, [1.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="not in the proportion of scales"):
        (found @ torch.tensor([1.0, 0.5, 1.0, 1.0], dtype=torch.float64)).backward()


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_gradients_equal_differences(mix: dict[str, float]) -> None:
    problem = make_problem((3, 2))

    def sums(*leaves: Tensor) -> Tensor:
        steps = [
            dataclasses.replace(s, readout=x, weight=leaves[2]) for s, x in zip(problem.steps, leaves, strict=False)
        ]
        return mixed_losses(steps, mix, problem.teacher, weigh)[0]

    assert torch.autograd.gradcheck(sums, problem.leaves[:3])


def test_without_gradients_the_values_are_the_same() -> None:
    problem = make_problem()
    with torch.no_grad():
        found, _ = mixed_losses(problem.steps, MIX, problem.teacher, weigh)
    torch.testing.assert_close(found, problem.dense(MIX).detach(), **EXACT)


@pytest.mark.parametrize("scales", [None, [4.0, 2.0, 8.0, 1.0]])
def test_bf16_readouts_stay_near(scales: list[float] | None) -> None:
    """As under autocast, with weights in fp32: every gradient comes in its tensor's dtype."""
    exact = make_problem((9, 7, 3, 4))
    weights = [w.detach().float().requires_grad_() for w in exact.weights]
    steps = [
        dataclasses.replace(s, readout=s.readout.detach().bfloat16().requires_grad_(), weight=weights[i // 2])
        for i, s in enumerate(exact.steps)
    ]
    factors = torch.tensor([1.0, 0.5, 2.0, 0.25])
    teacher = HiddenTeacher(exact.teacher.states.float(), exact.teacher.lm_head.float(), exact.teacher.target_ids)
    found, _ = mixed_losses(steps, MIX, teacher, weigh, scales)
    want = exact.dense(MIX)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=0.02, atol=0.0)
    (found @ factors).backward()
    (want @ factors.double()).backward()
    for a, b in zip([*(s.readout for s in steps), *weights], exact.leaves, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0.0, atol=0.03 * float(b.grad.norm()))


def test_a_frozen_weight_gets_no_gradient() -> None:
    problem = make_problem((5, 5))
    problem.weights[0].requires_grad_(False)
    found, _ = mixed_losses(problem.steps, MIX, problem.teacher, weigh)
    found.sum().backward()
    assert problem.weights[0].grad is None
    assert problem.steps[0].readout.grad is not None


# --- by hand ----------------------------------------------------------------------------------------------------------


def by_hand(q: list[float], p: list[float], label: int, mix: dict[str, float]) -> tuple[float, list[float]]:
    """Value and gradient by the logits of one row, through the identity as output weight."""
    logits = torch.log(torch.tensor([q], dtype=torch.float64)).requires_grad_()
    teacher = TopKTeacher(
        torch.arange(len(p))[None], torch.log(torch.tensor([p], dtype=torch.float64)), torch.arange(len(p)), len(p)
    )
    zero = torch.tensor([0])
    rows = LossRows(zero, logits, torch.eye(len(q), dtype=torch.float64), torch.tensor([label]), zero)
    found, _ = mixed_losses([rows], mix, teacher, lambda x: x)
    found.sum().backward()
    assert logits.grad is not None
    return float(found.detach()), logits.grad[0].tolist()


def test_a_row_by_hand() -> None:
    """min(p, q) = (0.2, 0.3, 0.25): a = 0.75; the first token alone has q < p."""
    q, p = [0.2, 0.5, 0.3], [0.45, 0.3, 0.25]
    value, gradient = by_hand(q, p, 0, {"tv": 1.0})
    assert value == pytest.approx(0.25)
    falls = [0.2 * (0.2 - 1), 0.5 * 0.2, 0.3 * 0.2]  # q (sum q m - m), sum q m = 0.2
    assert gradient == pytest.approx(falls)
    value, gradient = by_hand(q, p, 0, {"lk": 1.0})
    assert value == pytest.approx(-math.log(0.75))
    assert gradient == pytest.approx([x / 0.75 for x in falls])
    value, gradient = by_hand(q, p, 2, {"ce": 1.0})
    assert value == pytest.approx(-math.log(0.3))
    assert gradient == pytest.approx([0.2, 0.5, -0.7])
    value, gradient = by_hand(q, p, 2, {"soft_ce": 2.0})
    assert value == pytest.approx(-2 * sum(b * math.log(a) for a, b in zip(q, p, strict=True)))
    assert gradient == pytest.approx([2 * (a - b) for a, b in zip(q, p, strict=True)])


def test_a_point_mass_makes_lk_the_cross_entropy() -> None:
    q, p = [0.2, 0.5, 0.3], [0.0, 1.0, 0.0]
    assert by_hand(q, p, 1, {"lk": 1.0}) == (pytest.approx(-math.log(0.5)), pytest.approx([0.2, -0.5, 0.3]))


@pytest.mark.parametrize("name", ["soft_ce", "tv", "lk"])
def test_a_teacher_that_says_nothing_teaches_nothing(name: str) -> None:
    """None of the top-k tokens is in the draft vocabulary."""
    assert by_hand([0.2, 0.5, 0.3], [0.0, 0.0, 0.0], 1, {name: 1.0}) == (0.0, [0.0, 0.0, 0.0])


# --- mistakes ---------------------------------------------------------------------------------------------------------


def unnormalised(laws: Laws) -> objectives.Term:
    """soft_ce: the law's part doesn't count the weights' sum."""
    return OBJECTIVES["soft_ce"].term(laws)._replace(law=1.0)


def other_label(laws: Laws) -> objectives.Term:
    laws.labels = (laws.labels + 1) % VOCAB
    return OBJECTIVES["ce"].term(laws)


def uncentred(laws: Laws) -> objectives.Term:
    """tv: the probabilities' sum isn't held at 1."""
    return OBJECTIVES["tv"].term(laws)._replace(law=0.0)


def unscaled(laws: Laws) -> objectives.Term:
    """lk: total variation's gradient."""
    return OBJECTIVES["lk"].term(laws)._replace(law=laws.given, shared=-1.0)


MISTAKES: dict[str, Callable[[Laws], objectives.Term]] = {
    "soft_ce": unnormalised, "ce": other_label, "tv": uncentred, "lk": unscaled,
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_mistakes_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**OBJECTIVES, name: OBJECTIVES[name]._replace(term=MISTAKES[name])}
    monkeypatch.setattr(objectives, "OBJECTIVES", wrong)
    with pytest.raises(AssertionError):
        check_mix(make_problem(), {name: 1.0})
    with pytest.raises(AssertionError):
        check_mix(make_problem(), MIX)


# --- heads ------------------------------------------------------------------------------------------------------------


def oracle_of(case: Case, mix: dict[str, float]) -> Any:
    """The family's own oracle with the mix in place of its loss; a feature loss, and its weights of soft_ce, stay."""
    own = case.reference.row_loss

    def row_loss(
        c: Any, doc: Document, parts: Any, ids: list[int], row: int, step: int, logits: Tensor, state: Any
    ) -> Tensor:
        p = torch.softmax(reference.teacher(doc, row + 1 + step, parts)[ids], 0)
        found = dense_row(p, p, logits, ids.index(doc.tokens[row + 2 + step]), {**mix, "soft_ce": 0.0})
        if "soft_ce" in mix:
            assert mix["soft_ce"] == 1.0, "the family's own loss is taken whole"
            found = found + own(c, doc, parts, ids, row, step, logits, state)
        return found

    return SimpleNamespace(unroll=case.reference.unroll, row_loss=row_loss)


@pytest.mark.parametrize(
    ("family", "change", "mix"),
    [
        ("eagle3", {"tv": 0.5, "ce": 0.25}, {"soft_ce": 1.0, "ce": 0.25, "tv": 0.5}),
        ("eagle3", {"soft_ce": 0, "lk": 1.0}, {"lk": 1.0}),
        ("eagle1", {"lk": 0.5}, {"soft_ce": 1.0, "lk": 0.5}),
        ("medusa", {"ce": 0, "tv": 1.0}, {"tv": 1.0}),
        ("medusa", {"lk": 0.5}, {"ce": 1.0, "lk": 0.5}),
        ("hydra", {"tv": 2.0}, {"soft_ce": 1.0, "tv": 2.0}),
    ],
)
def test_a_head_learns_what_it_is_told(family: str, change: dict[str, float], mix: dict[str, float]) -> None:
    """Through all steps, with rows outside the draft vocabulary, with one gradient a weight and one a step."""
    case = first_case(family)
    case.head.learn(change)
    assert case.head.objective == mix
    docs = make_documents(case, 2)
    leaves, steps = case.weights(), case.head.step_weights()
    want = reference.losses(oracle_of(case, mix), leaves, case.config, docs, case.parts, case.ids)
    total_loss(want, steps).backward()
    scales = [w / max(s.den, 1) for w, s in zip(steps, want, strict=True)]
    for given in (None, scales):
        case.head.zero_grad()
        found = case.head.losses(pack(docs), case.parts, scales=given)
        assert [int(s.den) for s in found] == [s.den for s in want]
        for a, b in zip(found, want, strict=True):
            assert float(a.num.detach()) == pytest.approx(float(b.num.detach()), rel=2e-6)
        total_loss(found, steps).backward()
        for name, parameter in case.head.named_parameters():
            expected = leaves[name].grad
            assert parameter.grad is not None
            assert expected is not None
            error = float((parameter.grad - expected).abs().max() / expected.abs().max())
            assert error < 2e-6, f"gradient of {name} differs from the dense one by {error:.2g} of its size"


def test_feature_losses_stay() -> None:
    """EAGLE-1 without its cross-entropy still learns features: the sum is the feature loss and the new term."""
    case = first_case("eagle1")
    batch = pack(make_documents(case))
    nums = []
    for change in ({}, {"soft_ce": 0, "tv": 1.0}, {"soft_ce": 1.0, "tv": 1.0}):
        case.head.learn(change)
        nums.append(float(case.head.losses(batch, case.parts)[0].num.detach()))
    own, without, both = nums
    case.head.config = dataclasses.replace(case.config, feature_weight=1e-9)
    case.head.learn({"soft_ce": 0})
    total_variation = float(case.head.losses(batch, case.parts)[0].num.detach())
    assert without > total_variation + 0.1
    assert both == pytest.approx(own + total_variation, rel=1e-6)


def test_the_teacher_is_asked_once_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "rows_per_chunk", lambda *_: 5)
    problem = make_problem()
    asked: list[int] = []
    own = HiddenTeacher.probabilities

    def counting(self: HiddenTeacher, rows: Tensor) -> Tensor:
        asked.extend(rows.tolist())
        return own(self, rows)

    monkeypatch.setattr(HiddenTeacher, "probabilities", counting)
    mixed_losses(problem.steps, {"ce": 1.0}, problem.teacher, weigh)
    assert asked == []
    mixed_losses(problem.steps, MIX, problem.teacher, weigh)
    assert asked == sorted({int(t) for s in problem.steps for t in s.teacher_rows})


# --- settings ---------------------------------------------------------------------------------------------------------


def test_weights_come_from_the_command_line(tmp_path: Any) -> None:
    config = resolve("train", {"head": "eagle3"}, None, ["train.objective.tv=0.5", "train.objective.soft_ce=0"])
    assert config.train.objective == {"tv": 0.5, "soft_ce": 0}
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert resolve("train", {}, tmp_path / "again.yaml", []).train.objective == config.train.objective
    assert TrainSettings().objective == {}


def test_objectives_of_the_settings_are_those_of_the_table() -> None:
    every = {f"train.objective.{name}": 1.0 for name in OBJECTIVES}
    found = load_head_recipe("medusa1", every).train
    assert list(found.objective) == list(OBJECTIVES)
    with pytest.raises(DraftsmithError, match=r"train\.objective\.kl.*'soft_ce', 'ce', 'tv' or 'lk'"):
        load_head_recipe("eagle3", {"train.objective.kl": 1.0})
    with pytest.raises(DraftsmithError, match=r"train\.objective\.tv = -1\.0"):
        load_head_recipe("eagle3", {"train.objective.tv": -1.0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"kl": 1.0}, r"no objective 'kl'; there are: soft_ce, ce, tv, lk"),
        ({"tv": -1.0}, r"objective tv has weight -1\.0"),
        ({"tv": math.nan}, "objective tv has weight nan"),
        ({"lk": math.inf}, "objective lk has weight inf"),
        ({"soft_ce": 0.0}, r"no objective has a weight above 0 \(soft_ce = 0\.0\)"),
    ],
)
def test_wrong_weights_are_named(weights: dict[str, float], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        first_case("eagle3").head.learn(weights)
