"""Drafters that know the answer, and what must hold for every drafter and target; each check raises AssertionError."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decoder import loop
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.draft_model import DraftModelDrafter
from draftsmith.eval.decoder.drafters.lookahead import LookaheadDrafter
from draftsmith.eval.decoder.drafters.network import HeadDrafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.drafters.union import UnionDrafter
from draftsmith.eval.decoder.loop import Request, Result, decode
from draftsmith.eval.decoder.sampling import Draws, SlotSampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.eval.decoder.types import Drafter, HostStep, TokenTree, Verdict
from draftsmith.heads.base import DraftHead, TargetParts
from draftsmith.heads.registry import family_names, head_family
from draftsmith.heads.vocab import DraftVocab

Truth = dict[tuple[int, ...], list[int]]


# --- what is right ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def dense_greedy(target: Any, prompt: list[int], count: int) -> list[int]:
    """Plain greedy text without any cache and without stopping."""
    tokens = list(prompt)
    with target.attention():
        for _ in range(count):
            logits = target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def make_truth(target: Any, prompts: list[list[int]], count: int) -> Truth:
    return {tuple(p): dense_greedy(target, p, count) for p in prompts}


def cut(text: list[int], limit: int, stop: list[int]) -> list[int]:
    """Up to the first stop token (kept) and the limit."""
    out: list[int] = []
    for token in text[:limit]:
        out.append(token)
        if token in stop:
            break
    return out


def random_prompts(target: Any, lengths: list[int], seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, target.vocab_size, (n,), generator=g).tolist() for n in lengths]


# --- drafters ---------------------------------------------------------------------------------------------------------


class Scripted(Drafter):
    """Knows the true continuations: follows where every sequence stands. Mixed into real drafters."""

    def script(self, truth: Truth, right: float, seed: int = 0) -> Any:
        """Draft true tokens with probability `right`."""
        self.truth, self.right = truth, right
        self.rng = torch.Generator().manual_seed(seed)
        self.at: dict[int, tuple[list[int], int]] = {}
        return self

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        super().begin(slot, tokens, aux, last)  # type: ignore[safe-super]
        self.at[slot] = (self.truth[tuple(tokens[:-1].tolist())], 1)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        super().commit(tree, verdict, aux, last, step)  # type: ignore[safe-super]
        for i, new in enumerate(step.emitted):
            self.at[i] = (self.at[i][0], self.at[i][1] + len(new))

    def release(self, slot: int, last: int) -> None:
        super().release(slot, last)  # type: ignore[safe-super]
        self.at[slot] = self.at[last]

    def coin(self, p: float) -> bool:
        return float(torch.rand((), generator=self.rng)) < p

    def dice(self, n: int) -> int:
        return int(torch.randint(0, n, (), generator=self.rng))

    def token(self, slot: int, depth: int) -> int:
        """The true token at a depth (1 = first drafted), or a wrong one."""
        text, at = self.at[slot]
        if self.coin(self.right) and at + depth - 1 < len(text):
            return text[at + depth - 1]
        return self.dice(320)

    def random_tree(self, roots: Tensor, nodes: int) -> TokenTree:
        """Any shape: bushy and deep trees, twins, and padding nodes at the end that would be right if they counted."""
        parents, depths, tokens, valid = [], [], [], []
        for slot, root in enumerate(roots.tolist()):
            parent, depth, token = [-1], [0], [root]
            for i in range(1, nodes):
                up = i - 1 if self.coin(0.6) else self.dice(i)
                parent.append(up)
                depth.append(depth[up] + 1)
                token.append(self.token(slot, depth[i]))
            parents.append(parent)
            depths.append(depth)
            tokens.append(token)
            real = nodes - self.dice(nodes // 2 + 1)
            valid.append([i < real for i in range(nodes)])
        depth = torch.tensor(depths)
        return TokenTree(
            torch.tensor(tokens), torch.tensor(parents), depth, torch.tensor(valid), int(depth.max()), False
        )


class _Silent(Drafter):
    """Ends the chain of super() calls for drafters without a network."""

    def allocate(self, slots: int, capacity: int) -> None: ...
    def begin(self, *args: Any) -> None: ...
    def commit(self, *args: Any) -> None: ...
    def release(self, slot: int, last: int) -> None: ...


class RandomTreeDrafter(Scripted, _Silent):
    """Random trees of `nodes` nodes, no network."""

    def __init__(self, truth: Truth, nodes: int, right: float = 0.8, seed: int = 0) -> None:
        self.depth, self.rows = nodes - 1, nodes
        self.script(truth, right, seed)

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        return self.random_tree(roots, self.rows)


class RandomTrees(Scripted):
    """A real drafter's cache and commit under random trees."""

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        super().propose(roots, draws)  # type: ignore[safe-super]  # its draft rows must never be kept
        return self.random_tree(roots, self.rows)


