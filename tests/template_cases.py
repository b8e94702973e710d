"""Chat templates with their known answers, and tokenizers that have their special tokens.

In expectations of tiny templates [[ ]] stands around what is trained on; each string is a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tiny import make_tiny_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SYSTEM = {"role": "system", "content": "S"}
TWO_TURNS = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
]
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class Case:
    """A template and what is to come out of it.

    Attributes:
        file: of the template.
        specials: its special tokens.
        bos, eos: those of the tokenizer.
        stops: what ends an answer, beside eos.
        rows: of `messages`.
        changes: that are counted.
        kwargs: the template's variables.
    """

    file: str
    rows: list[Any]
    specials: tuple[str, ...] = CHATML_TOKENS
    bos: str = "<|endoftext|>"
    eos: str = "<|im_end|>"
    stops: tuple[str, ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=lambda: TWO_TURNS)
    tools: list[dict[str, Any]] | None = None
    changes: tuple[str, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def tokenizer_of(case: Case, folder: Path = TEMPLATES):
    """Return a byte-level tokenizer with the case's template and special tokens."""
    tokenizer = _tokenizer(tuple(sorted({*case.specials, case.bos, case.eos, *case.stops})))
    tokenizer.bos_token, tokenizer.eos_token = case.bos, case.eos
    tokenizer.chat_template = (folder / case.file).read_text(encoding="utf-8")
    return tokenizer


