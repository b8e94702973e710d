"""From a GGUF file to an ordinary transformers folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""What a tokenizer calls its special tokens, and GGUF their ids (tokenizer.ggml.…_token_id)."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")


def convert(gguf: Path, out: Path, split_digits: bool) -> None:
    """Write the de-quantised model (bf16) and its tokenizer as an ordinary transformers folder.

    A tokenizer.json beside the file is taken in the place of what the file says of its tokenizer; what is missing
    there, chat template and special tokens, is the file's.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_unpacked(transformers)
        )
        own = (gguf.parent / "tokenizer.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **({} if own else {"gguf_file": gguf.name}))
        if own:
            _complete(tokenizer, gguf)
        _forget_quantization(model)
        for name in _EPSILONS:  # GGUF keeps floats as fp32: 1e-5 comes back as 9.999999747378752e-06
            if hasattr(model.config, name):
                setattr(model.config, name, float(f"{getattr(model.config, name):.6g}"))
        model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    finally:
        if progress_bars:
            logging.enable_progress_bar()
    if split_digits or (not own and _said(_reader(gguf), "tokenizer.ggml.pre") == "smollm"):
        from tokenizers import pre_tokenizers

        # GGUF names the splitting rule only, and transformers puts GPT-2's in its place
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out)
    for name in ("tokenizer_config.json", "config.json"):  # drop the temporary folder's name
        _drop_keys(out / name, {"name_or_path", "_name_or_path", "_model_name_or_path"})


def _complete(tokenizer: Any, gguf: Path) -> None:
    """Give a tokenizer the chat template and the special tokens of a GGUF file, where it has none of its own."""
    reader = _reader(gguf)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _said(reader, "tokenizer.chat_template")
    for name, key in _SPECIAL.items():
        number = _said(reader, f"tokenizer.ggml.{key}_token_id")
        if getattr(tokenizer, name) is None and number is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))


def _reader(gguf: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(gguf)


def _said(reader: Any, key: str) -> Any:
    """What a GGUF file says under a key, None if nothing."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _unpacked(transformers: Any) -> dict[str, Any]:
    """Newer releases can keep GGUF blocks packed where they have a kernel: ask for plain tensors."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _forget_quantization(model: Any) -> None:
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, key in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, key):
            delattr(holder, key)


def _drop_keys(path: Path, keys: set[str]) -> None:
    kept = {k: v for k, v in json.loads(path.read_text("utf-8")).items() if k not in keys}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")
