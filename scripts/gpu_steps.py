"""Whole models on the device: do they read trees right, and what does a decoding step cost beside its target pass?"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_report import FAIL, INFO, PASS, SKIPPED, Report
from gpu_speed import Sizes
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.drafters.lookahead import LookaheadDrafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.graphs import CapturedPass
from draftsmith.eval.decoder.loop import Request, Result, decode, rows_needed
from draftsmith.eval.decoder.probe import check_target, kv_shapes, tree_pass
from draftsmith.eval.decoder.sampling import Draws, Sampling
from draftsmith.eval.decoder.transfer import upload
from draftsmith.eval.decoder.types import Drafter, HostStep, TokenTree, Verdict
from draftsmith.heads.target import Target

_AIM_RATIO = 1.10
_PASSES = 12


# --- targets ----------------------------------------------------------------------------------------------------------


def make_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, made on the device."""
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    finally:
        torch.set_default_dtype(before)


def count(model: Any) -> Any:
    """Make a model find t + 1 most likely after token t, by far: a drafter then knows what will be accepted.

    Its layers add little to the embedding, and a token's row of the output head is the embedding of the one before.
    """
    embed = model.get_input_embeddings().weight
    with torch.no_grad():
        embed.normal_()
        model.get_output_embeddings().weight.copy_(torch.roll(embed, 1, 0))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
    return model


def spread(model: Any) -> Any:
    """Draw weights so wide that logits depend on every token that is seen."""
    embed = model.get_input_embeddings().weight
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.0 if weight is embed else 1.6 / weight.shape[-1] ** 0.5)
    return model


def as_target(model: Any) -> Target:
    """A model that lies in memory, as a target: what names it is a folder with its configuration and no weights."""
    import transformers
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file({}, Path(folder) / "model.safetensors")
        return Target(model, tokenizer, folder, None)


def qwen3(tiny: bool) -> Any:
    """The shape of Qwen3-8B, or a tiny one."""
    import transformers

    if tiny:
        return transformers.Qwen3Config(
            vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
        )  # fmt: skip
    return transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip


def small_configs() -> dict[str, Any]:
    """Small models with all that the attention function is handed: windows, sinks, capped scores."""
    import transformers as tf

    shared = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    return {
        "qwen3": tf.Qwen3Config(**shared),
        "gpt_oss (window, sinks)": tf.GptOssConfig(**shared, sliding_window=8, **experts),
        "gemma2 (window, cap)": tf.Gemma2Config(
            **shared, sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
        ),
    }


# --- models -----------------------------------------------------------------------------------------------------------


def check_models(report: Report, device: torch.device) -> None:
    """Tree passes against plain forwards, and answers with drafts against those without."""
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for name, config in small_configs().items():
        for dtype in dtypes:
            what = f"{name} {str(dtype).removeprefix('torch.')}"
            with report.section("models", what):
                target = as_target(spread(make_model(config, device, dtype)))
                try:
                    check_target(target)
                except DraftsmithError as error:
                    report.add("models", what, FAIL, str(error))
                    continue
                report.add("models", what, PASS, "a tree pass has the logits of plain forwards")
                if name == "qwen3" and dtype == torch.float32:
                    check_answers(report, target)


def check_answers(report: Report, target: Target) -> None:
    """Answers of drafters that draw nothing equal plain ones, greedy and sampled."""
    g = torch.Generator().manual_seed(1)
    lengths, new = ((4, 3), 5) if target.device.type == "cpu" else ((40, 70, 30), 40)
    prompts = [torch.randint(3, 320, (n,), generator=g).tolist() * 2 for n in lengths]
    for rule, sampling in {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=2)}.items():
        requests = [Request(f"r{i}", p, new, sampling, stop=frozenset()) for i, p in enumerate(prompts)]
        plain = answers(target, PlainDrafter(), requests)
        for drafter in (PromptLookupDrafter(max_ngram=2, tokens=4), LookaheadDrafter(window=2, ngram=3, guesses=2)):
            same = answers(target, drafter, requests) == plain
            what = f"qwen3 {rule}, {type(drafter).__name__}"
            report.check("models", what, same, f"answers {'equal' if same else 'differ from'} plain decoding's")


def answers(target: Target, drafter: Drafter, requests: list[Request]) -> dict[str, list[int]]:
    """Tokens by request."""
    found = decode(target, drafter, requests, slots=2, capacity=rows_needed(requests, drafter))
    return {r.id: r.tokens for r in found}


# --- steps ------------------------------------------------------------------------------------------------------------


