"""A tokenizer whose tokens are the 256 bytes: a text's tokens can be told by looking at it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.coordinator.sessions.tokenizer import TextTokenizer

ALPHABET = {char: rank for rank, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def tokenizer_of_bytes(*special_tokens: str) -> TextTokenizer:
    """With these special tokens behind the bytes."""
    tokenizer = Tokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return TextTokenizer(tokenizer)
