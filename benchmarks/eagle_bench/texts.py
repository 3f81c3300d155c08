"""The pair's models in float32 on the CPU, and what the target writes behind prompts.

Shapes: T rows, F features, N hidden.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from outrider.engine.batch import BatchBuilder, ForwardBatch
from outrider.engine.decoder import Decoder, DecoderInputs
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import load_decoder_weights
from outrider.engine.kv_slots import SlotTable
from outrider.engine.weight_source import SafetensorsSource
from outrider.kernels.coupled_sampling import coupled_choice
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention

_SEED = 20_261_121


class Rows:
    """Slots of one forward after another over a pool, and their arrays."""

    def __init__(self, *, num_slots: int, row_len: int) -> None:
        self.slots = SlotTable(num_slots=num_slots, max_rows=num_slots // 8, max_row_len=row_len)

    def arrays(self, batch: ForwardBatch) -> dict[str, Any]:
        """Positions, slots and attention of a forward."""
        table = self.slots.table[batch.rows, : int(batch.key_len.max())]
        lens = np.diff(batch.query_start)
        slots = table[np.repeat(np.arange(len(lens)), lens), batch.write_index].astype(np.int64)
        names = ("query_start", "tree_start", "prefix_len", "key_len", "tree_mask")
        attention: dict[str, Any] = {name: torch.from_numpy(getattr(batch, name)) for name in names}
        return {
            "token_ids": torch.from_numpy(batch.token_ids),
            "positions": torch.from_numpy(batch.positions),
            "write_slots": torch.from_numpy(slots),
            "batch": TreeAttentionBatch(
                slot_table=torch.from_numpy(table),
                max_query_len=int(lens.max()),
                max_key_len=table.shape[1],
                **attention,
            ),
        }


def load_decoder(folder: Path) -> Decoder:
    """A model of the pair in float32."""
    spec = DecoderSpec.of(AutoConfig.from_pretrained(folder))
    weights = load_decoder_weights(SafetensorsSource(folder), spec, "cpu", torch.float32)
    return Decoder(spec, weights, attend=tree_attention)


def sampling(positions: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """The operators' arguments after the logits, for rows that choose the tokens at `positions` [T]."""
    count = len(positions)
    return [
        torch.full((count,), _SEED),
        positions,
        torch.full((count,), temperature),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(count),
        torch.zeros(count),
    ]


def run_decoder(
    decoder: Decoder, rows: Rows, batch: ForwardBatch, caches: list[list[torch.Tensor]], taps: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The last norm's rows [T, N], and the features [T, F] of the taps."""
    features = torch.empty((batch.num_rows, len(taps) * decoder.spec.hidden_size)) if taps else None
    inputs = DecoderInputs(
        **rows.arrays(batch), key_caches=caches[0], value_caches=caches[1], feature_layers=taps, features=features
    )
    return decoder.forward(inputs), features


def new_caches(decoder: Decoder, num_slots: int) -> list[list[torch.Tensor]]:
    """Keys and values of all layers."""
    shape = (num_slots, decoder.spec.kv_heads, decoder.spec.head_dim)
    return [[torch.zeros(shape) for _ in decoder.spec.layers] for _ in range(2)]


def write_texts(target: Decoder, prompts: list[list[int]], *, tokens: int, temperature: float) -> list[list[int]]:
    """Every prompt with so many tokens of the target behind it."""
    longest = max(map(len, prompts)) + tokens
    rows, caches = Rows(num_slots=len(prompts) * longest, row_len=longest), new_caches(target, len(prompts) * longest)
    table = [rows.slots.acquire_row() for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    begins = [0] * len(prompts)
    for _ in range(tokens):
        builder = BatchBuilder()
        for row, text, begin in zip(table, texts, begins, strict=True):
            rows.slots.extend(row, len(text) - begin)
            builder.add_chain(row, text[begin:], begin, True)
        begins = [len(text) for text in texts]
        batch = builder.build()
        hidden, _ = run_decoder(target, rows, batch, caches)
        logits = target.logits(hidden, torch.from_numpy(batch.logit_rows))
        chosen = coupled_choice(logits, *sampling(torch.tensor(begins), temperature)).tolist()
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
    return texts