class ForcedDrafter(Drafter):
    """Proposes one tree for a target that counts: `accepted` nodes are right, all else is wrong.

    Args:
        nodes: N; depth: K, nodes 0..K are a chain, the others hang below it one by one.
        accepted: drafts of the chain that the target will accept.
    """

    def __init__(self, nodes: int, depth: int, accepted: int, target: Target) -> None:
        self.rows, self.depth, self.vocab, self.is_chain = nodes, depth, target.vocab_size, nodes == depth + 1
        parents = [i - 1 if i <= depth else i % depth for i in range(nodes)]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        wrong = target.vocab_size // 2
        steps = [d if i <= accepted else d + wrong + i for i, d in enumerate(depths)]
        self.parents, self.depths, self.steps = (upload(x, target.device) for x in (parents, depths, steps))
        self.every = torch.ones(nodes, dtype=torch.bool, device=target.device)

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        shape = (len(roots), self.rows)
        tokens = (roots[:, None] + self.steps) % self.vocab
        parent, depth, valid = (x.expand(shape) for x in (self.parents, self.depths, self.every))
        return TokenTree(tokens, parent, depth, valid, self.depth, self.is_chain)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""


def measure(report: Report, device: torch.device, sizes: Sizes) -> None:
    """Every batch and tree, launched and as graphs."""
    trees = {"tree": (64, 8, 3), "chain": (5, 4, 2)}
    if sizes.tiny:
        trees = {"tree": (7, 3, 2), "chain": (3, 2, 1)}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = as_target(count(make_model(qwen3(sizes.tiny), device, dtype)))
    kv_shapes(target)
    for batch in sizes.step_batches:
        for name, (nodes, depth, accepted) in trees.items():
            for graphs in (False, True):
                what = f"{name} of {nodes}, {accepted} accepted, B {batch}, {'graph' if graphs else 'launched'}"
                if graphs and device.type != "cuda":
                    report.add("step", what, SKIPPED, "needs CUDA")
                    continue
                with report.section("step", what):
                    drafter = ForcedDrafter(nodes, depth, accepted, target)
                    measure_step(report, what, target, drafter, accepted, batch, sizes, graphs)


def measure_step(
    report: Report, what: str, target: Target, drafter: ForcedDrafter, accepted: int, batch: int, sizes: Sizes,
    graphs: bool,
) -> None:  # fmt: skip
    """One line: a step, the bare pass, their ratio; the answers must count, the accepted lengths be what was forced."""
    new = (accepted + 1) * sizes.steps + 1
    prompt = [(7 + i) % target.vocab_size for i in range(sizes.step_prefix)]
    requests = [Request(f"r{i}", prompt, new, stop=frozenset()) for i in range(batch)]
    capacity = rows_needed(requests, drafter)
    results, step = timed_decode(target, drafter, requests, capacity, graphs)
    bare = bare_pass(target, drafter, sizes.step_prefix + new // 2, batch, capacity, graphs)
    want = [(prompt[-1] + 1 + i) % target.vocab_size for i in range(new)]
    counted = all(r.tokens == want for r in results)
    forced = all(s.accepted == accepted for r in results for s in r.steps)
    ratio = step / bare
    result = f"step {step * 1e3:.2f} ms, bare pass {bare * 1e3:.2f} ms, ratio {ratio:.3f}"
    state = INFO if sizes.tiny else PASS
    if not sizes.tiny and ratio > _AIM_RATIO:
        state, result = FAIL, f"{result}; aim of {_AIM_RATIO:.2f} missed"
    if not counted or not forced:
        state = FAIL
        result += f"; answers {'right' if counted else 'wrong'}, accepted {'as' if forced else 'not as'} forced"
    report.add("step", what, state, result, step_ms=step * 1e3, bare_ms=bare * 1e3, ratio=ratio)


def timed_decode(
    target: Target, drafter: Drafter, requests: list[Request], capacity: int, graphs: bool
) -> tuple[list[Result], float]:
    """Results, and the median seconds between two steps of the first request (the first ones compile or capture)."""
    at: list[float] = []

    def listen(name: str, tokens: list[int]) -> None:
        if name == requests[0].id:
            at.append(time.perf_counter())

    found = decode(
        target, drafter, requests, slots=len(requests), capacity=capacity, on_token=listen, graphs=graphs
    )  # fmt: skip
    results = list(found)
    gaps = [after - before for before, after in itertools.pairwise(at[1:])]
    return results, statistics.median(gaps)


@torch.inference_mode()
def bare_pass(target: Target, drafter: Drafter, prefix: int, batch: int, capacity: int, graphs: bool) -> float:
    """Median seconds of a target pass over the same rows behind `prefix` cached ones; the device is waited for."""
    cache = TreeCache(kv_shapes(target), batch, capacity, target.device, target.dtype)
    cache.lengths.fill_(prefix)
    cache.host_lengths = [prefix] * batch
    tree = drafter.propose(torch.full((batch,), 9, device=target.device), None)  # type: ignore[arg-type]
    ancestors = tree.ancestors()
    captured = CapturedPass(target, cache) if graphs else None
    if captured is not None:
        captured.run(tree.tokens, tree.depth, ancestors, {})
    seconds = []
    for _ in range(2 if target.device.type == "cpu" else _PASSES):
        synchronize(target.device)
        started = time.perf_counter()
        if captured is None:
            tree_pass(target, cache, tree.tokens, tree.depth, ancestors)
        else:
            captured.made[captured.key(tree.tokens, ancestors)].replay()
        synchronize(target.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
