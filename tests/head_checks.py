"""What must hold for every head: each function raises AssertionError when it doesn't.

They are functions so that the negative controls can show that each of them fails on the mistake it is there for.
"""

from __future__ import annotations

import copy
from typing import Any

import reference
import torch
from decoder_checks import greedy_draws, pieces, random_head, random_prompts
from families import FAMILIES, VOCAB, Case, make_document, make_documents, pack
from reference import Document, pair
from torch import Tensor

from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.search import Chain
from draftsmith.heads import alignment
from draftsmith.heads.base import Batch, DraftHead, Needs, StepStats
from draftsmith.heads.vocab import DraftVocab

EXACT = {"rtol": 1e-9, "atol": 1e-9}
# rope angles are rounded to fp32 in every model: scaled types may differ from the formula in the last fp32 bit
NEAR = {"rtol": 2e-6, "atol": 2e-6}


# --- alignment (invariant 1) ------------------------------------------------------------------------------------------


def check_arange_alignment() -> None:
    """With t[j] = j a row's input, label and teacher row can be read off."""
    tokens = torch.arange(50)
    rows = torch.tensor([0, 3, 17])
    for s in range(5):
        assert tokens[alignment.input_index(rows, s)].tolist() == [1 + s, 4 + s, 18 + s]
        assert tokens[alignment.label_index(rows, s)].tolist() == [2 + s, 5 + s, 19 + s]
        # the target's row k is what predicts t[k+1]
        assert (alignment.teacher_index(rows, s) + 1).tolist() == [2 + s, 5 + s, 19 + s]
        assert alignment.shift_left(tokens, s, -1).tolist() == [*range(s, 50), *[-1] * s]


def check_supervised_example() -> None:
    """The table of eight tokens: S S S R0 R1 R2 EOS pad."""
    answer = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    want = [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0], [0] * 8]
    for pad in (0, -1):  # the pad as a row of the document, and as padding
        documents = torch.tensor([0] * 7 + [pad])
        got = [r.int().tolist() for r in alignment.supervised(answer, documents, 4)]
        assert got == want, f"supervised rows {got}, not {want}"


def check_supervised_brute_force() -> None:
    """Random masks of several turns, packed: compared with the rule in words; the sets are nested."""
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        lengths = torch.randint(1, 12, (4,), generator=g).tolist()
        documents = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
        answer = torch.rand(len(documents), generator=g) < 0.8
        got = alignment.supervised(answer, documents, 5)
        for s, rows in enumerate(got):
            for j in range(len(documents)):
                need = range(j + 1, j + 3 + s)
                want = all(k < len(documents) and answer[k] and documents[k] == documents[j] for k in need)
                assert bool(rows[j]) == want, f"row {j} at step {s}: {bool(rows[j])}"
            assert s == 0 or not (rows & ~got[s - 1]).any(), "supervised sets are not nested"


# --- losses and gradients against the dense oracle (invariant 6, third part) ------------------------------------------


def check_losses_equal_reference(case: Case, seed: int = 0) -> None:
    """Every sum of every step, and which guesses are right."""
    docs = make_documents(case, seed)
    batch = pack(docs)
    with torch.no_grad():
        got = case.head.losses(batch, case.parts, overlap=True)
        want = reference.losses(case.reference, case.weights(), case.config, docs, case.parts, case.ids)
    assert len(got) == len(want) == case.config.steps
    for s, (a, b) in enumerate(zip(got, want, strict=True)):
        counts = {n: int(getattr(a, n)) for n in ("den", "rows", "hits", "reached", "kept")}
        assert counts == {n: getattr(b, n) for n in counts}, f"step {s}: {counts} instead of {b}"
        torch.testing.assert_close(a.num, b.num, **NEAR)
        assert a.overlap is not None
        assert abs(float(a.overlap) - b.overlap) < 1e-4, f"step {s}: overlap {float(a.overlap)}, dense {b.overlap}"
    assert torch.equal(case.head.loss_counts(batch), torch.tensor([w.den for w in want]))
    assert 0 < want[-1].den < want[-1].rows, "the example must have rows outside the draft vocabulary"
    check_matches(case, batch, got)


