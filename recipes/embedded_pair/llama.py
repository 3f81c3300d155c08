"""A Llama small enough to read, for training; its parameters carry the names that transformers gives them.

Pre-norm decoder layers with rotary attention and a gated MLP (arXiv 2302.13971), tied embeddings, no biases.
`N` sequences of `T` tokens, `C` hidden channels, `H` query heads, `K` key/value heads, `D` channels a head, `V` tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes that make one Llama, in the words of transformers' `LlamaConfig`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 8192
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


def project(x: Tensor, linear: nn.Linear) -> Tensor:
    """`linear(x)` in x's dtype: float32 master weights, bfloat16 arithmetic."""
    return functional.linear(x, linear.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, C] to [N, T, C]."""
        # One kernel takes this, where weight and input are of one dtype.
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, T, C] to [N, T, C]; cos and sin are [T, D]."""
        rows, length, _ = x.shape

        def heads(linear: nn.Linear) -> Tensor:
            return project(x, linear).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        query, key, value = (
            rotate(heads(self.q_proj), cos, sin),
            rotate(heads(self.k_proj), cos, sin),
            heads(self.v_proj),
        )
        # Explicit copies of the shared heads: every fused attention kernel takes them, in both directions.
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return project(mixed.transpose(1, 2).reshape(rows, length, -1), self.o_proj)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, C] to [N, T, C]."""
        return project(functional.silu(project(x, self.gate_proj)) * project(x, self.up_proj), self.down_proj)


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each behind its norm and beside the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, T, C] to [N, T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm; named as transformers names it, so that the weights load there as they are."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """A causal language model with the output layer tied to the embedding."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self._initialise()

    def _initialise(self) -> None:
        """Small normal weights; what writes to the residual stream starts at zero: depth costs nothing at first."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                fan_in = self.shape.hidden_size
                nn.init.normal_(parameter, std=0.02 if "embed" in name else fan_in**-0.5)

    def compile_layers(self) -> None:
        """Have each layer run as compiled code, which is made once for all of them, for each shape of their input."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Token ids [N, T] to logits [N, T, V], computed in `dtype`."""
        return functional.linear(self.hidden(tokens, dtype), self.model.embed_tokens.weight.to(dtype))

    def hidden(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Token ids [N, T] to what the output layer reads, [N, T, C], computed in `dtype`."""
        cos, sin = rotary_tables(self.shape, tokens.shape[1], tokens.device)
        x = functional.embedding(tokens, self.model.embed_tokens.weight).to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos.to(dtype), sin.to(dtype))
        return self.model.norm(x)


def rotary_tables(shape: LlamaShape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] of the rotary embedding (arXiv 2104.09864), the two halves alike."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [N, H, T, D] by its positions' angles; channel d is paired with channel d + D/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
