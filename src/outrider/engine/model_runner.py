"""One checkpoint on its device: weights, KV caches, and the forward pass over rows that a pool has packed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.engine.checkpoint import ModelCard
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_loading import load_decoder
from outrider.engine.decoder_weights import load_output_layer
from outrider.engine.kv_memory import KvNeighbour, KvShape, fitting_slots, step_bytes
from outrider.engine.kv_slots import SlotTable
from outrider.engine.packed_forward import Features, PackedForward, PackedShape
from outrider.engine.tensor_parallel_leader import start_ranks
from outrider.engine.tensor_parallel_ranks import Ranks
from outrider.engine.weight_reload import RunningModel, refill_decoder
from outrider.engine.weight_source import SafetensorsSource, WeightSource
from outrider.errors import CheckpointError
from outrider.kernels.linear.skinny import Weight
from outrider.roles.start_progress import report_stage

__all__ = ["EngineConfig", "ModelCard", "ModelRunner"]

# Ranks that load other weights from a slow disk may take so long.
REFILL_TIMEOUT_S = 1800.0


class ModelRunner:
    """One checkpoint, loaded, with KV caches and the table of who owns which slot.

    Args:
        source: of the weights; by default the folder's files.
        ranks: the way to the others, on a rank that follows; by default this is rank 0, and starts the others.
        neighbour: what is to be left of the KV memory for another model.

    Raises:
        CheckpointError: as `load_decoder`; also where not even one session fits the KV memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        source: WeightSource | None = None,
        ranks: Ranks | None = None,
        neighbour: KvNeighbour | None = None,
    ) -> None:
        if config.torch_threads is not None and config.device == "cpu":
            torch.set_num_threads(config.torch_threads)
        self.config = config
        self.ranks = start_ranks(config, source) if ranks is None else ranks
        self.device = self.ranks.device
        if self.device.type == "cuda" and self.device.index is not None:
            # Launches, events and graphs are those of the thread's current device: of the thread that will run steps.
            torch.cuda.set_device(self.device)
        try:
            self._load(source, neighbour or KvNeighbour())
        except BaseException:
            self.close()
            raise

    def _load(self, source: WeightSource | None, neighbour: KvNeighbour) -> None:
        config = self.config
        self._packed: PackedForward | None = None
        self._output_layer: Weight | None = None
        self._decoder, self.info = load_decoder(config, source, self.ranks)
        shape = KvShape(self._decoder.spec, config)
        row_len = self.info.max_model_len + config.max_tree_nodes
        num_slots = fitting_slots(
            config,
            bytes_per_slot=shape.bytes_per_slot + neighbour.bytes_per_slot,
            most=config.max_num_seqs * row_len,
            device=self.device,
            bytes_beside=step_bytes(config, self._decoder.spec) + neighbour.fixed_bytes,
        )
        num_slots = self.ranks.least(num_slots)
        report_stage(f"KV: {num_slots:,} tokens, {num_slots * shape.bytes_per_slot / 1e9:.2f} GB")
        # Callers extend and truncate its rows, the runner only reads it.
        self.slots = SlotTable(num_slots=num_slots, max_rows=config.max_num_seqs, max_row_len=row_len)
        self._caches = shape.caches(num_slots, self.device)

    def close(self) -> None:
        """End the other ranks; nothing may be run any more."""
        self.ranks.close()

    def commands(self) -> Mapping[str, Callable[[Any], object]]:
        """Return the handlers of rank 0's commands, by name."""

        def follow(shape: PackedShape) -> None:
            assert self._packed is not None
            self._packed.follow(shape)

        return {
            "packed_forward": lambda sessions: self.packed_forward(sessions=sessions),
            "packed": follow,
            "refill": self._refill,
        }

    def running(self) -> RunningModel:
        """Return the running model, which other weights are checked against."""
        return RunningModel(config=self.config, card=self.info, spec=self._decoder.spec, weights=self._decoder.weights)

    def refill(self, folder: Path) -> None:
        """Put a checkpoint's weights in the place of those that it runs with, on every rank, which stay where they
        are. No step may be in flight, and no KV is of use any more.

        Args:
            folder: as `check_weights` has found it to fit `running`.

        Raises:
            CheckpointError: a file cannot be read. The weights are a mixture then: nothing may be run any more.
            WorkerUnavailable: another rank was lost over it.
        """
        with self.ranks.guard(REFILL_TIMEOUT_S):
            self.ranks.lead("refill", str(folder))
            self._refill(str(folder))

    @torch.inference_mode()
    def _refill(self, folder: str) -> None:
        source, quantized = SafetensorsSource(Path(folder)), self.config.quantization == "fp8"
        dtype = getattr(torch, self.config.dtype_name)
        refill_decoder(
            self._decoder.weights,
            source,
            self._decoder.spec,
            dtype=dtype,
            quantized=quantized,
            output_layer=self._output_layer,
        )
        self.ranks.least(0)

    def output_layer(self) -> Weight:
        """Return the whole output layer [V, N], for a head beside the model.

        Where ranks have a part each, this rank loads all of it and keeps it: it gets other weights as the model does.

        Raises:
            CheckpointError: a file cannot be read, or the device has no room.
        """
        weights = self._decoder.weights
        if weights.world_size == 1:
            return weights.head
        if self._output_layer is None:
            source = SafetensorsSource(Path(self.config.model_path))
            self._output_layer = load_output_layer(
                source, self._decoder.spec, weights.embedding, packed=self.device.type == "cpu"
            )
        return self._output_layer

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.info.vocab_size

    def packed_forward(self, *, sessions: int, features: Features | None = None) -> PackedForward:
        """Return the forward pass over rows that a pool has packed, for steps of so many sessions at most.

        Args:
            features: hidden rows that every pass of this rank writes, for a head beside the model.

        Raises:
            CheckpointError: KV has left no memory for it.
        """
        self.ranks.lead("packed_forward", sessions)
        try:
            self._packed = PackedForward(
                self._decoder,
                self._caches,
                sessions=sessions,
                row_len=self.slots.max_row_len,
                ranks=self.ranks,
                fixed=self.config.deterministic,
                trims=not self.config.captures and self.ranks.world_size == 1,
                features=features,
            )
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"{self.config.model_path}: KV leaves no memory for steps on {self.device}: lower "
                "kv_cache_memory_fraction, kv_bytes or num_slots"
            ) from error
        return self._packed
