"""Trained weights as ordinary Hugging Face checkpoints, and back."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from llama import Llama, LlamaShape
from tokenization import END_OF_TEXT_ID, save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from outrider.engine.weight_source import SafetensorsSource

if TYPE_CHECKING:
    # Imported where it is used: a training run that reads weights alone begins ten seconds sooner.
    from transformers import LlamaConfig

logger = logging.getLogger(__name__)

# Shards small enough for any code host and any review.
MAX_SHARD_SIZE = "11MB"


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids that config.json and generation_config.json state."""

    bos: int
    eos: int
    pad: int


def hugging_face_config(shape: LlamaShape, special: SpecialTokens) -> "LlamaConfig":
    """The `LlamaConfig` of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=special.bos,
        eos_token_id=special.eos,
    )


def save_checkpoint(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a bfloat16 checkpoint of the pair and check that transformers computes the same logits from it.

    Raises:
        ValueError: transformers' logits differ from this module's.
    """
    save_tokenizer(tokenizer, folder, model.shape.max_position_embeddings)
    save_weights(model, folder, SpecialTokens(bos=END_OF_TEXT_ID, eos=END_OF_TEXT_ID, pad=END_OF_TEXT_ID))


def save_weights(model: Llama, folder: Path, special: SpecialTokens, *, row_of: Tensor | None = None) -> None:
    """Write a checkpoint's weights, in bfloat16, and its configuration; transformers has to compute the same logits.

    Args:
        model: to write.
        folder: that is there.
        special: tokens that the configuration names.
        row_of: [V], row of the model's embedding that each of the V tokens has, where tokens share rows.

    Raises:
        ValueError: transformers' logits differ from this module's.
    """
    from transformers import GenerationConfig

    weights = {name: value.detach().cpu().bfloat16() for name, value in model.state_dict().items()}
    shape = model.shape
    if row_of is not None:
        shape = replace(shape, vocab_size=len(row_of))
        weights["model.embed_tokens.weight_rows"] = row_of.cpu().int()
    save_torch_state_dict(weights, folder, max_shard_size=MAX_SHARD_SIZE)
    config = hugging_face_config(shape, special)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=special.bos, eos_token_id=special.eos, pad_token_id=special.pad).save_pretrained(
        folder
    )
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors keeps its files to the user
    check_checkpoint(folder, shape)


def check_checkpoint(folder: Path, shape: LlamaShape) -> None:
    """Compare transformers' logits with this module's, in float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = load_checkpoint(folder, shape, torch.device("cpu"))
    theirs: Any = LlamaForCausalLM.from_pretrained(
        None, config=LlamaConfig.from_pretrained(folder), state_dict=_tensors(folder), dtype=torch.float32
    )
    tokens = torch.randint(shape.vocab_size, (2, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max().item()
    logger.info("%s: largest logit difference to transformers %.2e", folder, difference)
    if difference > 1e-3:
        raise ValueError(f"transformers' logits differ by {difference} in {folder}")


def shape_of_checkpoint(folder: Path) -> LlamaShape:
    """Return the shape that a folder's config.json states."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    return LlamaShape(**{name: config[name] for name in names}, rope_theta=config["rope_parameters"]["rope_theta"])


def load_checkpoint(folder: Path, shape: LlamaShape, device: torch.device) -> Llama:
    """The folder's weights in the training module, widened to float32."""
    model = Llama(shape)
    weights = {name: value.float() for name, value in _tensors(folder).items()}
    weights.pop("lm_head.weight", None)
    model.load_state_dict(weights)
    return model.to(device)


def _tensors(folder: Path) -> dict[str, Tensor]:
    source = SafetensorsSource(folder)
    return {name: source.tensor(name) for name in sorted(source.names)}
