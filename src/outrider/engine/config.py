"""Configuration of an engine (torch-free, so that command lines may build it)."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from outrider.config_checks import check_at_least_one

DtypeName = Literal["float32", "bfloat16", "float16"]
AttentionBackend = Literal["triton", "flashinfer", "reference"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
Quantization = Literal["fp8"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One model on one device.

    Attributes:
        model_path: folder of a Hugging Face checkpoint (config.json, *.safetensors).
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and KV; default float32 on a CPU, bfloat16 on a GPU.
        quantization: "fp8" rounds the layers' matrices to 8 bits while they are loaded; None leaves them as the
            checkpoint has them.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; default 1 GiB on a CPU, `kv_cache_memory_fraction` on a GPU. Never more is taken
            than `max_num_seqs` full sessions need.
        kv_cache_memory_fraction: of the GPU memory that is free once the weights are loaded, what KV takes.
        kv_cache_dtype: of KV: "auto" is `dtype`, "fp8_e4m3" takes a byte a number (on a GPU).
        enable_prefix_caching: keep the KV of tokens that no session holds any more, for those that begin alike.
        max_num_seqs: sessions at a time.
        max_model_len: most tokens of a session (prompt and output); default is the checkpoint's own limit.
        max_tree_nodes: most nodes of a session's tree, root excluded.
        torch_threads: threads of one operator on a CPU; default leaves torch's setting.
        attention_backend: "triton" (default on a GPU), "flashinfer" (on a GPU, with the extra of that name; float16
            or bfloat16) or "reference" (plain torch; default on a CPU).
        enforce_eager: one operator after the other, without CUDA graphs: slow, for finding errors.
        deterministic: on a GPU, the bits of a token's logits do not depend on what else is in its step; neither with
            flashinfer nor with `enforce_eager`.
        tensor_parallel_size: GPUs that share the model.

    Raises:
        ValueError: a value out of range, or an attention backend, a KV dtype or a number of GPUs that cannot run with
            the device or the dtype, or a backend that is not installed.
    """

    model_path: str | Path
    device: str = "cpu"
    dtype: DtypeName | None = None
    quantization: Quantization | None = None
    num_slots: int | None = None
    kv_bytes: int | None = None
    kv_cache_memory_fraction: float = 0.9
    kv_cache_dtype: KvCacheDtype = "auto"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_tree_nodes: int = 64
    torch_threads: int | None = None
    attention_backend: AttentionBackend | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_at_least_one(self, "num_slots", "kv_bytes", "max_num_seqs", "max_model_len", "torch_threads")
        check_at_least_one(self, "tensor_parallel_size")
        if self.max_tree_nodes < 0:
            raise ValueError(f"max_tree_nodes: {self.max_tree_nodes} given, at least 0 needed")
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise ValueError(f"device: {self.device!r} given, cpu, cuda or cuda:N needed")
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype: {self.dtype!r} given, float32, bfloat16 or float16 needed")
        if self.quantization not in (None, "fp8"):
            raise ValueError(f"quantization: {self.quantization!r} given, fp8 needed")
        if not 0 < self.kv_cache_memory_fraction <= 1:
            given = self.kv_cache_memory_fraction
            raise ValueError(f"kv_cache_memory_fraction: {given} given, above 0 and at most 1 needed")
        self._check_attention_backend()
        self._check_needs_of_cuda()
        self._check_deterministic()

    def _check_needs_of_cuda(self) -> None:
        if self.kv_cache_dtype not in ("auto", "fp8_e4m3"):
            raise ValueError(f"kv_cache_dtype: {self.kv_cache_dtype!r} given, auto or fp8_e4m3 needed")
        if self.kv_cache_dtype == "fp8_e4m3" and self.attention_backend_name != "triton":
            raise ValueError(
                f"kv_cache_dtype: 'fp8_e4m3' given, which needs a CUDA device and attention_backend triton, "
                f"not {self.attention_backend_name} on {self.device}"
            )
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise ValueError(
                f"tensor_parallel_size: {self.tensor_parallel_size} given, which needs a device without a number, "
                f"not {self.device}"
            )

    def _check_deterministic(self) -> None:
        if not self.deterministic:
            return
        if self.attention_backend == "flashinfer":
            raise ValueError("deterministic: not with attention_backend flashinfer, whose sums depend on the batch")
        if self.enforce_eager:
            raise ValueError("deterministic: not with enforce_eager, whose steps have as many rows as they need")

    def _check_attention_backend(self) -> None:
        given = f"attention_backend: {self.attention_backend!r} given"
        if self.attention_backend not in (None, "triton", "flashinfer", "reference"):
            raise ValueError(f"{given}, triton, flashinfer or reference needed")
        if self.attention_backend in ("triton", "flashinfer") and self.device == "cpu":
            raise ValueError(f"{given}, which needs a CUDA device; on a CPU only reference runs")
        if self.attention_backend != "flashinfer":
            return
        if self.dtype_name == "float32":
            raise ValueError(f"{given}, which needs dtype float16 or bfloat16, not float32")
        if importlib.util.find_spec("flashinfer") is None:
            raise ValueError(f"{given}, which is not installed here: pip install 'outrider[flashinfer]'")

    @property
    def dtype_name(self) -> DtypeName:
        """The dtype with its default filled in."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def attention_backend_name(self) -> AttentionBackend:
        """The attention backend with its default filled in."""
        return self.attention_backend or ("reference" if self.device == "cpu" else "triton")

    @property
    def captures(self) -> bool:
        """True if steps are captured in CUDA graphs: other attention than Triton's waits for the host."""
        return self.attention_backend_name == "triton" and not self.enforce_eager


def create_config_for_draft_model(target_config: EngineConfig, draft_config: EngineConfig) -> EngineConfig:
    """The draft's configuration, with what both must agree on (sessions, lengths, tree sizes) taken from the target's.

    The draft is a service of its own, so device, attention backend, threads and KV memory are its own too.
    """
    return replace(
        draft_config,
        max_num_seqs=target_config.max_num_seqs,
        max_model_len=target_config.max_model_len,
        max_tree_nodes=target_config.max_tree_nodes,
    )
