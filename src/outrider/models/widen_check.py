"""Does a widened checkpoint compute what the small one does? Both run through transformers in float32 arithmetic.

The large one runs as a whole, or layer by layer: transformers' own modules, each given its weights when its turn comes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging as transformers_logging

from outrider.errors import CheckpointError
from outrider.models import held_out_prompts
from outrider.models.widen import load_small

PROMPTS, PROMPT_TOKENS = 4, 48
_HIGHEST_PADDING_LOGIT = -50.0
FLOAT32_TOLERANCE = 1e-4
"""Deviation of float32 sums in another order, measured at 1e-5 on the embedded pair, whose logits reach 30."""


@dataclass(frozen=True, kw_only=True)
class LogitsReport:
    """Differences between the logits of two models, over all positions and real entries."""

    deviation: float  # root mean square of the differences
    # Fixed for float32 checkpoints; for bfloat16 ones as far as the small model's own logits in bfloat16 arithmetic
    # are from those in float32.
    allowed_deviation: float
    positions: int  # how many were compared
    same_choice: float  # share of positions with the same largest entry
    padding_logit: float  # the largest of any padding entry

    def __str__(self) -> str:
        return (
            f"at {self.positions} positions, in float32 arithmetic, logits differ by {self.deviation:.2g} (root mean "
            f"square, {self.allowed_deviation:.2g} allowed); same choice at {self.same_choice:.1%}; padding entries at "
            f"most {self.padding_logit:.0f}"
        )

    def raise_if_wrong(self) -> None:
        """Raise CheckpointError unless the function is the same and padding entries are never chosen."""
        # Asked this way round so that NaN fails.
        if not self.deviation <= self.allowed_deviation:
            raise CheckpointError(f"the widened logits differ by {self.deviation:.2g} (root mean square), "
                                  f"{self.allowed_deviation:.2g} allowed")  # fmt: skip
        if not self.padding_logit < _HIGHEST_PADDING_LOGIT:
            raise CheckpointError(f"padding entries reach logit {self.padding_logit:.1f}")


@dataclass(frozen=True, kw_only=True)
class CheckReport(LogitsReport):
    """Differences between the logits of two targets or drafts."""

    largest_difference: float  # of any entry
    padding_mass: float  # probability of all padding entries at the worst position, softmax in float32

    def __str__(self) -> str:
        return (
            f"{super().__str__()}, their probability {self.padding_mass:g}; "
            f"the largest difference is {self.largest_difference:.2g}"
        )

    def raise_if_wrong(self) -> None:
        """Raise CheckpointError unless the function is the same and padding entries hold no mass."""
        super().raise_if_wrong()
        if self.padding_mass != 0:
            raise CheckpointError(f"padding entries reach probability {self.padding_mass:.2g}")


def check_tokens(source: Path) -> torch.Tensor:
    """Beginnings of held-out prompts, [PROMPTS, PROMPT_TOKENS] int64."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    return torch.tensor([tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in held_out_prompts()[:PROMPTS]])


@torch.no_grad()
def check_checkpoint(folder: Path, source: Path, token_ids: torch.Tensor, *, layer_by_layer: bool) -> CheckReport:
    """Compare the checkpoint in `folder` with the small one in `source` on `token_ids` [B, L].

    The rows begin at positions spread over all that the checkpoint promises: the first at 0, the last ends at the end.

    Raises:
        CheckpointError: a tensor is missing or of another shape than config.json says.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    inputs = {"input_ids": token_ids, "position_ids": _positions(token_ids, config.max_position_embeddings)}
    with no_progress_bar():
        small = _load(source, torch.float32)(**inputs).logits
        large = (_load_layer_by_layer if layer_by_layer else _load)(folder, torch.float32)(**inputs).logits
        if config.dtype == torch.float32:
            allowed = FLOAT32_TOLERANCE
        else:
            allowed = root_mean_square(_load(source, torch.bfloat16)(**inputs).logits.float() - small)
    real, padding = large[..., : small.shape[-1]], large[..., small.shape[-1] :]
    difference = real - small
    return CheckReport(
        deviation=root_mean_square(difference),
        allowed_deviation=allowed,
        largest_difference=difference.abs().max().item(),
        positions=token_ids.numel(),
        same_choice=(large.argmax(-1) == small.argmax(-1)).float().mean().item(),
        padding_logit=padding.max().item(),
        padding_mass=large.softmax(-1)[..., small.shape[-1] :].sum(-1).max().item(),
    )


def _positions(token_ids: torch.Tensor, max_positions: int) -> torch.Tensor:
    """[B, L] int64."""
    rows, length = token_ids.shape
    first = torch.linspace(0, max(0, max_positions - length), rows, dtype=torch.float64).long()
    return first[:, None] + torch.arange(length)


def root_mean_square(values: torch.Tensor) -> float:
    """Root mean square of all entries, in float64."""
    return values.double().square().mean().sqrt().item()


def _load(folder: Path, dtype: torch.dtype) -> nn.Module:
    loaded: Any = LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig.from_pretrained(folder, local_files_only=True),
        state_dict=load_small(folder)[1],
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    wrong = [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]
    if wrong:
        raise CheckpointError(f"{folder}: missing, misshapen or unexpected: {wrong}")
    return model.eval()


def _load_layer_by_layer(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A model without weights, whose layers read theirs from the shards before they run and drop them afterwards."""
    config = LlamaConfig.from_pretrained(folder, local_files_only=True)
    weights = _Shards(folder, dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    # The one part that computes its tensors instead of loading them.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    lent = {"lm_head": "model.embed_tokens."} if config.tie_word_embeddings else {}
    modules = [("model.embed_tokens", model.model.embed_tokens), ("model.norm", model.model.norm)]
    modules += [(f"model.layers.{number}", layer) for number, layer in enumerate(model.model.layers)]
    modules.append(("lm_head", model.lm_head))
    for name, module in modules:
        weights.lend(module, lent.get(name, f"{name}."))
    return model


class _Shards:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)

    def lend(self, module: Any, prefix: str) -> None:
        """Give a module the tensors `prefix`... for the time of its forward."""

        def load(*_: object) -> None:
            tensors = {name: self._read(prefix + name) for name in module.state_dict()}
            module.load_state_dict(tensors, assign=True)

        def drop(*_: object) -> None:
            module.to("meta")

        module.register_forward_pre_hook(load)
        module.register_forward_hook(drop)

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointError(f"{name}: in no shard")
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name).to(self._dtype)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Loading is quiet: commands show how far they are themselves."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
