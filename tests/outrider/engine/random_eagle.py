"""EAGLE heads and block drafters of random weights, as checkpoint folders: for tests, and to measure what they cost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.engine.eagle_spec import EagleLayout

_BLOCK_RANK = 6


def write_random_eagle(
    folder: Path,
    target: Path,
    *,
    layout: EagleLayout = "eagle3",
    seed: int = 0,
    draft_vocab_size: int | None = None,
    taps: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    block_size: int | None = None,
) -> Path:
    """Writes a head in the published layout.

    Args:
        folder: made where it is missing.
        target: checkpoint folder of the model that it drafts for; its config.json gives the sizes.
        layout: of the checkpoint.
        seed: of the weights.
        draft_vocab_size: rows of an output layer of its own, spread over the target's vocabulary (eagle3); None: the
            target's output layer is used.
        taps: of eagle3; None: the first layer, the middle and the last.
        intermediate_size: F; None: the target's.
        block_size: positions of a block drafter (eagle3); None: a head.

    Returns:
        `folder`.
    """
    given = json.loads((target / "config.json").read_text(encoding="utf-8"))
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    taps = taps or (1, given["num_hidden_layers"] // 2, given["num_hidden_layers"])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if layout == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or given["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": given["num_key_value_heads"],
        "head_dim": given.get("head_dim") or hidden // heads,
        "vocab_size": given["vocab_size"],
        "max_position_embeddings": given["max_position_embeddings"],
        "rms_norm_eps": given.get("rms_norm_eps", 1e-6),
        "rope_theta": (given.get("rope_parameters") or given).get("rope_theta", 10_000.0),
    }
    if layout == "eagle3":
        config["draft_vocab_size"] = draft_vocab_size or given["vocab_size"]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    if block_size is not None:
        config["architectures"] = ["LlamaForCausalLMEagle3Block"]
        config |= {"block_size": block_size, "block_rank": _BLOCK_RANK}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else shape[1] ** -0.5)
        + (len(shape) == 1)
        for name, shape in _shapes(config, layout, own_output=draft_vocab_size is not None)
    }
    if draft_vocab_size is not None and layout == "eagle3":
        ids = torch.randperm(given["vocab_size"], generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(given["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(config: dict[str, Any], layout: EagleLayout, *, own_output: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    third = layout == "eagle3"
    prefix, hidden, feed_forward = (
        "midlayer." if third else "layers.0.",
        config["hidden_size"],
        config["intermediate_size"],
    )
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    taps = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) if third else 2
    yield "fc.weight", (hidden, taps * hidden)
    if third:
        yield f"{prefix}hidden_norm.weight", (hidden,)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield "norm.weight", (hidden,)
        if own_output:
            yield "lm_head.weight", (config["draft_vocab_size"], hidden)
        if "block_size" in config:
            yield "mask_embedding.weight", (config["block_size"], hidden)
            yield "previous.weight", (config["block_rank"], hidden)
            yield "following.weight", (hidden, config["block_rank"])
    else:
        yield "fc.bias", (hidden,)
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"{prefix}self_attn.{name}_proj.weight", (rows, 2 * hidden if third else hidden)
    yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield f"{prefix}mlp.gate_proj.weight", (feed_forward, hidden)
    yield f"{prefix}mlp.up_proj.weight", (feed_forward, hidden)
    yield f"{prefix}mlp.down_proj.weight", (hidden, feed_forward)
