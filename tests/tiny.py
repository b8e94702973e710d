"""A tiny random Llama with a real tokenizer and chat template: what the suite trains on and decodes with."""

from __future__ import annotations

from pathlib import Path

import torch

EOS = "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then it runs home\n"
    "user asks what is the answer and the assistant gives an answer in a sentence\n"
    "write a short story about a ship that sails to the north in the winter\n"
)


def make_tiny_target(
    folder: Path,
    *,
    layers: int = 7,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    positions: int = 512,
    vocab: int = 320,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    chat_template: bool = True,
) -> Path:
    """Save a random Llama and its tokenizer to `folder` and return it.

    The weights are drawn wider than usual, so that greedy text is varied and depends on the prompt; the row of the
    end-of-turn token is made a little larger, so that some answers end before their length limit.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tiny_tokenizer(vocab, chat_template)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=eos,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2:
                    std = 1.0 if "embed" in name else 1.6 / weight.shape[1] ** 0.5
                    weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            model.lm_head.weight[eos] *= 1.3
    model.generation_config.eos_token_id = eos
    model.generation_config.do_sample = False
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_tokenizer(vocab: int = 320, chat_template: bool = True):
    """Return a byte-level BPE tokenizer with `vocab` tokens, ChatML specials and (by default) a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS.splitlines(), trainer)
    if backend.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {backend.get_vocab_size()} tokens, not {vocab}: choose 259..330")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token=EOS,
        pad_token="<|endoftext|>",
        model_max_length=512,
    )
    if chat_template:
        tokenizer.chat_template = CHATML
    return tokenizer