def check_matches(case: Case, batch: Batch, stats: list[StepStats]) -> None:
    """`matches` tells row by row what the sums of `losses` count."""
    right, rows = case.head.matches(batch, case.parts)
    alive = torch.ones_like(rows[0])
    for s, step in enumerate(stats):
        assert torch.equal(rows[s], case.head.supervised_rows(batch)[s])
        assert not (right[s] & ~rows[s]).any()
        assert (int(rows[s].sum()), int(right[s].sum())) == (int(step.rows), int(step.hits))
        assert int((alive & rows[s]).sum()) == int(step.reached)
        alive = alive & right[s]
        assert int(alive.sum()) == int(step.kept)


def total_loss(steps: list[Any], weights: list[float]) -> Tensor:
    """L = sum_s w_s num_s / den_s."""
    return torch.stack([w * x.num / max(int(x.den), 1) for w, x in zip(weights, steps, strict=True)]).sum()


def check_gradients_equal_reference(case: Case) -> None:
    """Of every parameter, through all unrolled steps."""
    docs = make_documents(case, 1)
    weights = [0.8**s for s in range(case.config.steps)]
    assert case.head.step_weights() == weights
    case.head.zero_grad()
    total_loss(case.head(pack(docs), case.parts), weights).backward()
    leaves = case.weights()
    total_loss(reference.losses(case.reference, leaves, case.config, docs, case.parts, case.ids), weights).backward()
    for name, parameter in case.head.named_parameters():
        want = leaves[name].grad
        assert want is not None
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.dtype == torch.float64
        assert float(want.abs().max()) > 1e-6, f"{name}: the example gives no gradient to compare"
        error = float((parameter.grad - want).abs().max() / want.abs().max())
        assert error < 2e-6, f"gradient of {name} differs from the dense one by {error:.2g} of its size"


# --- train = decode (invariant 2) -------------------------------------------------------------------------------------


def one_row(doc: Document, row: int, step: int) -> Document:
    """The same text, with the mask that makes `row` the only supervised one at `step`."""
    return Document(doc.tokens, [row < k < row + 3 + step for k in range(len(doc.tokens))], doc.features, doc.last)


def row_loss(case: Case, doc: Document, row: int, step: int, before: list[Document] | None = None) -> Tensor:
    """Loss of one row at one step, through the head's own `losses`."""
    quiet = [Document(d.tokens, [False] * len(d.tokens), d.features, d.last) for d in before or []]
    stats = case.head.losses(pack([*quiet, one_row(doc, row, step)]), case.parts)[step]
    assert int(stats.rows) == 1
    return stats.num.detach()


def ready_to_draft(case: Case) -> DraftHead:
    """A copy of the case's head as a drafter makes it."""
    head = copy.deepcopy(case.head)
    head.attach(case.parts)
    return head


