"""Checkpoint folders: which are served, and how one is loaded (safetensors only, no code of the checkpoint's own)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from outrider.checkpoint_json import SERVED_MODEL_TYPES, read_json_object, read_served_config
from outrider.engine.attention import ATTENTION_NAME, register_attention
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_spec import SERVED_FAMILIES
from outrider.engine.quantization import check_quantization, dequantise_layers
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError
from outrider.start_progress import report_stage
from outrider.tokenizer_hash import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

assert SERVED_FAMILIES.keys() == set(SERVED_MODEL_TYPES)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A model as it introduces itself; `ModelInfo` in common.proto says what each means.

    `tokenizer_hash` is empty where the checkpoint has no tokenizer.json.
    """

    name: str
    vocab_size: int
    tokenizer_hash: str
    dtype: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def read_checkpoint(config: EngineConfig) -> tuple[PretrainedConfig, ModelCard]:
    """The configuration and the card, without the weights.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be served, with what to change.
    """
    folder = Path(config.model_path)
    model_config = _read_config(folder)
    return model_config, _card(folder, config, model_config)


def load_checkpoint(config: EngineConfig) -> tuple["PreTrainedModel", ModelCard]:
    """The model in evaluation mode on the config's device, and its card.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be served, with what to change.
    """
    folder = Path(config.model_path)
    model_config, card = read_checkpoint(config)
    source = SafetensorsSource(folder)
    source.check({})  # names the file that is missing or corrupt, which transformers does not
    report_stage(f"weights: {sum(file.stat().st_size for file in folder.glob('*.safetensors')) / 1e9:.2f} GB")
    with _quietly():
        model = _load_weights(folder, model_config, getattr(torch, config.dtype_name))
    # transformers takes numbers of any kind as they are: those of 8 bits need factors that are there.
    source.check({name: tuple(held.shape) for name, held in model.named_parameters() if source.stores(name)})
    dequantise_layers(model, source, quantize=config.quantization == "fp8")
    torch.nn.Module.to(model, config.device)
    return model.eval().requires_grad_(False), card


def _load_weights(folder: Path, model_config: PretrainedConfig, dtype: torch.dtype) -> "PreTrainedModel":
    # Imported here: `register_attention` says why.
    from transformers import AutoModelForCausalLM

    register_attention()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    model, report = loaded
    # transformers fills what is missing with random numbers and only warns.
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise CheckpointError(f"{folder}: {len(absent)} weights are missing or of another shape, {absent[0]} first")
    return model


@contextmanager
def _quietly() -> Iterator[None]:
    """A worker's log is no terminal for progress bars, and needs no report of factors that are applied here."""
    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


def _read_config(folder: Path) -> PretrainedConfig:
    document = read_served_config(folder)
    if document.get("quantization_config") is not None:
        check_quantization(folder, document["quantization_config"])
    if document.get("use_bidirectional_attention"):
        raise CheckpointError(f"{folder}: bidirectional attention is not served: it is no causal language model")
    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if "quantization_config" in document:
        # transformers would want a library for it, and give the layers another code.
        model_config.__dict__.pop("quantization_config", None)
    return model_config


def _card(folder: Path, config: EngineConfig, model_config: PretrainedConfig) -> ModelCard:
    longest = int(model_config.max_position_embeddings)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise CheckpointError(f"{folder}: max_model_len {config.max_model_len} given, the model ends at {longest}")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if not has_tokenizer:
        logger.warning("%s has no tokenizer.json: its tokenizer cannot be compared with others", folder)
    return ModelCard(
        name=folder.resolve().name,
        vocab_size=int(model_config.vocab_size),
        tokenizer_hash=tokenizer_hash(folder) if has_tokenizer else "",
        dtype=config.dtype_name,
        max_model_len=config.max_model_len or longest,
        eos_token_ids=_eos_token_ids(folder, model_config),
    )


def _eos_token_ids(folder: Path, model_config: PretrainedConfig) -> tuple[int, ...]:
    """Those of generation_config.json, which instruction-tuned checkpoints keep complete; else of config.json."""
    generation = read_json_object(folder / "generation_config.json") or {}
    given = generation.get("eos_token_id")
    if given is None:
        given = getattr(model_config, "eos_token_id", None)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (int(given),)
