"""A tiny random Llama with a chat template, as a checkpoint folder."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nHi<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_llama(folder: Path) -> Path:
    """Write a Llama over bytes, of SmolLM2's proportions: three query heads a key/value head, tied embeddings.

    Returns:
        `folder`.
    """
    vocab = {char: rank for rank, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=2)}
    tokenizer = Tokenizer(models.BPE(vocab={START: 0, END: 1, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=END)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer.get_vocab()), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, bos_token_id=0,
        eos_token_id=1, pad_token_id=1, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
