"""Tokenizers whose tokens are bytes: a text's tokens can be told by looking at it."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ALPHABET = {char: rank for rank, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def byte_tokenizer(
    *special_tokens: str, vocab: Mapping[str, int] = ALPHABET, merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """A byte-level BPE of the 256 bytes, or of `vocab`, with special tokens behind them."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer
