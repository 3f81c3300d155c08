"""Runs one model's forward over ragged batches, with its KV in token-granular slots.

On CUDA the forward is the decoder (`outrider.engine.decoder`), in graphs (`outrider.engine.step_runner`). On a CPU,
with `enforce_eager` and with another attention backend than Triton's it is transformers' own code, one operator after
the other; both give the same logits but for rounding.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.engine.attention import AttentionStep, TreeAttention
from outrider.engine.batch import ForwardBatch
from outrider.engine.buckets import BucketLadder
from outrider.engine.checkpoint import ModelCard, load_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder import Decoder
from outrider.engine.decoder_loading import attention_of, load_decoder
from outrider.engine.decoder_weights import HEAD
from outrider.engine.eagle_memory import HeadMemory, head_memory
from outrider.engine.kv_memory import MOST_CAPTURED, KvShape, fitting_slots, step_bytes
from outrider.engine.kv_slots import SlotTable
from outrider.engine.packed_forward import PackedForward, PackedShape
from outrider.engine.packed_linear import can_pack, pack_linear_layers
from outrider.engine.step_program import StepProgram
from outrider.engine.step_runner import StepRunner
from outrider.engine.tapped_layers import TappedLayers
from outrider.engine.tensor_parallel import Ranks, start_ranks
from outrider.engine.weight_reload import RunningModel, refill_decoder, refill_model, stored_value
from outrider.engine.weight_source import SafetensorsSource, WeightSource
from outrider.errors import CheckpointError
from outrider.kernels.skinny_linear import Weight
from outrider.kernels.tree_attention import TreeAttentionBatch

__all__ = ["EngineConfig", "ModelCard", "ModelRunner"]

# Ranks that load other weights from a slow disk may take so long.
REFILL_TIMEOUT_S = 1800.0


class ModelRunner:
    """One checkpoint, loaded, with KV caches and the table of who owns which slot.

    Args:
        config: see there.
        decoder: whether the decoder runs the forward; by default where it is the faster way, and with several ranks.
        source: the decoder's weights; by default the folder's files.
        ranks: the way to the others, on a rank that follows; by default this is rank 0, and starts the others.
        draft_head: folder of a draft head that will be made of `output`; KV leaves room for it.

    Attributes:
        config: as given.
        info: the model's card.
        device: where weights and caches live.
        slots: the slot table; callers extend and truncate its rows, the runner only reads it.
        steps: what stages and launches steps; None where transformers' code runs.
        ranks: the processes that share the model.

    Raises:
        CheckpointError: see `load_checkpoint`; also where not even one session fits the KV memory, or the attention
            backend does not take the model's head size.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        decoder: bool | None = None,
        source: WeightSource | None = None,
        ranks: Ranks | None = None,
        draft_head: Path | None = None,
    ) -> None:
        if config.torch_threads is not None and config.device == "cpu":
            torch.set_num_threads(config.torch_threads)
        self.config = config
        self.ranks = start_ranks(config, source) if ranks is None else ranks
        self.device = self.ranks.device
        if self.device.type == "cuda" and self.device.index is not None:
            # Launches, events and graphs are those of the thread's current device: of the thread that will run steps.
            torch.cuda.set_device(self.device)
        if decoder is None:
            decoder = config.attention_backend_name == "triton" and not config.enforce_eager
        try:
            self._load(source, decoder=decoder or self.ranks.world_size > 1, draft_head=draft_head)
        except BaseException:
            self.close()
            raise

    def _load(self, source: WeightSource | None, *, decoder: bool, draft_head: Path | None) -> None:
        config = self.config
        self._model = self._decoder = self._output = None
        self._tapped: TappedLayers | None = None
        self._is_tapped = False
        self._packed: PackedForward | None = None
        if decoder:
            self._decoder, model_config, self.info = load_decoder(config, source, self.ranks)
        else:
            self._model, self.info = load_checkpoint(config)
            model_config = self._model.config
            if draft_head is not None:
                # Packing takes the layer's own weight away.
                self._output = _weight_of(self._model.get_output_embeddings())
            if self.device.type == "cpu" and can_pack():
                pack_linear_layers(self._model)
        self._model_config = model_config
        shape = KvShape(model_config, config)
        self._attend = attention_of(config, shape.head_dim)
        row_len = self.info.max_model_len + config.max_tree_nodes
        head = HeadMemory(weights=0, per_slot=0)
        if draft_head is not None:
            head = head_memory(
                draft_head,
                target_layers=shape.layers,
                target_hidden=model_config.hidden_size,
                dtype=getattr(torch, config.dtype_name),
            )
        num_slots = fitting_slots(
            config,
            bytes_per_slot=shape.bytes_per_slot + head.per_slot,
            most=config.max_num_seqs * row_len,
            device=self.device,
            bytes_beside=step_bytes(config, model_config) + head.weights,
        )
        num_slots = self.ranks.least(num_slots)
        self.slots = SlotTable(num_slots=num_slots, max_rows=config.max_num_seqs, max_row_len=row_len)
        self._caches = shape.caches(num_slots, self.device)
        self.steps = None if self._decoder is None else self._step_runner(self._decoder, shape, row_len)

    def close(self) -> None:
        """Ends the other ranks; nothing may be run any more."""
        self.ranks.close()

    def commands(self) -> Mapping[str, Callable[[Any], object]]:
        """What rank 0 tells the other ranks to do."""
        assert self.steps is not None
        steps = self.steps

        def follow(shape: PackedShape) -> None:
            assert self._packed is not None
            self._packed.follow(shape)

        return {
            "packed_forward": lambda sessions: self.packed_forward(sessions=sessions),
            "packed": follow,
            "launch": steps.launch,
            "compile": steps.compile,
            "rehearse": steps.rehearse,
            "capture": steps.capture,
            "refill": self._refill,
        }

    def running(self) -> RunningModel:
        """What other weights have to fit."""
        decoder, model = self._decoder, self._model
        output = None if model is None else getattr(model.get_output_embeddings(), "weight", None)
        return RunningModel(
            config=self.config,
            card=self.info,
            model_config=self._model_config,
            weights=None if decoder is None else decoder.weights,
            is_tied=model is not None and output is not None and output is model.get_input_embeddings().weight,
        )

    def refill(self, folder: Path) -> None:
        """Puts a checkpoint's weights in the place of those that it runs with, on every rank, which stay where they
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
        if self._decoder is not None:
            dtype = getattr(torch, self.config.dtype_name)
            refill_decoder(self._decoder.weights, source, self._decoder.spec, dtype=dtype, quantized=quantized)
        elif self._model is not None:
            refill_model(self._model, source, quantize=quantized)
            if self._output is not None:
                self._output.copy_(stored_value(source, HEAD, self._output.dtype, quantize=False))
        self.ranks.least(0)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.info.vocab_size

    @property
    def embedding(self) -> torch.Tensor:
        """[V, N] the rows of tokens."""
        if self._decoder is not None:
            return self._decoder.weights.embedding
        assert self._model is not None
        return _weight_of(self._model.get_input_embeddings())

    @property
    def output(self) -> Weight:
        """[V, N] the output layer."""
        if self._decoder is not None:
            return self._decoder.weights.head
        assert self._output is not None, "the runner was not told that it feeds a head"
        return self._output

    @property
    def final_softcap(self) -> float:
        """Bound of the logits; 0 for none."""
        return getattr(self._model_config, "final_logit_softcapping", None) or 0.0

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self._caches.keys)

    @property
    def attend(self) -> TreeAttention:
        """The attention operator."""
        return self._attend

    def tap(self, taps: tuple[int, ...]) -> None:
        """From now on every forward leaves hidden states in `features`.

        Args:
            taps: i is the residual stream after i layers, 0 the embeddings, -1 what the last norm returns.
        """
        self._is_tapped = True
        if self.steps is not None:
            self.steps.tap(taps)
        else:
            assert self._model is not None
            self._tapped = TappedLayers(self._model.base_model, taps)

    @property
    def is_tapped(self) -> bool:
        """Whether forwards leave `features`, which are to be read before the next one."""
        return self._is_tapped

    @property
    def features(self) -> torch.Tensor:
        """[at least T, F] of the last forward's rows, the columns of one tap after those of another."""
        found = self._tapped.features() if self.steps is None and self._tapped else self.steps and self.steps.features
        assert isinstance(found, torch.Tensor), "no layer is tapped"
        return found

    def warm_up(self) -> None:
        """Compiles and captures what serving begins with."""
        if self.steps is not None:
            self.steps.warm_up()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Stores the rows' keys and values in their slots and returns the wanted logits.

        The rows' slots must have been reserved in `slots` before.

        Returns:
            [R, V] float32, in the order of `batch.logit_rows`, on `device`; R = 0 gives an empty tensor.
        """
        if self.steps is not None:
            return self.steps.forward(batch)
        assert self._model is not None
        step = self.attention_step(batch)
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

    def packed_forward(self, *, sessions: int) -> PackedForward:
        """Return the forward pass over rows that a pool has packed, for steps of so many sessions at most."""
        model = self._model if self._decoder is None else self._decoder
        assert model is not None
        self.ranks.lead("packed_forward", sessions)
        self._packed = PackedForward(
            model,
            self._caches,
            attend=self._attend,
            sessions=sessions,
            row_len=self.slots.max_row_len,
            ranks=self.ranks,
            fixed=self.config.deterministic,
        )
        return self._packed

    def attention_step(self, batch: ForwardBatch) -> AttentionStep:
        """A batch as attention takes it, on the device; its rows' slots are reserved."""
        slot_table = self.slots.table[batch.rows, : int(batch.key_len.max())]
        query_lens = np.diff(batch.query_start)
        write_slots = slot_table[np.repeat(np.arange(len(query_lens)), query_lens), batch.write_index]
        assert (write_slots >= 0).all(), "a row writes to a slot that was not reserved"
        positions, slots = self._put(batch.positions), self._put(write_slots.astype(np.int64))
        self._caches.positions.index_copy_(0, slots, positions)
        return AttentionStep(
            key_caches=self._caches.keys,
            value_caches=self._caches.values,
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
                slot_positions=self._caches.positions,
            ),
            attend=self._attend,
        )

    def _put(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def _step_runner(self, decoder: Decoder, shape: KvShape, row_len: int) -> StepRunner:
        config = self.config
        ladder = BucketLadder(
            max_tokens=MOST_CAPTURED,
            max_sessions=config.max_num_seqs,
            row_len=row_len,
            max_nodes=config.max_tree_nodes + 1,
            group=decoder.spec.heads // decoder.spec.kv_heads,
            unrolled=config.deterministic,
        )
        try:
            program = StepProgram(
                decoder, self._caches, max_rows=config.max_num_seqs, row_len=row_len, fixed=config.deterministic
            )
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"{config.model_path}: KV leaves no memory for steps on {self.device}: lower kv_cache_memory_fraction, "
                "kv_bytes or num_slots"
            ) from error
        graphs = config.attention_backend_name == "triton" and not config.enforce_eager
        return StepRunner(program, ladder, self.slots, unrolled=config.deterministic, graphs=graphs, ranks=self.ranks)


def _weight_of(layer: Any) -> torch.Tensor:
    return layer.weight
