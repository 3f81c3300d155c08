"""Runs one model's forward over ragged batches, with its KV in token-granular slots."""

import numpy as np
import torch
from transformers import PretrainedConfig

from outrider.engine.attention import AttentionStep, attention_operator
from outrider.engine.batch import ForwardBatch
from outrider.engine.checkpoint import ModelCard, load_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.kv_slots import SlotTable
from outrider.engine.packed_linear import can_pack, pack_linear_layers
from outrider.errors import CheckpointError
from outrider.kernels.tree_attention import TreeAttentionBatch

__all__ = ["EngineConfig", "ModelCard", "ModelRunner"]

_CPU_KV_BYTES = 1 << 30
_GPU_KV_SHARE = 0.9


class ModelRunner:
    """One checkpoint, loaded, with KV caches and the table of who owns which slot.

    Attributes:
        config: as given.
        info: the model's card.
        device: where weights and caches live.
        slots: the slot table; callers extend and truncate its rows, the runner only reads it.

    Raises:
        CheckpointError: see `load_checkpoint`; also where not even one session fits the KV memory, or the attention
            backend does not take the model's head size.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.torch_threads is not None and config.device == "cpu":
            torch.set_num_threads(config.torch_threads)
        self.config = config
        self.device = torch.device(config.device)
        self._model, self.info = load_checkpoint(config)
        if self.device.type == "cpu" and can_pack():
            pack_linear_layers(self._model)
        shape = _KvShape(self._model.config, getattr(torch, config.dtype_name))
        try:
            self._attend = attention_operator(config.attention_backend_name, shape.head_dim)
        except ValueError as error:
            raise CheckpointError(f"{config.model_path}: {error}") from error
        row_len = self.info.max_model_len + config.max_tree_nodes
        num_slots = _num_slots(config, shape, row_len, self.device)
        self.slots = SlotTable(num_slots=num_slots, max_rows=config.max_num_seqs, max_row_len=row_len)
        self._key_caches, self._value_caches = (
            shape.caches(num_slots, self.device),
            shape.caches(num_slots, self.device),
        )
        self._slot_positions = torch.zeros(num_slots, dtype=torch.int32, device=self.device)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.info.vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Stores the rows' keys and values in their slots and returns the wanted logits.

        The rows' slots must have been reserved in `slots` before.

        Returns:
            [R, V] float32, in the order of `batch.logit_rows`, on `device`; R = 0 gives an empty tensor.
        """
        step = self._attention_step(batch)
        inputs = {
            "input_ids": self._put(batch.token_ids)[None],
            "position_ids": self._put(batch.positions).long()[None],
            "use_cache": False,
            "step": step,
        }
        if len(batch.logit_rows) == 0:
            self._model.base_model(**inputs)
            return torch.empty((0, self.vocab_size), dtype=torch.float32, device=self.device)
        kept = self._put(batch.logit_rows)
        return self._model(**inputs, logits_to_keep=kept).logits[0].float()

    def _attention_step(self, batch: ForwardBatch) -> AttentionStep:
        slot_table = self.slots.table[batch.rows, : int(batch.key_len.max())]
        query_lens = np.diff(batch.query_start)
        write_slots = slot_table[np.repeat(np.arange(len(query_lens)), query_lens), batch.write_index]
        assert (write_slots >= 0).all(), "a row writes to a slot that was not reserved"
        positions, slots = self._put(batch.positions), self._put(write_slots.astype(np.int64))
        self._slot_positions.index_copy_(0, slots, positions)
        return AttentionStep(
            key_caches=self._key_caches,
            value_caches=self._value_caches,
            write_slots=slots,
            batch=TreeAttentionBatch(
                slot_table=self._put(slot_table),
                query_start=self._put(batch.query_start),
                tree_start=self._put(batch.tree_start),
                prefix_len=self._put(batch.prefix_len),
                key_len=self._put(batch.key_len),
                tree_mask=self._put(batch.tree_mask),
                max_query_len=int(query_lens.max()),
                max_key_len=slot_table.shape[1],
                positions=positions,
                slot_positions=self._slot_positions,
            ),
            attend=self._attend,
        )

    def _put(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


class _KvShape:
    """The caches' shape, from the checkpoint's configuration."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype = dtype

    @property
    def bytes_per_slot(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    def caches(self, num_slots: int, device: torch.device) -> list[torch.Tensor]:
        # Zeros, not empty: what lies in a slot never written is multiplied by a weight of 0, and 0 * NaN is NaN.
        shape = (num_slots, self.heads, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.layers)]


def _num_slots(config: EngineConfig, shape: _KvShape, row_len: int, device: torch.device) -> int:
    if config.num_slots is not None:
        return config.num_slots
    kv_bytes = config.kv_bytes
    if kv_bytes is None:
        kv_bytes = _CPU_KV_BYTES
        if device.type == "cuda":
            kv_bytes = int(torch.cuda.mem_get_info(device)[0] * _GPU_KV_SHARE)
    num_slots = min(kv_bytes // shape.bytes_per_slot, config.max_num_seqs * row_len)
    if num_slots < 1:
        raise CheckpointError(f"{config.model_path}: {kv_bytes} bytes of KV memory hold no token, "
                              f"{shape.bytes_per_slot} needed for each")  # fmt: skip
    return num_slots
