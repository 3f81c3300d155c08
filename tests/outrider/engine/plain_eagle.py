"""EAGLE heads of both layouts and block drafters in plain torch, path by path."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional


class PlainHead:
    """A head in plain torch, one row after the other, with the keys and values of its path in lists."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.tensors = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        self.config = json.loads((folder / "config.json").read_text())
        of_target = load_file(target / "model.safetensors")
        self.embedding = of_target["model.embed_tokens.weight"].double()
        self.output = self.tensors.get("lm_head.weight", of_target["lm_head.weight"].double())
        self.is_third = "norm.weight" in self.tensors
        self.prefix = "midlayer." if self.is_third else "layers.0."
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def of(self, name: str) -> torch.Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def norm(self, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row / (row.square().mean() + self.config["rms_norm_eps"]).sqrt() * weight

    def turned(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        half = heads.shape[-1] // 2
        angles = position * self.config["rope_theta"] ** -(torch.arange(half).double() / half)
        turned = torch.view_as_complex(torch.stack((heads[:, :half], heads[:, half:]), -1)) * torch.exp(1j * angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def row(self, entering: torch.Tensor, token: int, position: int, *, is_key: bool = True) -> torch.Tensor:
        """One row's hidden state; what enters is fused already. Later rows see it if it is a key, and so does it."""
        embedded = self.embedding[token]
        if self.is_third:
            normed = self.norm(entering, self.of("hidden_norm"))
            stream = normed if self.config.get("norm_before_residual") else entering
            wide = torch.cat((self.norm(embedded, self.of("input_layernorm")), normed))
        else:
            stream = wide = self.tensors["fc.weight"] @ torch.cat((embedded, entering)) + self.tensors["fc.bias"]
        dim = self.config["head_dim"]
        query, key, value = ((self.of(f"self_attn.{name}_proj") @ wide).view(-1, dim) for name in "qkv")
        if is_key:
            self.keys.append(self.turned(key, position))
            self.values.append(value)
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        keys, values = (torch.stack(held, 1).repeat_interleave(group, 0) for held in (self.keys, self.values))
        weights = (self.turned(query, position)[:, None] @ keys.mT * dim**-0.5).softmax(-1)
        stream = stream + self.of("self_attn.o_proj") @ (weights @ values).flatten()
        rows = self.norm(stream, self.of("post_attention_layernorm"))
        gated = functional.silu(self.of("mlp.gate_proj") @ rows) * (self.of("mlp.up_proj") @ rows)
        return stream + self.of("mlp.down_proj") @ gated

    def path(self, features: torch.Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """The last row's logits [V] after rows with features [n, F] and then drafted tokens."""
        self.keys, self.values = [], []
        hidden = features[0]
        for position, feature in enumerate(features.double()):
            entering = self.tensors["fc.weight"] @ feature if self.is_third else feature
            hidden = self.row(entering, tokens[position], position)
        for depth, token in enumerate(drafted):
            hidden = self.row(hidden, token, len(features) + depth)
        if not self.is_third:
            return self.output @ hidden
        logits = self.output @ self.norm(hidden, self.tensors["norm.weight"])
        if "d2t" not in self.tensors:
            return logits
        return self.spread(logits)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [V] of those of the head's own vocabulary."""
        full = torch.full((self.config["vocab_size"],), float("-inf"), dtype=torch.float64)
        full[torch.arange(len(logits)) + self.tensors["d2t"].long()] = logits
        return full


class PlainBlock(PlainHead):
    """A block drafter: the row behind a path is computed from the features alone, at its depth."""

    def path(self, features: torch.Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """See `PlainHead.path`."""
        self.keys, self.values = [], []
        entering, depth, last = features[0], len(drafted), len(features) - 1
        for position, feature in enumerate(features.double()):
            entering = self.tensors["fc.weight"] @ feature
            self.row(entering, tokens[position], position)
        mask = self.tensors["mask_embedding.weight"][depth]
        hidden = self.row(entering + mask, tokens[last], last + depth, is_key=False)
        before = self.embedding[drafted[-1] if drafted else tokens[last]]
        bias = self.tensors["following.weight"] @ self.tensors["previous.weight"] @ before
        logits = self.output @ (self.norm(hidden, self.tensors["norm.weight"]) + bias)
        return self.spread(logits) if "d2t" in self.tensors else logits


def plain_head(folder: Path, target: Path) -> PlainHead:
    """The head or block drafter in a folder."""
    document = json.loads((folder / "config.json").read_text())
    return (PlainBlock if "block_size" in document else PlainHead)(folder, target)