def cached_drafts(case: Case, doc: Document, rows: list[int], steps: int) -> list[tuple[Tensor, Tensor]]:
    """Logits [len(rows), Vd] and states of each cached draft step behind each row.

    One ragged batch, committed in two pieces.
    """
    head, embed = ready_to_draft(case), case.parts.embed
    tokens = torch.tensor(doc.tokens)
    b, longest = len(rows), max(rows) + 1
    at = torch.arange(longest).expand(b, -1)
    counts = torch.tensor(rows) + 1
    half = (counts + 1) // 2
    cache = head.new_cache(b, longest + steps + 3, embed.device, embed.dtype)

    def feed(first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        index = (first[:, None] + torch.arange(int(count.max()))).clamp(max=len(tokens) - 2)
        inputs = head.inputs(doc.features[index], doc.last[index], case.parts)
        return head.forward_step(cache, embed[tokens[index + 1]], inputs, index, count)

    logits, state = feed(torch.zeros_like(half), half)
    for s in (1, 2):  # drafts that are refused: the rest of the rows must overwrite them
        read = embed[tokens[at[:, :1] + s]]
        logits, state = head.forward_step(cache, read, state, (half + s - 1)[:, None], None, step=s)
    rest = counts - half
    more = rest > 0
    assert more.all(), "every row needs a second piece"
    cache.longest = int(half.max())
    logits, state = feed(half, rest)
    cache.longest = int(counts.max())
    out = [(logits[:, 0], state[:, 0])]
    for s in range(1, steps):
        read = embed[tokens[torch.tensor(rows) + 1 + s]][:, None]
        logits, state = head.forward_step(cache, read, state, (counts + s - 1)[:, None], None, step=s)
        out.append((logits[:, 0], state[:, 0]))
    assert torch.equal(cache.lengths, counts), "draft rows must not stay in the cache"
    return out


@torch.no_grad()
def check_train_equals_decode(case: Case) -> None:
    """Teacher-forced row j of step s = the s-th cached draft behind row j, through the loss and by the oracle."""
    steps = case.config.steps
    doc = make_document(case, [True] * 14, 5)
    rows = [1, 2, 5, 8]
    ids = case.ids
    got = cached_drafts(case, doc, rows, steps)
    weights = case.weights()
    unrolled = case.reference.unroll(weights, case.config, doc, case.parts, ids)
    known = [i for i, t in enumerate(doc.tokens) if t in ids]
    for b, row in enumerate(rows):
        drafted = case.reference.draft(weights, case.config, doc, case.parts, ids, row, steps)
        for s in range(steps):
            logits, state = got[s][0][b], got[s][1][b]
            want, feature = pair(drafted[s])
            torch.testing.assert_close(logits, want, **NEAR)
            torch.testing.assert_close(unrolled[s][row], drafted[s], **EXACT)
            if feature is not None:
                torch.testing.assert_close(state, feature, **NEAR)
            tokens = list(doc.tokens)
            tokens[row + 2 + s] = doc.tokens[known[0]]  # the loss counts labels of the draft vocabulary only
            labelled = Document(tokens, doc.answer, doc.features, doc.last)
            loss = case.reference.row_loss(case.config, labelled, case.parts, ids, row, s, logits, state)
            torch.testing.assert_close(row_loss(case, labelled, row, s), loss, **EXACT)


@torch.inference_mode()
def check_chain_drafts(target: Any, family: str, lengths: list[int], depth: int) -> None:
    """At most `depth` tokens that the drafter proposes are the oracle's own greedy drafts: untrained depths, too."""
    head = random_head(target, family=family)
    depth = min(depth, head.most_depth or depth)
    drafter = make_drafter(head, pieces(target), Chain(depth))
    drafter.allocate(len(lengths), 64)
    texts = random_prompts(target, lengths, seed=4)
    needs = Needs(head.needs.layer_ids, last=True)
    features = [[x[0] for x in target.states(torch.tensor([t[:-1]]), needs)] for t in texts]
    for slot, (text, (aux, last)) in enumerate(zip(texts, features, strict=True)):
        drafter.begin(slot, torch.tensor(text), aux, last)
    tree = drafter.propose(torch.tensor([t[-1] for t in texts]), greedy_draws(lengths, target.vocab_size))
    assert tree.tokens.shape == (len(texts), depth + 1)
    weights = {n: w.double() for n, w in head.named_parameters()}
    ids, parts = head.vocab.target_ids.tolist(), pieces(target).to("cpu", torch.float64)
    for slot, (text, (aux, last)) in enumerate(zip(texts, features, strict=True)):
        known = list(text)
        for s in range(depth):
            doc = Document(known, [], aux.double(), last.double())
            found = FAMILIES[family].reference.draft(weights, head.config, doc, parts, ids, len(text) - 2, s + 1)[-1]
            logits, _ = pair(found)
            known.append(ids[int(logits.argmax())])
        got = tree.tokens[slot].tolist()
        assert got == known[len(text) - 1 :], f"drafts {got}, the oracle's are {known[len(text) - 1 :]}"


# --- no leak (invariant 3) --------------------------------------------------------------------------------------------


def perturbed(doc: Document, case: Case, tokens_from: int, inputs_from: int, teacher_row: int) -> Document:
    """Other tokens, states and teacher rows wherever a row may not look; labels stay in the draft vocabulary.

    A head that reads the last state sees its rows before `inputs_from`; to others it is only the teacher's.
    """
    g = torch.Generator().manual_seed(99)
    other = copy.deepcopy(doc)
    for k in range(tokens_from, len(doc.tokens)):
        other.tokens[k] = case.ids[(case.ids.index(doc.tokens[k]) + 1) % len(case.ids)]
    rest = other.features[inputs_from:]
    rest += torch.randn(rest.shape, generator=g, dtype=rest.dtype)
    noise = torch.randn(other.last.shape, generator=g, dtype=rest.dtype)
    noise[teacher_row] = 0
    if case.head.needs.last:
        noise[:inputs_from] = 0
    other.last += noise
    return other


def known_document(case: Case, length: int, seed: int) -> Document:
    """An answer whose tokens are all in the draft vocabulary."""
    doc = make_document(case, [True] * length, seed)
    doc.tokens = [case.ids[t % len(case.ids)] for t in doc.tokens]
    return doc


@torch.no_grad()
def check_no_leak(case: Case) -> None:
    """Later tokens, later features and other teacher rows leave a row's loss bit-identical; its own inputs don't."""
    doc = known_document(case, 12, 6)
    for row in (0, 3, 7):
        for s in range(min(case.config.steps, 12 - row - 2)):
            before = row_loss(case, doc, row, s)
            later = row + 2 + s + case.head.hard_labels  # a hard label is the text's own token
            hidden = perturbed(doc, case, later, row + 1, row + 1 + s)
            assert torch.equal(before, row_loss(case, hidden, row, s)), f"row {row} at step {s} sees something later"
            seen = {
                "token": perturbed(doc, case, later - 1, row + 1, row + 1 + s),
                "state": perturbed(doc, case, later, row, row + 1 + s),
            }
            if not case.head.hard_labels:
                seen["teacher"] = perturbed(doc, case, later, row + 1, 0)
            for what, other in seen.items():
                assert not torch.equal(before, row_loss(case, other, row, s)), f"row {row} at step {s} ignores {what}"


@torch.no_grad()
def check_packed_apart(case: Case) -> None:
    """Packed = alone, and what stands in other documents never matters, bit for bit."""
    doc = known_document(case, 10, 8)
    other = [known_document(case, 7, 9), known_document(case, 15, 10)]
    changed = [perturbed(d, case, 0, 0, len(d.last) - 1) for d in other]
    for row, s in ((0, 0), (2, 1), (4, 3)):
        alone = row_loss(case, doc, row, s)
        packed = row_loss(case, doc, row, s, other)
        torch.testing.assert_close(packed, alone, **EXACT)
        assert torch.equal(packed, row_loss(case, doc, row, s, changed)), "packed documents see each other"
    docs = make_documents(case, 4)
    whole = case.head.losses(pack(docs), case.parts)
    parts = [case.head.losses(pack([d]), case.parts) for d in docs]
    for s, step in enumerate(whole):
        torch.testing.assert_close(step.num, torch.stack([p[s].num for p in parts]).sum(), **EXACT)
        assert int(step.kept) == sum(int(p[s].kept) for p in parts)


# --- maps, layers -----------------------------------------------------------------------------------------------------


def check_vocab_maps(vocab: DraftVocab) -> None:
    """draft -> target -> draft is the identity; d2t holds offsets; ids outside map to -1."""
    ids = vocab.target_ids.tolist()
    table = vocab.to_draft().tolist()
    offsets = vocab.d2t().tolist()
    assert len(table) == vocab.vocab_size
    for i, target in enumerate(ids):
        assert i + offsets[i] == target, f"d2t must hold offsets: {i} + {offsets[i]} is not {target}"
        assert table[target] == i
    assert all(table[t] == -1 for t in range(vocab.vocab_size) if t not in set(ids))


def check_head_guesses_target_ids(case: Case) -> None:
    """The head's own maps are its vocabulary's."""
    assert case.head.target_ids.tolist() == case.ids
    assert [case.ids[i] if i >= 0 else -1 for i in case.head.draft_ids.tolist()] == [
        t if t in case.ids else -1 for t in range(VOCAB)
    ]


@torch.no_grad()
def check_layer_states(target: Any, layer_ids: tuple[int, ...]) -> None:
    """State k is what transformers calls hidden_states[k] for 0 < k < n; state n goes INTO the final norm."""
    tokens = torch.arange(24).view(2, 12) * 5 % target.vocab_size
    aux, last = target.states(tokens, Needs(layer_ids, last=True))
    made: list[Any] = []
    hook = target.model.base_model.layers[-1].register_forward_hook(lambda _m, _a, out: made.append(out))
    with target.attention():
        out = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    hook.remove()
    want = torch.cat([out.hidden_states[k] for k in layer_ids], -1)
    torch.testing.assert_close(aux, want, rtol=1e-5, atol=1e-5)
    before_norm = made[0][0] if isinstance(made[0], tuple) else made[0]
    torch.testing.assert_close(last, before_norm, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.parts().normed(last), out.hidden_states[-1], rtol=1e-5, atol=1e-5)
    logits = target.parts().normed(last) @ target.parts().lm_head.t()
    torch.testing.assert_close(logits, out.logits, rtol=1e-4, atol=1e-4 * float(out.logits.abs().max()))
