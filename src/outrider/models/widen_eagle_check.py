"""Does a widened EAGLE head compute what the small one does? Both draft two tokens deep, in float32 arithmetic; block
drafters as deep as their block.

The small target gives the features; the widened one's are the same at the first channels, which is what its own check
says (`outrider.models.widen_check`), so it need not run here.

Shapes: L tokens of a text, W hidden, w hidden of the small head, F features, V vocabulary.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.engine.eagle import BlockHead, EagleHead, load_eagle_head
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention_reference
from outrider.models.widen_check import FLOAT32_TOLERANCE, LogitsReport, no_progress_bar, root_mean_square
from outrider.models.widened_weights import WidenedLlama


@torch.no_grad()
def check_eagle(
    folder: Path, source: Path, target: Path, wide_target: WidenedLlama, token_ids: torch.Tensor
) -> LogitsReport:
    """Compare the head in `folder` with the small one in `source`, at the positions of all drafting steps.

    Args:
        target: checkpoint folder of the small target.
        token_ids: [B, L] texts.

    Raises:
        CheckpointError: a tensor is missing or of another shape than config.json says.
    """
    with no_progress_bar():
        small_target: Any = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    layers = small_target.config.num_hidden_layers
    embedding: torch.Tensor = small_target.get_input_embeddings().weight
    # Past the model's own end rotary tables go on; a short one is enough here.
    positions = token_ids.shape[1] + 2

    def load(dtype: torch.dtype) -> EagleHead:
        table = embedding.to(dtype)
        return load_eagle_head(source, embedding=table, output=table, target_layers=layers, max_positions=positions,
                               attend=tree_attention_reference)  # fmt: skip

    head = load(torch.float32)
    streams = target_streams(small_target, token_ids, head.taps)
    expected = [logits for stream in streams for logits in drafting_steps(head, *stream)]
    dtype = wide_target.dtype
    if dtype == torch.float32:
        allowed = FLOAT32_TOLERANCE
    else:
        rounded = [logits for stream in streams for logits in drafting_steps(load(dtype), *stream)]
        allowed = root_mean_square(torch.cat(rounded).float() - torch.cat(expected))
    wide_table = wide_target.tensor("model.embed_tokens.weight").float()
    wide = load_eagle_head(
        folder, embedding=wide_table, output=wide_table, target_layers=wide_target.shape.layers,
        max_positions=positions, attend=tree_attention_reference,
    )  # fmt: skip
    found = [logits for features, tokens in streams
             for logits in drafting_steps(wide, _widened(features, wide_table, len(head.taps)), tokens)]  # fmt: skip
    small, large = torch.cat(expected), torch.cat(found)
    real, padding = large[:, : small.shape[1]], large[:, small.shape[1] :]
    return LogitsReport(
        deviation=root_mean_square(real - small),
        allowed_deviation=allowed,
        positions=len(small),
        same_choice=(large.argmax(-1) == small.argmax(-1)).float().mean().item(),
        padding_logit=padding.max().item(),
    )


def target_streams(
    target: Any, token_ids: torch.Tensor, taps: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each text's features [L - 2, F] and its tokens [L - 1] after the first."""
    taken: dict[int, torch.Tensor] = {}

    def keep(place: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _module, inputs: taken.__setitem__(place, inputs[0])

    model = target.model
    modules = [*model.layers, model.norm]
    hooks = [module.register_forward_pre_hook(keep(place)) for place, module in enumerate(modules)]
    target(token_ids)
    for hook in hooks:
        hook.remove()
    features = torch.cat([taken[tap] for tap in taps], dim=-1)
    return [(features[row, :-2], token_ids[row, 1:]) for row in range(len(token_ids))]


def _widened(features: torch.Tensor, wide_table: torch.Tensor, taps: int) -> torch.Tensor:
    """The features as the widened target has them: its constant channel stands behind the small one's channels."""
    small = features.unflatten(1, (taps, -1))
    width = small.shape[2]
    wide = torch.zeros((len(features), taps, wide_table.shape[1]))
    wide[:, :, :width] = small
    wide[:, :, width] = wide_table[0, width]
    return wide.flatten(1)


def drafting_steps(head: EagleHead, features: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits [L - 2, V] of rows on features, and of rows on the head's own hidden rows of the places before.

    Of a block drafter: of all positions, with the bias by the same token.
    """
    count = len(features)
    dtype = head.weights.embedding.dtype
    caches = [torch.zeros((2 * count, head.kv_heads, head.head_dim), dtype=dtype) for _ in range(2)]
    chain = torch.arange(count, dtype=torch.int32)
    slots, one = chain.expand(count, count), torch.ones(count, dtype=torch.int32)
    if isinstance(head, BlockHead):
        fused, of_caches = head.fuse(features.to(dtype)), {"key_cache": caches[0], "value_cache": caches[1]}
        head.store(fused, tokens[:-1], positions=chain, write_slots=chain.long(), **of_caches)
        blocks = head.block_logits(
            fused, tokens[:-1], positions=chain, slot_table=slots.contiguous(), key_len=chain + 1, **of_caches
        )
        yield from (head.spread(position + head.bias(tokens[:-1])) for position in blocks.unbind(1))
        return
    hidden = head.forward(
        head.fuse(features.to(dtype)), tokens[:-1], positions=chain, write_slots=chain.long(),
        batch=_each_alone(slots, chain + 1), key_cache=caches[0], value_cache=caches[1],
    )  # fmt: skip
    yield head.logits(hidden)
    # The row after place i sees the features' rows up to i, and itself in a slot of its own.
    table = torch.cat((slots, torch.zeros((count, 1), dtype=torch.int32)), dim=1)
    table[torch.arange(count), (chain + 1).long()] = chain + count
    hidden = head.forward(
        hidden, tokens[1:], positions=chain + one, write_slots=(chain + count).long(),
        batch=_each_alone(table, chain + 2), key_cache=caches[0], value_cache=caches[1],
    )  # fmt: skip
    yield head.logits(hidden)


def _each_alone(table: torch.Tensor, lengths: torch.Tensor) -> TreeAttentionBatch:
    """Every row a session of its own."""
    count = len(lengths)
    return TreeAttentionBatch(
        slot_table=table.contiguous(), query_start=torch.arange(count + 1, dtype=torch.int32), tree_start=lengths,
        prefix_len=lengths, key_len=lengths, tree_mask=torch.zeros((count, 1), dtype=torch.int64), max_query_len=1,
        max_key_len=table.shape[1],
    )  # fmt: skip
