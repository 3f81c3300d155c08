"""How an engine is set up (torch-free, so that command lines may build it)."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

DtypeName = Literal["float32", "bfloat16", "float16"]
AttentionBackend = Literal["triton", "flashinfer", "reference"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One model on one device.

    Attributes:
        model_path: folder of a Hugging Face checkpoint (config.json, *.safetensors).
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and KV; default float32 on a CPU, bfloat16 on a GPU.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; default 1 GiB on a CPU, nine tenths of the free memory on a GPU. Never more is
            taken than `max_sessions` full sessions need.
        max_sessions: sessions at a time.
        max_model_len: most tokens of a session (prompt and output); default is the checkpoint's own limit.
        max_tree_nodes: most nodes of a session's tree, root excluded.
        torch_threads: threads of one operator on a CPU; default leaves torch's setting.
        attention_backend: "triton" (default on a GPU), "flashinfer" (on a GPU, with the extra of that name; float16
            or bfloat16) or "reference" (plain torch; default on a CPU).

    Raises:
        ValueError: a value out of range, or an attention backend that cannot run with the device or the dtype, or
            that is not installed.
    """

    model_path: str | Path
    device: str = "cpu"
    dtype: DtypeName | None = None
    num_slots: int | None = None
    kv_bytes: int | None = None
    max_sessions: int = 64
    max_model_len: int | None = None
    max_tree_nodes: int = 64
    torch_threads: int | None = None
    attention_backend: AttentionBackend | None = None

    def __post_init__(self) -> None:
        for name in ("num_slots", "kv_bytes", "max_sessions", "max_model_len", "torch_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} given, at least 1 needed")
        if self.max_tree_nodes < 0:
            raise ValueError(f"max_tree_nodes: {self.max_tree_nodes} given, at least 0 needed")
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise ValueError(f"device: {self.device!r} given, cpu, cuda or cuda:N needed")
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype: {self.dtype!r} given, float32, bfloat16 or float16 needed")
        self._check_attention_backend()

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


def create_config_for_draft_model(target_config: EngineConfig, draft_config: EngineConfig) -> EngineConfig:
    """The target's configuration with the model, its dtype and its place replaced by the draft's own.

    What both must agree on (sessions, lengths, tree sizes) stays the target's; the draft is a service of its own, so
    device, attention backend, threads and KV memory are its own too.
    """
    return replace(
        target_config,
        model_path=draft_config.model_path,
        device=draft_config.device,
        dtype=draft_config.dtype,
        num_slots=draft_config.num_slots,
        kv_bytes=draft_config.kv_bytes,
        torch_threads=draft_config.torch_threads,
        attention_backend=draft_config.attention_backend,
    )