class PartlyRight(Scripted):
    """A real drafter with some of its guesses made right."""

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        tree = super().propose(roots, draws)  # type: ignore[safe-super]
        first = tree.parent[:, :, None] == tree.parent[:, None]  # the first child of each node is the one made right
        eldest = ~(first & torch.ones_like(first[0]).tril(-1)).any(-1)
        for i in range(len(roots)):
            for node in range(1, tree.tokens.shape[1]):
                if bool(eldest[i, node]) and self.coin(self.right):
                    tree.tokens[i, node] = self.token(i, int(tree.depth[i, node]))
        return tree


def of_family(kind: type[Scripted], family: str) -> Any:
    """A family's own drafter class under one of the mixins above."""
    drafter = importlib.import_module(f"draftsmith.eval.decoder.drafters.{family}").DRAFTER
    return type(f"{kind.__name__}{drafter.__name__}", (kind, drafter), {})


ScriptedEagle3 = of_family(PartlyRight, "eagle3")

SHAPES: dict[str, Shape] = {
    "chain": Chain(4), "static": Static([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), "dynamic": Dynamic(4, 3, 12),
    "top": Chain(3, sampled=False),
}  # fmt: skip
NAMES = ["plain", "lookup", "lookahead", "union-lookahead"]
NAMES += [f"{kind}-{shape}" for shape in SHAPES for kind in ("head", "model", "union")]
FAMILIES = [name for name in family_names() if name != "eagle3"]  # that one's heads are called "head"
FAMILY_SHAPES = ["chain", "static", "dynamic"]
NAMES += [f"{family}-{shape}" for family in FAMILIES for shape in FAMILY_SHAPES]


def every_drafter(target: Any) -> dict[str, Drafter]:
    """Every drafter there is by its name in NAMES: a random head, the target as its own draft model, each tree."""
    head = random_head(target)
    made: dict[str, Drafter] = {
        "plain": PlainDrafter(), "lookup": PromptLookupDrafter(), "lookahead": LookaheadDrafter(),
        "union-lookahead": UnionDrafter(LookaheadDrafter(), PromptLookupDrafter()),
    }  # fmt: skip
    for name, shape in SHAPES.items():
        made[f"head-{name}"] = make_drafter(head, pieces(target), shape)
        made[f"model-{name}"] = DraftModelDrafter(target, target, shape)
        made[f"union-{name}"] = UnionDrafter(make_drafter(head, pieces(target), shape), PromptLookupDrafter(tokens=4))
    for family in FAMILIES:
        head = random_head(target, family=family)
        for name in FAMILY_SHAPES:
            made[f"{family}-{name}"] = make_drafter(head, pieces(target), SHAPES[name])
    assert list(made) == NAMES
    return made


def pieces(target: Any) -> TargetParts:
    """A target's frozen pieces for a head that drafts anything: of architectures that can't be trained for, too."""
    ones = torch.ones(target.hidden_size, dtype=target.dtype)
    return TargetParts(target.embed, target.model.get_output_embeddings().weight, ones, 1e-5)


def random_head(target: Any, seed: int = 0, size: int = 200, family: str = "eagle3") -> DraftHead:
    """An untrained head for a target of any architecture: only shapes are taken from it."""
    from transformers import LlamaConfig

    g = torch.Generator().manual_seed(seed)
    c = target.config
    shapes = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, head_dim=16,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    vocab = DraftVocab(torch.randperm(target.vocab_size, generator=g)[:size].sort().values, target.vocab_size)
    module = importlib.import_module(f"draftsmith.heads.{family}")
    config = getattr(module, f"{family}_config")(
        shapes, vocab, target_id="t", target_revision=None, target_fingerprint="f", chat_template_sha256=None,
        trained_length=64, layer_ids=[1, 2, 3],
    )  # fmt: skip
    head: DraftHead = head_family(family).head(config, vocab)
    with torch.no_grad():
        for w in head.parameters():
            w.copy_(torch.randn(w.shape, generator=g) * (0.3 if w.ndim == 1 else w.shape[-1] ** -0.5) + (w.ndim == 1))
    return head


def first_layers_of(target: Any, count: int, folder: Path) -> Any:
    """A draft model: the target's first layers with its norm, output head and tokenizer."""
    from transformers import AutoModelForCausalLM

    from draftsmith.eval.bench import first_layers
    from draftsmith.heads.target import Target

    whole = AutoModelForCausalLM.from_pretrained(target.id, dtype=target.dtype)
    first_layers(whole, count).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return Target.load(str(folder), dtype=target.dtype, device=str(target.device))


def greedy_draws(lengths: list[int], vocab: int) -> Draws:
    """What `propose` is given for greedy sequences of these lengths."""
    return SlotSampling(len(lengths), vocab, torch.device("cpu")).draws(0, len(lengths), torch.tensor(lengths) - 1)


# --- checks -----------------------------------------------------------------------------------------------------------


def run_all(target: Any, drafter: Drafter, requests: list[Request], slots: int, capacity: int = 512) -> list[Result]:
    """Results in the order of the requests; streamed tokens must add up."""
    streamed: dict[str, list[int]] = {}

    def listen(key: str, new: list[int]) -> None:
        streamed.setdefault(key, []).extend(new)

    found = {r.id: r for r in decode(target, drafter, requests, slots=slots, capacity=capacity, on_token=listen)}
    assert len(found) == len(requests)
    assert all(streamed[k] == r.tokens for k, r in found.items())
    return [found[r.id] for r in requests]


def check_lossless(
    target: Any, drafter: Drafter, truth: Truth, slots: int, limits: Callable[[int], int], capacity: int = 512
) -> list[Result]:
    """Every answer is the dense greedy text, cut; the logs add up."""
    prompts = [list(p) for p in truth]
    requests = [Request(f"r{i}", p, limits(i)) for i, p in enumerate(prompts)]
    results = run_all(target, drafter, requests, slots, capacity)
    for request, result in zip(requests, results, strict=True):
        want = cut(truth[tuple(request.tokens)], request.max_new_tokens, target.eos_ids)
        assert result.tokens == want, f"{request.id}: {result.tokens} is not the greedy text {want}"
        assert result.prompt == request.tokens
        assert result.finish == ("eos" if want[-1] in target.eos_ids else "length")
        check_log(result)
    return results


def check_log(result: Result) -> None:
    """The prefill's token and the emitted ones make the answer; only the last step may be cut."""
    assert sum(s.emitted for s in result.steps) + 1 == len(result.tokens)
    for i, step in enumerate(result.steps):
        assert 0 <= step.accepted <= step.drafted
        assert 1 <= step.emitted <= step.accepted + 1
        assert step.emitted == step.accepted + 1 or i == len(result.steps) - 1
    assert result.seconds >= 0


@torch.inference_mode()
def fresh_kv(target: Any, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """K and V [Hk, S, D] of every layer from one forward of transformers with its own cache."""
    from transformers import DynamicCache

    from draftsmith.eval.decoder.probe import _cache_keyword

    with target.attention():
        kv = DynamicCache()
        target.model(input_ids=torch.tensor([tokens]), use_cache=True, **{_cache_keyword(type(target.body)): kv})
    return [(layer.keys[0], layer.values[0]) for layer in kv.layers]


def close(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape
    if want.numel() == 0:
        return  # a head without keys
    error = float((got - want).abs().max())
    limit = 1e-5 * max(1.0, float(want.abs().max()))
    assert error <= limit, f"{what} differs from a fresh prefill by {error:.3g} (limit {limit:.3g})"


def check_target_cache(target: Any, cache: Any, slot: int, tokens: list[int]) -> None:
    """K/V of the kept tokens of a slot."""
    assert cache.host_lengths[slot] == int(cache.lengths[slot]) == len(tokens)
    for i, (keys, values) in enumerate(fresh_kv(target, tokens)):
        group, layer = cache.places[i]
        for name, arena, want in (("K", cache.arenas[group][0], keys), ("V", cache.arenas[group][1], values)):
            close(arena[layer, slot, :, : len(tokens)], want, f"{name} of layer {i}, slot {slot}")


@torch.inference_mode()
def check_head_cache(target: Any, drafter: HeadDrafter, head: DraftHead, slot: int, tokens: list[int]) -> None:
    """K/V and the recycled state of the head after reading tokens[1:], against one fresh pass over all rows."""
    n, parts = len(tokens) - 1, pieces(target)
    head = copy.deepcopy(head)
    head.attach(parts)
    inputs = head.inputs(*target.states(torch.tensor([tokens[:n]]), head.needs), parts)
    cache = head.new_cache(1, n, target.device, target.dtype)
    embeds = target.embed[torch.tensor([tokens[1:]])]
    logits, state = head.forward_step(cache, embeds, inputs, torch.arange(n)[None], torch.tensor([n]))
    assert int(drafter.cache.lengths[slot]) == n
    close(drafter.cache.keys[slot, :, :n], cache.keys[0], f"head K, slot {slot}")
    close(drafter.cache.values[slot, :, :n], cache.values[0], f"head V, slot {slot}")
    close(drafter.state[slot], state[0], f"recycled state, slot {slot}")
    close(drafter.logits[slot], logits[0, -1], f"logits of the first draft, slot {slot}")


def check_cache_truth(
    target: Any, drafter: Drafter, truth: Truth, slots: int, limits: Callable[[int], int], head: DraftHead | None = None
) -> int:
    """After every step, for every sequence; returns how many drafts were accepted."""
    requests = [Request(f"r{i}", list(p), limits(i)) for i, p in enumerate(truth)]
    session = loop._Session(target, drafter, slots, 512)
    accepted = 0
    with target.capture(drafter.needs) as states:
        session.watch(states)
        while requests or session.running:
            while requests and len(session.running) < slots:
                session.admit([requests.pop(0)])
            done = session.step() if session.running else []
            for slot, run in enumerate(session.running):
                tokens = run.request.tokens + run.tokens
                assert int(session.roots[slot]) == tokens[-1]
                check_target_cache(target, session.cache, slot, tokens[:-1])
                if head is not None:
                    assert isinstance(drafter, HeadDrafter)
                    check_head_cache(target, drafter, head, slot, tokens)
            for result in done:
                want = truth[tuple(result.prompt)][: len(result.tokens)]
                assert result.tokens == want, f"{result.id}: {result.tokens} is not the greedy text {want}"
                accepted += sum(s.accepted for s in result.steps)
    return accepted


def brute_force_walk(tree: TokenTree, logits: Tensor, row: int) -> tuple[list[int], int]:
    """Accepted nodes (root first) and the bonus token of one sequence."""
    path = [0]
    while True:
        best = max(range(logits.shape[-1]), key=lambda v: (float(logits[row, path[-1], v]), -v))
        for node in range(tree.tokens.shape[1]):
            right = int(tree.parent[row, node]) == path[-1] and int(tree.tokens[row, node]) == best
            if right and bool(tree.valid[row, node]):
                path.append(node)
                break
        else:
            return path, best
