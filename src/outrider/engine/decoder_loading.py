"""Makes a checkpoint's decoder, or one rank's share of it."""

from pathlib import Path

import torch

from outrider.engine.attention import attention_of
from outrider.engine.checkpoint import ModelCard, read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder import Decoder
from outrider.engine.decoder_weights import load_decoder_weights
from outrider.engine.tensor_parallel_collectives import SumOptions
from outrider.engine.tensor_parallel_ranks import Ranks
from outrider.engine.weight_source import SafetensorsSource, WeightSource
from outrider.errors import CheckpointError
from outrider.kernels.linear.scaled_weight import ScaledWeight

# From this compute capability on kernels read weights of 8 bits as they are.
_CONVERTS_EIGHT_BITS = (8, 9)
# Of what ranks tell each other, the largest sum and the largest matrix of logits that go past NCCL.
_MAILBOX_LETTER_BYTES = 16 << 20
_MAILBOX_LOGITS_BYTES = 64 << 20


def load_decoder(config: EngineConfig, source: WeightSource | None, ranks: Ranks) -> tuple[Decoder, ModelCard]:
    """The decoder of `config.model_path`, and its card.

    Args:
        source: of the weights; by default the folder's files.
    """
    spec, card = read_checkpoint(config)
    attend = attention_of(config, spec.head_dim)
    if config.quantization == "fp8":
        check_eight_bits(config, ranks.device)
    weights = load_decoder_weights(
        source or SafetensorsSource(Path(config.model_path)),
        spec,
        ranks.device,
        getattr(torch, config.dtype_name),
        rank=ranks.rank,
        world_size=ranks.world_size,
        quantized=config.quantization == "fp8",
        packed=ranks.device.type == "cpu",
    )
    if any(isinstance(layer.qkv, ScaledWeight) for layer in weights.layers):
        check_eight_bits(config, ranks.device)
    all_reduce = gather_logits = sum_norm = None
    if ranks.world_size > 1:
        collectives = ranks.connect(
            SumOptions(
                letter_bytes=_MAILBOX_LETTER_BYTES,
                gathered_bytes=_MAILBOX_LOGITS_BYTES,
                hidden_size=spec.hidden_size,
                dtype=getattr(torch, config.dtype_name),
                fixed=config.deterministic,
            )
        )
        all_reduce, gather_logits, sum_norm = collectives.all_reduce, collectives.gather_logits, collectives.sum_norm
    decoder = Decoder(
        spec,
        weights,
        attend=attend,
        all_reduce=all_reduce,
        sum_norm=sum_norm,
        gather_logits=gather_logits,
        fixed=config.deterministic,
    )
    return decoder, card


def check_eight_bits(config: EngineConfig, device: torch.device) -> None:
    """Refuse deterministic steps with weights of 8 bits where torch would write these out before a product.

    Its order of sums follows the number of rows.

    Raises:
        CheckpointError: on a GPU below compute capability 8.9.
    """
    if not config.deterministic or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _CONVERTS_EIGHT_BITS:
        raise CheckpointError(
            f"{config.model_path}: deterministic with weights of 8 bits needs a GPU of compute capability 8.9 or more, "
            f"not {found[0]}.{found[1]} ({device}): leave one of the two out"
        )
