"""The target as the recipe's module, and the trained head as a checkpoint in the published layout of EAGLE-3.

A block drafter has the layout of a head, with three tensors and two numbers more.
"""

import json
from pathlib import Path
from typing import Any

import torch
from block import Block
from export import load_checkpoint, shape_of_checkpoint
from head import Eagle3
from llama import Llama
from safetensors.torch import load_file, save_file
from tokenization import END_OF_TEXT_ID


def load_target(folder: Path, device: torch.device) -> Llama:
    """The target, fixed, in float32."""
    return load_checkpoint(folder, shape_of_checkpoint(folder), device).requires_grad_(False)


def load_head(head: Eagle3, folder: Path) -> None:
    """Load the weights of a head that `save_head` wrote.

    Where it had fewer feed-forward units, or fewer query heads of its one key and value head, the others keep what they
    begin with: they write nothing yet, so the function is the same. Where it had more units, those of the largest
    weights are taken. What it had not at all keeps what it begins with too.
    """
    held = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    gate, up, down = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    size = held[gate].norm(dim=1) * held[up].norm(dim=1) * held[down].norm(dim=0)
    units = size.topk(min(len(size), head.shape.intermediate_size)).indices.sort().values
    held |= {gate: held[gate][units], up: held[up][units], down: held[down][:, units]}
    for name, parameter in head.state_dict().items():
        if name in held:
            parameter[tuple(slice(size) for size in held[name].shape)] = held[name]


def save_head(head: Eagle3, folder: Path, *, bos: int = END_OF_TEXT_ID, eos: int = END_OF_TEXT_ID) -> None:
    """Write config.json and model.safetensors, bfloat16; output layer and embedding stay the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors keeps its files to the user
    shape = head.shape
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": bos,
        "draft_vocab_size": shape.vocab_size,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(head.taps), "use_aux_hidden_state": True},
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }
    if isinstance(head, Block):
        config["architectures"] = ["LlamaForCausalLMEagle3Block"]
        config["block_size"] = head.mask_embedding.num_embeddings
        config["block_rank"] = head.previous.out_features
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
