"""The target as the recipe's module, and the trained head as a checkpoint in the published layout of EAGLE-3."""

import json
from pathlib import Path

import torch
from export import load_checkpoint, shape_of_checkpoint
from head import Eagle3
from llama import Llama
from safetensors.torch import load_file, save_file
from tokenization import END_OF_TEXT_ID


def load_target(folder: Path, device: torch.device) -> Llama:
    """The target, fixed, in float32."""
    return load_checkpoint(folder, shape_of_checkpoint(folder), device).requires_grad_(False)


def load_head(head: Eagle3, folder: Path) -> None:
    """Takes the weights of a head that `save_head` wrote.

    Where it had fewer feed-forward units, or fewer query heads of its one key and value head, the others keep what they
    begin with: they write nothing yet, so the function is the same.
    """
    held = load_file(folder / "model.safetensors")
    for name, parameter in head.state_dict().items():
        given = held[name].float()
        parameter[tuple(slice(size) for size in given.shape)] = given


def save_head(head: Eagle3, folder: Path, *, bos: int = END_OF_TEXT_ID, eos: int = END_OF_TEXT_ID) -> None:
    """Writes config.json and model.safetensors, bfloat16; output layer and embedding stay the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors keeps its files to the user
    shape = head.shape
    config = {
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
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
