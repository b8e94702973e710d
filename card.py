"""The model card of a draft head: its metadata for the Hub, and a text with figures and their circumstances."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .card_parts import code, figures, languages, sentence, table
from .errors import DraftsmithError

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

OWN_LINE = (
    "<!-- Written by `draftsmith push`. Delete this line to keep your own text: the file is then sent as it is. -->"
)
"""The last line of a card that may be written anew."""
LICENSE = "other"
"""What the Hub calls a licence that is none of its list, or isn't known."""
RELATION = "adapter"
"""Of the Hub's relations to a base model the one that fits: small weights that are used beside the base's own."""
_CALLED = {
    "eagle1": "EAGLE-1", "eagle2": "EAGLE-2", "eagle3": "EAGLE-3", "eagle3.1": "EAGLE-3.1", "hass": "HASS",
    "medusa1": "Medusa-1", "medusa2": "Medusa-2", "hydra": "Hydra", "mtp": "MTP",
}  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Serving:
    """How one engine serves the head.

    Attributes:
        engine: as people write it.
        commands: lines for a shell.
        python: the same in Python; None where there is no such way.
        notes: constraints, a sentence each.
    """

    engine: str
    commands: list[str]
    python: str | None
    notes: list[str]


@dataclass(frozen=True)
class Data:
    """What the head learned from.

    Attributes:
        recipe: its name.
        sources: what each is: (name, dataset on the Hub or None, its commit or None).
        answers: "target" or "dataset": whose they are.
        documents, tokens, answer_tokens: of the collected answers.
        temperatures: of the target's answers; empty where they are the data's.
    """

    recipe: str
    sources: list[tuple[str, str | None, str | None]]
    answers: str
    documents: int
    tokens: int
    answer_tokens: int
    temperatures: list[float]


@dataclass(frozen=True)
class Facts:
    """All that a card says; a part that isn't known is left out of it.

    Attributes:
        repo: me/Name.
        kind: the head's name in `configs/heads/`.
        model: what this toolkit's commands take as --model.
        head: its HeadConfig, in JSON's form.
        parameters: how many numbers its files hold.
        dtype: of the exported weights.
        layout: of the export.
        report: the content of the run's `report.json`, if it is on these weights.
        training: what the stage `train` recorded.
        data: see Data.
        serving: engines that load it.
        unsupported: engines that don't, with the reason.
        license: as the Hub writes it.
    """

    repo: str
    kind: str
    model: str
    head: Mapping[str, Any]
    parameters: int
    dtype: str
    layout: str
    report: Mapping[str, Any] | None
    training: Mapping[str, Any] | None
    data: Data | None
    serving: Sequence[Serving]
    unsupported: Sequence[tuple[str, str]]
    license: str = LICENSE

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise DraftsmithError(
                f"--license {self.license!r} is no licence's id: write it as the Hub does, e.g. apache-2.0, mit, "
                "llama3.1, or other"
            )

    @property
    def called(self) -> str:
        """The kind of head, as people write it."""
        return _CALLED.get(self.kind, self.kind)

    @property
    def base(self) -> str | None:
        """The target's id on the Hub; None where it is only known by a folder's name."""
        target = str(self.head["target_id"])
        return target if _HUB_ID.fullmatch(target) else None


def metadata(facts: Facts) -> ModelCardData:
    """The block that the Hub reads."""
    from huggingface_hub import ModelCardData

    datasets = [] if facts.data is None else [name for _, name, _ in facts.data.sources if name is not None]
    engines = [re.sub(r"[^a-z0-9]+", "-", serving.engine.lower()) for serving in facts.serving]
    results = _results(facts)
    return ModelCardData(
        license=facts.license,
        base_model=facts.base,
        base_model_relation=RELATION if facts.base else None,
        library_name="draftsmith",
        pipeline_tag="text-generation",
        language=languages(facts.report) or None,
        tags=["speculative-decoding", "draft-head", facts.kind, *engines],
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=facts.repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _results(facts: Facts) -> list[EvalResult]:
    """Tau of every benchmark, in the form of a model index."""
    from huggingface_hub import EvalResult

    if facts.report is None:
        return []
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["name"],
            dataset_name=f"{row['name']}, {row['n_prompts']} prompts",
            metric_type="tau",
            metric_name="tokens a step (τ), greedy, tree " + facts.report["summary"]["setting"]["tree"],
            metric_value=round(row["tau"], 3),
        )
        for row in facts.report["benchmarks"]
    ]


def write(facts: Facts) -> str:
    """The whole card, metadata first; its last line is OWN_LINE.

    Raises:
        DraftsmithError: the metadata doesn't come back from the card as it was written.
    """
    from huggingface_hub import ModelCard

    data = metadata(facts)
    parts = [
        f"# {facts.repo.rpartition('/')[2]}",
        _opening(facts),
        _what(facts),
        *figures(facts.report),
        *_serve(facts),
        *_data(facts),
        *_limits(facts),
        _again(facts),
        _files(facts),
        OWN_LINE,
    ]
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"
    if ModelCard(text).data.to_dict() != data.to_dict():
        raise DraftsmithError(f"{facts.repo}: the card's metadata can't be read back: {data.to_yaml()}")
    return text


