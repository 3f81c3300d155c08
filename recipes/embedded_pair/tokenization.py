"""The pair's one tokenizer: byte-level BPE over Python source, and the text as token streams."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
# A line break takes the next line's indentation along: one token per line of layout instead of two or three.
# A name takes one sign before it ("(self", ".append", " return"), so that a statement is few tokens.
SPLIT_PATTERN = r"[^\S\n]*\n\s*|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: every byte is in the vocabulary, so any UTF-8 text survives encoding and decoding.

    `encode` puts the end-of-text token first, as in training, where it opens every document and every window.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)],
    )
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], batch: int = 512) -> np.ndarray:
    """All documents as one uint16 stream, each opened by the end-of-text token."""
    parts = []
    for start in range(0, len(texts), batch):
        parts += [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch_fast(texts[start : start + batch])]
    return np.concatenate(parts)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
