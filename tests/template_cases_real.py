"""The chat templates of published models, and the answers each is to give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from template_cases import CHATML_TOKENS, EMPTY, GEMMA, GLM, LLAMA, OSS, Case


@dataclass(frozen=True)
class RealCase(Case):
    """A template of a published model: `rows` has the answers of each row of TWO_TURNS.

    Attributes:
        call: what the answer of WEATHER's first turn holds, or the reason why there is none.
    """

    call: str = '{"city": "The \\"Hague\\"", "days": 2}'
    called: bool = True


def _real(file: str, *answers: str, call: str | None = None, apart: bool = True, **fields: Any) -> RealCase:
    rows = [[answer] for answer in answers] if apart else [list(answers)]
    extra = {} if call is None else {"call": call, "called": False}
    return RealCase(file, rows, **extra, **fields)


_STOP1, _STOP2 = "A1<|im_end|>", "A2<|im_end|>"
_LLAMA2 = {"bos": "<s>", "eos": "</s>", "specials": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")}
_DS = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "specials": ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
}
_DS1, _DS2 = "A1<｜end▁of▁sentence｜>", "A2<｜end▁of▁sentence｜>"
_ALTERNATE, _DROPS = "roles must alternate", "the chat template drops tool calls"

REAL = [
    _real("community__chatml.jinja", _STOP1, _STOP2, call=_ALTERNATE),
    _real("community__vicuna.jinja", "A1</s>", "A2</s>", call=_ALTERNATE, **_LLAMA2),
    _real("community__zephyr.jinja", "A1</s>", "A2</s>", call=_ALTERNATE, **_LLAMA2),
    RealCase(
        "llamacpp__GLM-4.6.jinja",
        [["\n<think></think>\nA1<|user|>", "\n<think></think>\nA2<|user|>"]],
        specials=GLM,
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
        call='<arg_key>city</arg_key>\n<arg_value>The "Hague"</arg_value>',
    ),
    _real("llamacpp__HuggingFaceTB-SmolLM3-3B.jinja", _STOP1, _STOP2, apart=False, call=_DROPS),
    _real(
        "llamacpp__Kimi-K2-Instruct.jinja",
        _STOP1,
        _STOP2,
        apart=False,
        call="access to attribute 'append' of 'list' object is unsafe",
        specials=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    ),
    _real("llamacpp__Qwen-QwQ-32B.jinja", _STOP1, _STOP2),
    _real("llamacpp__Qwen-Qwen2.5-7B-Instruct.jinja", _STOP1, _STOP2, apart=False),
    _real("llamacpp__Qwen-Qwen3-0.6B.jinja", EMPTY + _STOP1, EMPTY + _STOP2),
    _real("llamacpp__deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", _DS1, _DS2, **_DS),
    _real("llamacpp__deepseek-ai-DeepSeek-V3.1.jinja", _DS1, _DS2, apart=False, **_DS),
    _real("llamacpp__mistralai-Mistral-Nemo-Instruct-2407.jinja", "A1</s>", "A2</s>", apart=False, **_LLAMA2),
    _real(
        "swiftjinja__microsoft-phi-4.jinja",
        _STOP1,
        _STOP2,
        apart=False,
        call="the chat template drops tool",
        specials=(*CHATML_TOKENS, "<|im_sep|>"),
    ),
    _real(
        "trl__gemma3.jinja",
        "A1<end_of_turn>",
        "A2<end_of_turn>",
        apart=False,
        call=_ALTERNATE,
        specials=GEMMA,
        bos="<bos>",
        eos="<eos>",
        stops=("<end_of_turn>",),
    ),
    _real(
        "trl__gptoss.jinja",
        "<|channel|>final<|message|>A1<|return|>",
        "<|channel|>final<|message|>A2<|return|>",
        specials=OSS,
        bos="<|startoftext|>",
        eos="<|return|>",
        stops=("<|call|>",),
    ),
    _real(
        "trl__llama3_1.jinja",
        "A1<|eot_id|>",
        "A2<|eot_id|>",
        apart=False,
        specials=LLAMA,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    _real(
        "trl__phi3.jinja",
        "A1<|end|>",
        "A2<|end|>",
        apart=False,
        call="the chat template drops tool",
        specials=("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        eos="<|endoftext|>",
        stops=("<|end|>",),
    ),
    _real("trl__qwen3.jinja", EMPTY + _STOP1, EMPTY + _STOP2),
    _real("trl__qwen3_training.jinja", EMPTY + _STOP1, EMPTY + _STOP2, apart=False),
]
"""Every template in the test data."""