def _opening(facts: Facts) -> str:
    target = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else f"`{facts.head['target_id']}`"
    return (
        f"A draft head of the kind {facts.called} for speculative decoding of {target}. It drafts a few tokens ahead, "
        "the target reads all of them in one pass and keeps those that it would have written itself: answers stay the "
        "target's own, they come faster. It is of no use without its target, or with another one."
    )


def _what(facts: Facts) -> str:
    head = facts.head
    vocabulary = f"{head['draft_vocab_size']:,} of the target's {head['vocab_size']:,} tokens"
    rows = [
        ("target", f"`{head['target_id']}`"),
        ("its revision", f"`{head['target_revision']}`" if head["target_revision"] else None),
        ("its fingerprint", f"`{head['target_fingerprint']}`"),
        ("its chat template", f"sha256 `{head['chat_template_sha256']}`" if head["chat_template_sha256"] else "none"),
        ("head", f"{facts.called}; its files hold {facts.parameters / 1e6:,.1f} million numbers, {facts.dtype}"),
        ("reads", f"the states behind layers {', '.join(map(str, head['layer_ids']))}" if head["layer_ids"] else None),
        ("draft vocabulary", "the target's" if head["draft_vocab_size"] == head["vocab_size"] else vocabulary),
        ("trained on documents of", f"at most {head['trained_length']:,} tokens"),
        ("unrolled in training", f"{head['steps']} steps"),
        ("layout of the files", facts.layout),
    ]
    return table(["", ""], [(name, text) for name, text in rows if text is not None])


def _serve(facts: Facts) -> list[str]:
    parts = ["## Serve it"]
    for one in facts.serving:
        parts.append(f"### {one.engine}")
        if one.commands:
            parts.append(code("bash", one.commands))
        if one.python is not None:
            parts.append(code("python", [one.python]))
        parts += ["\n".join(f"- {sentence(note)}" for note in one.notes)] if one.notes else []
    if facts.unsupported:
        parts.append("### Other engines")
        parts.append("\n".join(f"- {engine}: {sentence(reason)}" for engine, reason in facts.unsupported))
    return parts


def _data(facts: Facts) -> list[str]:
    data, training = facts.data, facts.training
    if data is None and training is None:
        return []
    parts = ["## Training"]
    rows: list[tuple[str, str]] = []
    if data is not None:
        whose = "the target's own" if data.answers == "target" else "those that the data came with"
        at = ", ".join(f"{t:g}" for t in data.temperatures)
        rows += [
            ("prompts", f"recipe `{data.recipe}`: " + ", ".join(_source(*source) for source in data.sources)),
            ("answers", whose + (f", sampled at temperature {at} (0: greedy)" if at else "")),
            ("conversations", f"{data.documents:,}"),
            ("tokens", f"{data.tokens:,}, {data.answer_tokens:,} of them answers"),
        ]
    if training is not None:
        rows += [("tokens seen in training", f"{training['tokens']:,}"), ("optimizer steps", f"{training['step']:,}")]
        if "vocabulary_coverage" in training:
            rows.append(
                ("the draft vocabulary covers", f"{training['vocabulary_coverage']:.2%} of the answers' tokens")
            )
    return [*parts, table(["", ""], rows)]


def _source(name: str, dataset: str | None, commit: str | None) -> str:
    if dataset is None:
        return "the toolkit's own prompts" if name == "builtin" else f"own data (`{name}`)"
    at = f" at `{commit[:12]}`" if commit else ""
    return f"[{dataset}](https://huggingface.co/datasets/{dataset}){at}"


def _limits(facts: Facts) -> list[str]:
    lines = [
        f"It was trained on documents of at most {facts.head['trained_length']:,} tokens: what it accepts may fall "
        "behind that length.",
        "It fits this target alone: another revision, quantisation or fine-tune of it accepts less, another model "
        "nothing.",
        "It learned this chat template: prompts in another form accept less.",
    ]
    if facts.report is not None:
        found = languages(facts.report)
        if found:
            lines.append(f"Languages of the prompts it was measured on, told by their script: {', '.join(found)}.")
        warm = [f"{row['temperature']:g}" for row in facts.report["temperatures"]]
        lines.append(
            f"It was measured at temperature {', '.join(warm)} and batch 1: a higher temperature accepts less, a "
            "larger batch gains less, and on long prompts the first token takes a larger share of the time."
        )
    if facts.license == LICENSE:
        lines.append("No licence was named for these weights; the target's own terms say what it may be used for.")
    return ["## Limits", "\n".join(f"- {line}" for line in lines)]


def _again(facts: Facts) -> str:
    name = facts.repo.rpartition("/")[2]
    lines = [
        f"hf download {facts.repo} --local-dir {name}",
        f"draftsmith doctor {name} --target {facts.model}",
        f"draftsmith eval --model {facts.model} --head ./{name}",
    ]
    return "## Measure it again\n\n" + code("bash", lines)


def _files(facts: Facts) -> str:
    lines = ["`draftsmith.json`: what the head computes, and where it comes from; engines ignore it."]
    if facts.report is not None:
        lines.append("`report.json`, `report.html`: every figure above, and the logs of single steps that they are of.")
    return "## Files\n\n" + "\n".join(f"- {line}" for line in lines)
