"""Validation: figures in one pass, decoded tau beside tau_walk, the best checkpoint, early stop, room in the budget."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import absolute_ids
from safetensors.torch import load_file
from train_worker import make_fit, make_store, recipe

from draftsmith.data_recipes.store import ChunkMeta, Document, FeatureStore, build_index, write_chunk
from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.network import HeadDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.search import Chain
from draftsmith.heads.checkpoint import load_head
from draftsmith.heads.target import Target
from draftsmith.train.checkpoint import RunState
from draftsmith.train.decoded import DecodedValidation, held_out_prompts
from draftsmith.train.step import TrainStep
from draftsmith.train.validate import walk

DEPTH = 4


@pytest.fixture(scope="module")
def store(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tiny_target, tmp_path_factory.mktemp("store") / "features", new_tokens=24)


@pytest.fixture(scope="module")
def load(tiny_folder: Path) -> Any:
    return functools.partial(Target.load, str(tiny_folder), dtype=torch.float32, device="cpu")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def learned(store: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[int]]:
    """(train step, store, training documents) of a head that knows about half of the documents by heart."""
    from draftsmith.train.fit import fit

    settings = recipe({"steps": DEPTH}, steps=40, token_budget=700, lr_matrix=0.04, lr_other=0.02, validate_every=40)
    chosen, opened, parts, head = make_fit(store, tiny_folder, settings)
    parts = dataclasses.replace(parts, lm_head=parts.lm_head * 8)  # the random target's laws are almost flat
    fit(chosen, opened, parts, head, tmp_path_factory.mktemp("learned"))
    documents = [i for i in range(len(opened)) if opened.split(i) == "train"]
    return TrainStep(head, parts, torch.float32), opened, documents


# --- one pass ---------------------------------------------------------------------------------------------------------


def test_figures_and_walk_come_from_one_pass(learned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.data_recipes.packing import make_batch
    from draftsmith.train.batches import BatchPlan
    from draftsmith.train.ranks import Ranks
    from draftsmith.train.validate import validate

    step, opened, documents = learned
    plan = BatchPlan.over(opened, documents, 96, 64, seed=0)
    expected = [0, 0]
    for i in documents:
        right, supervised = step.head.matches(make_batch(opened, [i], 64).to("cpu", torch.float32), step.parts, DEPTH)
        expected = [a + b for a, b in zip(expected, walk(right, supervised[0], DEPTH), strict=True)]
    unroll, calls = step.head.unroll, []
    monkeypatch.setattr(step.head, "unroll", lambda *args: calls.append(1) or unroll(*args))
    found = validate(step, opened, plan, DEPTH, Ranks(0, 1, torch.device("cpu")))
    assert len(calls) == len(plan.epoch(0)) > 1
    assert [found["walk_tokens"], found["walk_steps"]] == expected
    assert found["tau_walk"] > 1.3, "there is something to walk over"
    assert len(found["expected_acceptance"]) == len(found["acceptance_conditional"]) == DEPTH


def test_a_document_that_is_not_finite_is_left_out(learned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train import validate as module
    from draftsmith.train.batches import BatchPlan
    from draftsmith.train.ranks import Ranks

    step, opened, documents = learned
    original, alone = module.make_batch, Ranks(0, 1, torch.device("cpu"))
    bad = documents[1]

    def poisoned(store: Any, indices: Any, max_length: int) -> Any:
        batch = original(store, indices, max_length)
        if bad in indices:
            batch.features[:] = float("inf")
        return batch

    rest = BatchPlan.over(opened, [i for i in documents if i != bad], 96, 64, seed=0)
    expected = module.validate(step, opened, rest, DEPTH, alone)
    monkeypatch.setattr(module, "make_batch", poisoned)
    found = module.validate(step, opened, BatchPlan.over(opened, documents, 96, 64, seed=0), DEPTH, alone)
    assert found.pop("left_out") == [opened.ids[bad]]
    assert expected.pop("left_out") == []
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    with pytest.raises(DraftsmithError, match="all 1 held-out documents are not finite"):
        module.validate(step, opened, BatchPlan.over(opened, [bad], 96, 64, seed=0), DEPTH, alone)


def test_each_of_several_objectives_has_a_figure(learned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train.batches import BatchPlan
    from draftsmith.train.ranks import Ranks
    from draftsmith.train.validate import validate

    step, opened, documents = learned
    plan = BatchPlan.over(opened, documents[:4], 96, 64, seed=0)
    alone = Ranks(0, 1, torch.device("cpu"))
    assert not any(name.startswith("loss_soft") for name in validate(step, opened, plan, DEPTH, alone))
    monkeypatch.setattr(step.head, "objective", {"soft_ce": 1.0, "tv": 0.5})
    found = validate(step, opened, plan, DEPTH, alone)
    assert 0 < found["loss_tv"] < found["loss_soft_ce"]
    assert found["loss"] == pytest.approx(found["loss_soft_ce"] + 0.5 * found["loss_tv"], rel=1e-5)
    assert step.head.objective == {"soft_ce": 1.0, "tv": 0.5}
    assert "feature_loss" not in vars(step.head)


# --- what is decoded, and how often -----------------------------------------------------------------------------------


def a_store(folder: Path, answers: list[list[int]], prompts: list[int]) -> FeatureStore:
    """Documents whose answer masks are 0 for the prompt and then as given."""
    meta = ChunkMeta("mark", (1,), 4, 300)
    documents = []
    for i, (mask, prompt) in enumerate(zip(answers, prompts, strict=True)):
        answer = torch.tensor([0] * prompt + mask, dtype=torch.bool)
        n = len(answer)
        states = torch.zeros(n - 1, 4, dtype=torch.bfloat16)
        documents.append(Document(f"d{i}", "val", "made", torch.arange(n) + 10 * i, answer, states, states.clone()))
    folder.mkdir()
    write_chunk(folder / "chunk-00000.safetensors", documents, meta)
    build_index(folder, ["chunk-00000"], "mark", (1,), "test")
    return FeatureStore.open(folder)


def test_prompts_end_where_the_first_answer_begins(tmp_path: Path) -> None:
    answers = [[1, 1, 1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1, 1], [1, 1, 1], [1, 1]]
    opened = a_store(tmp_path / "features", answers, [3, 2, 4, 0, 1])
    settings = recipe(decode_documents=8, decode_tokens=4, max_length=8).train
    found = held_out_prompts(opened, range(5), settings)
    # document 1's first answer has one token, document 3 no prompt; document 0 is cut to 4 answer tokens
    assert [(p.document, p.tokens, p.answer) for p in found] == [
        (0, [0, 1, 2], [3, 4, 5, 6]),
        (2, [20, 21, 22, 23], [24, 25]),
        (4, [40], [41, 42]),
    ]
    first = held_out_prompts(opened, range(5), recipe(decode_documents=1).train)
    assert [p.document for p in first] == [0]
    with pytest.raises(DraftsmithError, match=r"none of the 2 held-out documents .*train\.decode_documents=0"):
        held_out_prompts(opened, [1, 3], settings)


def test_decoding_takes_at_most_a_twentieth_of_the_rows(tmp_path: Path) -> None:
    opened = a_store(tmp_path / "features", [[1] * 5] * 10, [100] * 10)
    head: Any = type("Head", (), {"most_depth": None})()
    step: Any = type("Step", (), {"head": head, "adapter": None})()

    def plan(**train: Any) -> DecodedValidation:
        settings = recipe(token_budget=1024, **{"validate_every": 10, "decode_tokens": 48, **train}).train
        return DecodedValidation(lambda *, adapter: step, step, opened, range(10), settings)

    # 48 passes that cost 64 rows each, and 8 prompts of 100: 3872 rows; twenty times as many are 75.6 steps of 1024
    assert plan().interval(1000) == 80
    assert plan().count(1000) == 13
    assert plan(accumulation=2).interval(1000) == 40
    # 10 prompts in two turns of 8 slots, K = 15: 2 * 48 passes of 8 * 16 rows, and 1000 rows: 259.5 steps
    assert plan(decode_documents=10, validate_depth=15).interval(1000) == 260
    assert plan(decode_every=7).interval(1000) == 7
    assert plan(decode_every=7).count(15) == 3
    assert plan(decode_every=None).interval(1000) is None
    assert plan(decode_every=None).count(1000) == 1

    def due(planned: DecodedValidation, best: int | None) -> list[int]:
        return [s for s in range(1, 101) if planned.is_due(RunState(step=s, total_steps=100, best_step=best))]

    assert due(plan(), 10) == [80, 100]
    assert due(plan(), None) == [*range(10, 101, 10)], "until there is a best head"
    assert due(plan(decode_every=45), 10) == [45, 90, 100]
    assert due(plan(decode_every=None), None) == [100]


def test_patience_needs_decoded_taus() -> None:
    assert recipe(patience=2).train.best_by_tau
    for off in ({"decode_documents": 0}, {"decode_every": None}):
        with pytest.raises(DraftsmithError, match=r"train\.patience = 2 waits for decoded taus"):
            recipe(patience=2, **off)
    with pytest.raises(DraftsmithError, match=r"decode_every.*'sometimes'"):
        recipe(decode_every="sometimes")
    with pytest.raises(ValueError, match="they need a loader"):
        DecodedValidation.wanted(None, None, None, [], recipe(patience=2).train)  # type: ignore[arg-type]


# --- decoded with real heads ------------------------------------------------------------------------------------------


def measured(learned: Any, load: Any, **train: Any) -> dict[str, Any]:
    step, opened, documents = learned
    settings = recipe(decode_documents=16, decode_tokens=20, **train).train
    return DecodedValidation(load, step, opened, documents, settings).measure()


def test_on_the_targets_own_text_both_taus_are_equal(learned: Any, load: Any, tiny_target: Any) -> None:
    step, opened, documents = learned
    found = measured(learned, load)
    requests = []
    for i in documents:
        d = opened.document(i)
        requests.append(Request(d.id, d.tokens[~d.answer].tolist(), min(20, int(d.answer.sum()))))
    drafter = make_drafter(step.head, tiny_target.parts(), Chain(DEPTH))
    steps = [s for r in decode(tiny_target, drafter, requests, slots=1, capacity=64) for s in r.steps]
    assert found["decoded_same"] == found["decoded_documents"] == len(documents) == 16
    assert (found["tau_tokens"], found["tau_steps"]) == (sum(s.emitted for s in steps), len(steps))
    # stored states are bf16: where two guesses are nearly equal, one row of the walk may differ from the decoder's
    assert found["tau"] == pytest.approx(found["tau_walk_decoded"], rel=0.02)
    assert found["tau"] > 1.3
    assert found["tau_low"] < found["tau"] < found["tau_high"]
    assert len(found["decoded_cumulative"]) == len(found["decoded_conditional"]) == DEPTH
    assert "disagreement" not in found


def forgotten_state(patch: pytest.MonkeyPatch) -> None:
    """Drafts behind the first read no recycled state."""
    expand = HeadDrafter.expand

    def forgetful(self: Any, tokens: Any, states: Any, depth: int, seen: Any) -> Any:
        return expand(self, tokens, torch.zeros_like(states), depth, seen)

    patch.setattr(HeadDrafter, "expand", forgetful)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(absolute_ids, "first drafts differ already"), (forgotten_state, "first drafts agree")],
)
def test_a_decoder_that_drafts_otherwise_is_noticed(
    mistake: Any, message: str, learned: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    found = measured(learned, load)
    assert found["decoded_same"] == 16, "the text is still the target's"
    assert found["tau"] < found["tau_walk_decoded"]
    assert message in found["disagreement"]


def test_a_tuned_target_is_decoded_with_its_adapter(store: Path, tiny_folder: Path, load: Any) -> None:
    from test_adapter import moved
    from test_medusa2_runs import recipe as medusa2

    from draftsmith.train.joint import JointStep, TunedTarget

    settings, opened, parts, head = make_fit(store, tiny_folder, medusa2(decode_documents=4))
    tuned = TunedTarget.load(str(tiny_folder), None, head.config, 1, torch.device("cpu"), torch.float32)
    moved(tuned.adapter)
    before = {name: p.clone() for name, p in tuned.adapter.parameters.items()}
    loaded: list[Target] = []

    def watched(*, adapter: Path | None) -> Target:
        loaded.append(load(adapter=adapter))
        return loaded[-1]

    decoded = DecodedValidation(watched, JointStep(head, parts, torch.float32, tuned), opened, range(20), settings)
    decoded.prepare()
    assert not loaded, "weights that change can't be loaded once and for all"
    for _ in range(2):
        found = decoded.measure()
    assert [t.adapter is not None for t in loaded] == [True, True]
    assert found["decoded_same"] < 4, "it says other things than the original"
    assert "training and decoding differ" not in found.get("disagreement", "")
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in tuned.adapter.parameters.items())


# --- whole runs -------------------------------------------------------------------------------------------------------


def fitted(store: Path, folder: Path, out: Path, load: Any, **train: Any) -> dict[str, Any]:
    from draftsmith.train.fit import fit

    return fit(*make_fit(store, folder, recipe(decode_tokens=12, **train)), out, load_target=load)


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (out / "metrics.jsonl").open()) if x["kind"] == kind]


@pytest.mark.parametrize("stage", [0, 3])
def test_decoded_tau_chooses_the_best(stage: int, store: Path, tiny_folder: Path, tmp_path: Path, load: Any) -> None:
    """Under ZeRO 3, too, whose divided weights are put together for the decoder."""
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    options = {"steps": 8, "decode_every": 6, "deepspeed": str(tmp_path / "zero.json")}
    result = fitted(store, tiny_folder, tmp_path / "run", load, **options)
    seen = {x["step"]: x.get("tau") for x in lines(tmp_path / "run", "validation")}
    assert list(seen) == [4, 6, 8]
    assert None not in seen.values(), "the first, every sixth and the last"
    chosen = json.loads((tmp_path / "run/checkpoints/best/validation.json").read_text())
    assert chosen["best_by"] == result["best_by"] == "tau"
    assert chosen["step"] == result["best_step"]
    assert chosen["tau"] == result["best_tau"] == max(seen.values())
    assert chosen["tau"] == chosen["tau_walk_decoded"]
    assert result["decode_seconds"] > 0
    train = lines(tmp_path / "run", "train")
    assert all(x["gradient_norm_max"] >= x["gradient_norm"] > 0 for x in train)
    assert all(x["mfu"] is None and x["peak_memory_bytes"] > 1e6 and 0 < x["supervised"] < 1 for x in train)


def test_only_at_the_end_or_not_at_all(store: Path, tiny_folder: Path, tmp_path: Path, load: Any) -> None:
    result = fitted(store, tiny_folder, tmp_path, load, steps=8, decode_every=None)
    assert ["tau" in x for x in lines(tmp_path, "validation")] == [False, True]
    assert result["best_by"] == "tau_walk"
    never = fitted(store, tiny_folder, tmp_path / "off", None, steps=4)
    assert (never["best_by"], never["best_tau"], never["decode_seconds"]) == ("tau_walk", None, None)


def test_a_falling_tau_ends_the_run(
    store: Path, tiny_folder: Path, tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.2, 1.5, 1.4, 1.6, 1.55, 1.5, 9.0])
    measure = DecodedValidation.measure
    monkeypatch.setattr(DecodedValidation, "measure", lambda self: {**measure(self), "tau": next(taus)})
    options = {"steps": 40, "validate_every": 2, "decode_every": 2, "patience": 2, "save_every": 40}
    result = fitted(store, tiny_folder, tmp_path, load, **options)
    assert result["finished"]
    assert result["stopped_early"]
    assert (result["step"], result["total_steps"], result["best_step"], result["best_tau"]) == (12, 12, 8, 1.6)
    assert (tmp_path / "checkpoints/step-000012/state.json").exists()
    best = load_head(tmp_path / "checkpoints/best")
    last = load_file(tmp_path / "checkpoints/step-000012/model.safetensors")
    assert not all(torch.equal(p, last[name]) for name, p in best.named_parameters())
    again = fitted(store, tiny_folder, tmp_path, load, **options)
    assert again["finished"], "it stays ended"
    assert (again["step"], again["best_step"], again["stopped_early"]) == (12, 8, True)


def test_a_target_that_cannot_be_decoded_is_refused_before_training(
    store: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    def refusing(*, adapter: Path | None) -> Target:
        raise DraftsmithError("the target 'x' can't be loaded")

    with pytest.raises(DraftsmithError, match=r"can't be loaded; train\.decode_documents=0 trains without"):
        fitted(store, tiny_folder, tmp_path, refusing, steps=2)
    assert not (tmp_path / "metrics.jsonl").read_text()


# --- budget -----------------------------------------------------------------------------------------------------------


def test_length_of_a_time_limited_run_leaves_room_for_decoding() -> None:
    from draftsmith.train.schedule import steps_within

    settings = recipe(validate_every=50).train

    def decoding(steps: int) -> float:
        return 3.0 * -(-steps // 60)

    def spent(total: int) -> float:
        return (total - 11) * 0.5 + -(-total // 50) * 5.0 + decoding(total)

    total = steps_within(100.0, 0.5, 5.0, settings, 11, 0.0, decoding)
    assert total == 153, "142 steps of 0.5 s, 4 validations of 5 s, 3 decodings of 3 s"
    assert spent(total) == 100.0
    assert all(spent(more) > 100 for more in range(total + 1, 220)), "the largest"
    assert steps_within(100.0, 0.5, 5.0, settings, 11) == 171, "160 steps and 4 validations"


def test_a_time_budget_pays_for_loading_and_decoding(
    store: Path, tiny_folder: Path, tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.train.fit import fit

    measure = DecodedValidation.measure

    def slow(self: Any) -> dict[str, Any]:
        found = measure(self)
        time.sleep(0.5)
        self.seconds += 0.5
        return found

    monkeypatch.setattr(DecodedValidation, "measure", slow)
    settings = recipe(minutes=1.0, validate_every=None, decode_every=20, decode_tokens=12)
    before = time.monotonic()
    result = fit(*make_fit(store, tiny_folder, settings), tmp_path, load_target=load, budget_seconds=8.0)
    assert result["step"] == result["total_steps"] > 11
    assert time.monotonic() - before < 14.0
    assert "tau" in lines(tmp_path, "validation")[0], "the pilot decodes, to know what it costs"
