"""Layout, sizes and tapped target layers of an EAGLE head, read from its folder.

    eagle1   fc over [embedding of the next token, last hidden state], one Llama layer without a norm before its
             attention; embedding and output layer are the target's. EAGLE-2's trees grow from the same checkpoints
    eagle3   fc over three layers' hidden states, once; one layer ("midlayer") whose attention reads [normed
             embedding, normed hidden state]; a norm and an output layer of its own, over fewer tokens than the target

A block drafter is an eagle3 head that answers for several positions in one pass (`block_size` in its config.json).

Sources: arXiv 2401.15077, 2406.16858 and 2503.01840, and the keys of the checkpoints published with them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.checkpoint_json import read_json_object
from outrider.engine.decoder_spec import DecoderSpec
from outrider.errors import CheckpointError

EagleLayout = Literal["eagle1", "eagle3"]

LAST_NORM = -1
"""The tap of what leaves the target's last norm."""

_OUTPUTS = ("lm_head.weight", "model.lm_head.weight")
_TAPS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """One head's architecture."""

    layout: EagleLayout
    layer: DecoderSpec  # the head as a Llama of one layer; its vocabulary is the target's
    taps: tuple[int, ...]  # where the target's hidden states are read: after so many layers, or `LAST_NORM`
    draft_vocab_size: int  # rows of the output layer
    has_output: bool  # whether the head has an output layer of its own; otherwise the target's is used
    norm_before_residual: bool = False  # whether the layer adds to the normed hidden state (some EAGLE-3 heads do)
    block_size: int = 1  # B, positions that one pass of a block drafter answers for; 1 of a head
    block_rank: int = 0  # rank of a block drafter's bias by the token before; 0 of a head

    @property
    def is_block(self) -> bool:
        """True for a block drafter."""
        return self.block_size > 1

    @property
    def hidden_size(self) -> int:
        """N of the head."""
        return self.layer.hidden_size


def read_eagle_spec(folder: Path, *, target_layers: int, stored: frozenset[str]) -> EagleSpec:
    """The architecture of the head in `folder`.

    Args:
        stored: names of its tensors.

    Raises:
        CheckpointError: config.json is missing or describes no head that can be served.
    """
    document = read_json_object(folder / "config.json")
    if document is None:
        raise CheckpointError(f"{folder}: no config.json; give the folder of an EAGLE head")
    layout = _layout(document, stored)
    if document.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{folder}: num_hidden_layers is {document['num_hidden_layers']}, 1 needed of a head")
    # Heads of other families' targets are Llama layers too, and say so; a window or another norm would be ignored.
    if document.get("model_type", "llama") != "llama":
        raise CheckpointError(f"{folder}: model_type is {document['model_type']!r}, 'llama' needed of an EAGLE head")
    block_size, block_rank = _block(folder, document, layout)
    layer = DecoderSpec.of({**document, "model_type": "llama", "num_hidden_layers": 1}, folder)
    return EagleSpec(
        layout=layout,
        layer=layer,
        taps=_taps(folder, document, target_layers) if layout == "eagle3" else (LAST_NORM,),
        draft_vocab_size=int(document.get("draft_vocab_size") or layer.vocab_size),
        has_output=layout == "eagle3" and not stored.isdisjoint(_OUTPUTS),
        norm_before_residual=bool(document.get("norm_before_residual", False)),
        block_size=block_size,
        block_rank=block_rank,
    )


def _layout(document: dict[str, Any], stored: frozenset[str]) -> EagleLayout:
    named = any("eagle3" in str(name).lower() for name in document.get("architectures") or ())
    shown = any(name.partition(".")[0] in ("midlayer", "d2t") or "hidden_norm" in name for name in stored)
    return "eagle3" if named or shown or document.get("draft_vocab_size") else "eagle1"


def _block(folder: Path, document: dict[str, Any], layout: EagleLayout) -> tuple[int, int]:
    if "block_size" not in document:
        return 1, 0
    if layout != "eagle3":
        raise CheckpointError(f"{folder}: block_size is given, which a head of the eagle3 layout alone has")
    for name, least in (("block_size", 2), ("block_rank", 1)):
        given = document.get(name)
        if not isinstance(given, int) or given < least:
            raise CheckpointError(f"{folder}: {name} is {given!r}, a whole number of at least {least} needed")
    return document["block_size"], document["block_rank"]


def _taps(folder: Path, document: dict[str, Any], target_layers: int) -> tuple[int, ...]:
    nested = document.get("eagle_config") or {}
    given = (nested.get(_TAPS_KEY) if isinstance(nested, dict) else None) or document.get(_TAPS_KEY)
    if given and not isinstance(given, list):
        raise CheckpointError(f"{folder}: {_TAPS_KEY} is {given!r}, a list of layers needed")
    # As the published heads were trained: early, in the middle, late.
    taps = tuple(given) if given else (2, target_layers // 2, target_layers - 3)
    if not all(isinstance(tap, int) and 0 <= tap <= target_layers for tap in taps):
        raise CheckpointError(
            f"{folder}: {_TAPS_KEY} is {list(taps)}, layers 0 to {target_layers} needed: is it a head of this target?"
        )
    return taps
