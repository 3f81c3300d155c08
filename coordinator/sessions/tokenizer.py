"""Text to token ids and back, with the `tokenizers` library alone, and what a checkpoint folder says of its model."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.checkpoint_json import check_family, read_json_object
from outrider.errors import CheckpointError
from outrider.grammar.compiler import GrammarCompiler
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A token that is plain text under every decoder: what follows it shows how a token reads in the middle of a text.
_PROBE = "a"


class TextTokenizer:
    """A tokenizer that can also say, token by token, which bytes of text each id stands for.

    In the middle of a text every token stands for fixed bytes, whatever its neighbours are. This holds for byte-level
    and for metaspace decoders, with or without byte fallback; the start of a text is the exception: there some
    decoders drop one leading space (`leading_space_dropped`).

    Attributes:
        vocab_size: added tokens included.
        grammars: of structured output, over these tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        document = json.loads(tokenizer.to_str())
        decoder_types = _types_within(document["decoder"])
        unknown = decoder_types - {"ByteLevel", "Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if unknown:
            raise CheckpointError(f"tokenizer.json: decoder {', '.join(sorted(unknown))} is not served")
        self._byte_of_char = _byte_level_alphabet() if "ByteLevel" in decoder_types else None
        self._has_byte_fallback = "ByteFallback" in decoder_types
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.grammars = GrammarCompiler(tokenizer.to_str)
        normalizers = _types_within(document["normalizer"])
        # Most bytes of text that one token can stand for, or None where the normalizer may shorten the text at will.
        self.longest_token_bytes: int | None = None
        if normalizers <= {"Sequence", "NFC", "Prepend", "Replace"}:
            # NFC makes at most three bytes of text one byte of its normal form.
            shrink = 3 if "NFC" in normalizers else 1
            longest = max(len(token.encode("utf-8")) for token in tokenizer.get_vocab(with_added_tokens=True))
            self.longest_token_bytes = shrink * longest

    @classmethod
    def load(cls, folder: str | Path) -> "TextTokenizer":
        """Load the tokenizer of a checkpoint folder.

        Raises:
            CheckpointError: tokenizer.json is missing or broken.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no tokenizer.json; save the tokenizer in its fast form")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, by default with the special tokens that the tokenizer puts around one.

        Special tokens that the text itself names become those tokens either way.
        """
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text that has begun; none for special tokens and ids without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """Return a token's display text, or its name if it has none."""
        piece = self.piece(token_id)
        if piece:
            return piece.decode("utf-8", errors="replace")
        return self._tokenizer.id_to_token(token_id) or ""

    def leading_space_dropped(self, token_id: int) -> bool:
        """Return True if the token loses its leading space at the start of a text."""
        piece = self.piece(token_id)
        return piece.startswith(b" ") and self.decode([token_id]).encode("utf-8") == piece[1:]

    def _read_piece(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_char is not None:
            return _byte_level_piece(token, self._byte_of_char)
        fallback = _BYTE_FALLBACK.fullmatch(token) if self._has_byte_fallback else None
        if fallback:
            return bytes([int(fallback[1], 16)])
        decoder: Any = self._tokenizer.decoder
        text = decoder.decode([_PROBE, token]) if decoder is not None else f"{_PROBE} {token}"
        return text.removeprefix(_PROBE).encode("utf-8")


def read_model_info(
    folder: str | Path, *, max_model_len: int | None = None, name: str | None = None
) -> common_pb2.ModelInfo:
    """Read the model's description from a checkpoint's JSON files; the target worker sets dtype.

    Args:
        max_model_len: most tokens of a session; default the model's own limit.
        name: that clients know the model by; default the folder's.

    Raises:
        CheckpointError: config.json is missing, broken or lacks a needed entry, or the model is shorter than
            `max_model_len`.
    """
    folder = Path(folder)
    config = read_json_object(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint")
    try:
        vocab_size, longest = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        if "model_type" in config:
            check_family(config, folder)  # which may call these otherwise
        raise CheckpointError(f"{folder}/config.json: vocab_size and max_position_embeddings are needed") from error
    if max_model_len is not None and max_model_len > longest:
        raise CheckpointError(f"{folder}: max_model_len {max_model_len} given, the model ends at {longest}")
    generation = read_json_object(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return common_pb2.ModelInfo(
        name=name or folder.resolve().name,
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash(folder) if (folder / "tokenizer.json").is_file() else "",
        max_model_len=max_model_len or longest,
        eos_token_ids=eos_token_ids,
    )


def _types_within(part: dict[str, Any] | None) -> set[str]:
    """The types of a component of tokenizer.json and of those nested in it."""
    if part is None:
        return set()
    nested = [*part.get("decoders", ()), *part.get("normalizers", ())]
    return {part["type"]}.union(*(_types_within(inner) for inner in nested))


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _byte_level_piece(token: str, byte_of_char: dict[str, int]) -> bytes:
    if all(char in byte_of_char for char in token):
        return bytes(byte_of_char[char] for char in token)
    # An added token with characters outside the alphabet stands for itself.
    return token.encode("utf-8")