@cache
def _tokenizer(specials: tuple[str, ...]):
    tokenizer = make_tiny_tokenizer(chat_template=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    return tokenizer


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def said(**answers: str) -> list[dict[str, Any]]:
    """Return one question and an answer with these fields."""
    return [TWO_TURNS[0], {"role": "assistant", "content": "", **answers}]


WEATHER = [
    {"role": "user", "content": "Q1"},
    call("weather", city='The "Hague"', days=2),
    {"role": "tool", "content": '{"sun": true}', "name": "weather", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "A1"},
]
WEATHER_TOOL = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

_ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_ONE, _TWO = _ASK.format("Q1"), _ASK.format("Q2")
EMPTY = "<think>\n\n</think>\n\n"
_STABLE = [f"{_ONE}[[A1<|im_end|>]]\n{_TWO}[[A2<|im_end|>]]"]
GEMMA = ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>")
OSS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|startoftext|>")
_DEEPSEEK = ("<|User|>", "<|Assistant|>", "<s>", "</s>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GLM = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>")
_THOUGHT = {"content": "<think>\nR\n</think>\n\nA1"}

TINY = {
    "prefix-stable": Case("chatml.jinja", _STABLE),
    "old thoughts taken out, there are none": Case("strips_old_thoughts.jinja", _STABLE),
    "old thoughts taken out": Case(
        "strips_old_thoughts.jinja",
        [
            f"{_ONE}[[<think>\nR\n</think>\n\nA1<|im_end|>]]",
            f"{_ONE}A1<|im_end|>\n{_TWO}[[<think>\nR2\n</think>\n\nA2<|im_end|>]]",
        ],
        messages=[*said(**_THOUGHT), TWO_TURNS[2], {"role": "assistant", "content": "<think>\nR2\n</think>\n\nA2"}],
    ),
    "an empty thought on the last turn": Case(
        "empty_thought.jinja",
        [f"{_ONE}[[{EMPTY}A1<|im_end|>]]", f"{_ONE}A1<|im_end|>\n{_TWO}[[{EMPTY}A2<|im_end|>]]"],
    ),
    "the thought in a field": Case(
        "empty_thought.jinja",
        [f"{_ONE}[[<think>\nR\n</think>\n\nA1<|im_end|>]]"],
        messages=said(content="A1", reasoning_content="R"),
    ),
    "serving closes the thought, the record has none": Case(
        "empty_thought.jinja",
        [f"{_ONE}{EMPTY}[[A1<|im_end|>]]", f"{_ONE}A1<|im_end|>\n{_TWO}{EMPTY}[[A2<|im_end|>]]"],
        kwargs={"enable_thinking": False},
    ),
    "serving closes the thought, the record has one": Case(
        "empty_thought.jinja",
        [f"{_ONE}{EMPTY}[[A1<|im_end|>]]"],
        messages=said(**_THOUGHT),
        kwargs={"enable_thinking": False},
        changes=("reasoning is not rendered by the template",),
    ),
    "a thought in a field that no template reads": Case(
        "chatml.jinja",
        [f"{_ONE}[[A1<|im_end|>]]"],
        messages=said(content="A1", reasoning_content="R"),
        changes=("reasoning is not rendered by the template",),
    ),
    "serving opens another header than training": Case(
        "indented.jinja",
        [
            "\n    <|im_start|>user\nQ1<|im_end|>\n\n\n    <|im_start|>assistant\n\n[[A1<|im_end|>]]",
            "\n    <|im_start|>user\nQ1<|im_end|>\n\n\n    <|im_start|>assistant\nA1<|im_end|>\n\n"
            "\n    <|im_start|>user\nQ2<|im_end|>\n\n\n    <|im_start|>assistant\n\n[[A2<|im_end|>]]",
        ],
    ),
    "the user's turn writes the header": Case(
        "header_by_user.jinja",
        [
            "<|im_start|>user<|im_sep|>Q1<|im_end|><|im_start|>assistant<|im_sep|>[[A1<|im_end|>]]"
            "<|im_start|>user<|im_sep|>Q2<|im_end|><|im_start|>assistant<|im_sep|>[[A2<|im_end|>]]"
        ],
        specials=(*CHATML_TOKENS, "<|im_sep|>"),
    ),
    "no generation prompt, answers led by a space": Case(
        "space_led.jinja",
        ["<s>[INST] Q1 [/INST][[ A1</s>]][INST] Q2 [/INST][[ A2</s>]]"],
        specials=("[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
    ),
    "contents are trimmed": Case(
        "trims.jinja",
        [f"{_ONE}[[A1<|im_end|>]]\n{_TWO}[[A2<|im_end|>]]"],
        messages=[{**m, "content": f" \n{m['content']}\n "} for m in TWO_TURNS],
    ),
    "the system's words in the first user turn": Case(
        "system_in_first_user.jinja",
        [
            "<start_of_turn>user\nS\n\nQ1<end_of_turn>\n<start_of_turn>model\n[[A1<end_of_turn>]]\n"
            "<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\n[[A2<end_of_turn>]]"
        ],
        specials=GEMMA,
        bos="<bos>",
        eos="<eos>",
        stops=("<end_of_turn>",),
        messages=[SYSTEM, *TWO_TURNS],
    ),
    "the system's words in the last user turn, only while it is last": Case(
        "system_in_last_user.jinja",
        ["<s>[INST]S\n\nQ1[/INST][[A1</s>]]", "<s>[INST]Q1[/INST]A1</s>[INST]S\n\nQ2[/INST][[A2</s>]]"],
        specials=("[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
        messages=[SYSTEM, *TWO_TURNS],
    ),
    "a default system turn": Case(
        "default_system.jinja",
        [f"<|im_start|>system\nBe kind.<|im_end|>\n{_ONE}[[A1<|im_end|>]]\n{_TWO}[[A2<|im_end|>]]"],
    ),
    "another end token on the last turn": Case(
        "two_ends.jinja",
        [
            "<|start|>user<|message|>Q1<|end|><|start|>assistant[[<|channel|>final<|message|>A1<|return|>]]",
            "<|start|>user<|message|>Q1<|end|><|start|>assistant<|channel|>final<|message|>A1<|end|>"
            "<|start|>user<|message|>Q2<|end|><|start|>assistant[[<|channel|>final<|message|>A2<|return|>]]",
        ],
        specials=OSS,
        bos="<|startoftext|>",
        eos="<|return|>",
    ),
    "another end token, and a thought": Case(
        "two_ends.jinja",
        [
            "<|start|>user<|message|>Q1<|end|><|start|>assistant[[<|channel|>analysis<|message|>R<|end|>"
            "<|start|>assistant<|channel|>final<|message|>A1<|return|>]]"
        ],
        specials=OSS,
        bos="<|startoftext|>",
        eos="<|return|>",
        messages=said(content="A1", reasoning_content="R"),
    ),
    "one more end token behind the answer's": Case(
        "trailing_eos.jinja",
        ["<|user|>\nQ1<|end|>\n<|assistant|>\n[[A1<|end|>]]\n<|user|>\nQ2<|end|>\n<|assistant|>\n[[A2<|end|>]]"],
        specials=("<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        stops=("<|end|>",),
    ),
    "an end token that isn't known to be one": Case(
        "chatml.jinja",
        _STABLE,
        eos="<|endoftext|>",
        changes=("answers end with <|im_end|>, which is no end-of-sequence token of the model",),
    ),
    "marks around the text alone": Case(
        "marks.jinja", [f"{_ONE}Answer: [[A1<|im_end|>]]\n{_TWO}Answer: [[A2<|im_end|>]]"]
    ),
    "marks around header, text and line break": Case("wide_marks.jinja", _STABLE),
    "serving opens a thought": Case(
        "opens_thought.jinja",
        [
            f"{_ONE}<think>\n[[R\n</think>\n\nA1<|im_end|>]]",
            f"{_ONE}A1<|im_end|>\n{_TWO}<think>\n[[R2\n</think>\n\nA2<|im_end|>]]",
        ],
        messages=[*said(**_THOUGHT), TWO_TURNS[2], {"role": "assistant", "content": "A2", "reasoning_content": "R2"}],
    ),
    "serving opens a thought, one answer lacks it": Case(
        "opens_thought.jinja",
        [f"{_ONE}A1<|im_end|>\n{_TWO}<think>\n[[R2</think>A2<|im_end|>]]"],
        messages=[*TWO_TURNS[:3], {"role": "assistant", "content": "<think>R2</think>A2"}],
        changes=("answers without the thought that the generation prompt opens are not trained on",),
    ),
    "serving closes an empty thought": Case(
        "closes_thought.jinja",
        ["<s><|User|>Q1<|Assistant|><think></think>[[A1</s>]]<|User|>Q2<|Assistant|><think></think>[[A2</s>]]"],
        specials=_DEEPSEEK,
        bos="<s>",
        eos="</s>",
    ),
    "serving closes an empty thought, the record has one": Case(
        "closes_thought.jinja",
        ["<s><|User|>Q1<|Assistant|><think></think>[[A1</s>]]"],
        specials=_DEEPSEEK,
        bos="<s>",
        eos="</s>",
        messages=said(**_THOUGHT),
        changes=("reasoning is not rendered by the template",),
    ),
    "an open thought in the template's own form": Case(
        "closes_thought.jinja",
        ["<s><|User|>Q1<|Assistant|><think>[[R</think>A1</s>]]"],
        specials=_DEEPSEEK,
        bos="<s>",
        eos="</s>",
        messages=said(content="A1", reasoning_content="R"),
        kwargs={"thinking": True},
    ),
    "answers end where the next turn begins": Case(
        "no_end.jinja",
        ["[gMASK]<sop><|user|>\nQ1<|assistant|>[[\nA1<|user|>]]\nQ2<|assistant|>[[\nA2<|user|>]]"],
        specials=GLM,
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
    ),
    "answers end where the next turn begins, which takes the thought out": Case(
        "no_end_old_thoughts.jinja",
        ["[gMASK]<sop><|user|>\nQ1<|assistant|>[[\n<think>\nR\n</think>\n\nA1<|user|>]]"],
        specials=GLM,
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
        messages=said(**_THOUGHT),
    ),
    "calls end where the tool speaks": Case(
        "no_end.jinja",
        [
            "[gMASK]<sop><|user|>\nQ1<|assistant|>[[\n<tool_call>weather</tool_call><|observation|>]]"
            '\n{"sun": true}<|assistant|>[[\nA1<|user|>]]'
        ],
        specials=GLM,
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
        messages=WEATHER,
    ),
    "no special token at all": Case(
        "plain_words.jinja",
        ["User: Q1\nAssistant:[[ A1]]\nUser: Q2\nAssistant:[[ A2]]"],
        changes=("answers end with no special token",),
    ),
    "bos inside, a header of two line breaks": Case(
        "wide_header.jinja",
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[A1<|eot_id|>]]"
            "<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[A2<|eot_id|>]]"
        ],
        specials=LLAMA,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "the flag for generation isn't read": Case(
        "no_flag.jinja",
        [
            "<|im_start|>user\nQ1<|im_end|>\n[[<|im_start|>assistant\nA1<|im_end|>]]\n"
            "<|im_start|>user\nQ2<|im_end|>\n[[<|im_start|>assistant\nA2<|im_end|>]]"
        ],
    ),
    "tool calls": Case(
        "tools.jinja",
        [
            '<|im_start|>system\n{"type": "function", '
            '"function": {"name": "weather", "parameters": {"type": "object"}}}'
            f"\n<|im_end|>\n{_ONE}"
            '[[<tool_call>{"name": "weather", "arguments": {"city": "The \\"Hague\\"", "days": 2}}</tool_call>'
            "<|im_end|>]]"
            '\n<|im_start|>user\n<tool_response>{"sun": true}</tool_response><|im_end|>\n<|im_start|>assistant\n'
            "[[A1<|im_end|>]]"
        ],
        messages=WEATHER,
        tools=WEATHER_TOOL,
    ),
}
"""By the trap each template has."""
