"""The plan of `outrider serve`: everything checked and worked out before Ray or PyTorch is imported."""

import ctypes
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from outrider.checkpoint_json import is_eagle_head, read_json_object, read_safetensors_header, read_served_config
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.local_note import local_address
from outrider.deploy.model_files import ModelFiles, complete, find_model
from outrider.deploy.resources import asked_target_gpus, most_drafts, worker_gpus
from outrider.errors import CheckpointError, OutriderError
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.roles.awake import usable_cores
from outrider.roles.ports import check_free
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.security.tokens import TokenFile
from outrider.tokenizer_hash import tokenizer_hash

LOOPBACK = "127.0.0.1"
_CPU_KV_BYTES = 1 << 30
# A process's context, its graphs and the activations of its largest step, where it shares a GPU.
_BESIDE_BYTES = 1_500_000_000
_LEAST_QUEUE = 1000
_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its name, and its memory in bytes."""

    name: str
    total_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; none where there is no driver.

    NVIDIA's management library tells of them: without PyTorch, and without a context.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if library.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        found = [gpu for index in range(count.value) if (gpu := _read(library, index)) is not None]
    finally:
        library.nvmlShutdown()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return found
    words = [word.strip() for word in asked.split(",") if word.strip()]
    # Whoever names them otherwise than by number has them told apart by CUDA: here only how many counts.
    if all(word.isdecimal() for word in words):
        return [found[int(word)] for word in words if int(word) < len(found)]
    return found[: sum(not word.startswith("-") for word in words)]


def _read(library: ctypes.CDLL, index: int) -> Gpu | None:
    device, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(_NAME_BYTES)
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    library.nvmlDeviceGetName(device, name, _NAME_BYTES)
    return Gpu(name=name.value.decode(errors="replace"), total_bytes=memory.total)


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """The memory that a checkpoint asks for, from the headers of its files: without PyTorch."""

    weights: int  # bytes of all of them
    kv: int  # bytes of one token's keys and values
    longest: int  # most tokens of a session
    vocab_size: int  # entries of the vocabulary

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], *, number_bytes: int, kv_number_bytes: int) -> Self:
        """Read them.

        Args:
            number_bytes: of a weight once it is loaded; 1 rounds matrices to 8 bits.
            kv_number_bytes: of a key's or a value's number.

        Raises:
            CheckpointError: a file is damaged, or config.json lacks an entry.
        """
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            kv = 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim * kv_number_bytes
            longest, vocab_size = int(config["max_position_embeddings"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}/config.json: {error} is missing or no number") from error
        weights = sum(_loaded_bytes(file, number_bytes) for file in folder.glob("*.safetensors"))
        return cls(weights=weights, kv=kv, longest=longest, vocab_size=vocab_size)


def _loaded_bytes(file: Path, number_bytes: int) -> int:
    header = read_safetensors_header(file)
    try:
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        return sum(
            math.prod(entry["shape"]) * (1 if entry["dtype"] in _EIGHT_BITS else number_bytes) for entry in tensors
        )
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{file}: truncated, or no safetensors file; copy it again") from error


_NO_SIZES = CheckpointSizes(weights=0, kv=0, longest=0, vocab_size=0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A deployment as it will be started."""

    given: DeployConfig  # configuration of the deployment
    config: DeployConfig  # the same with what was worked out filled in
    lines: tuple[str, ...]  # what it comes to, each with the options that change it
    missing: tuple[ModelFiles, ...]  # models that have to be completed before, by field

    def completed(self) -> "Plan":
        """Load or convert what is missing, and plan with that; raise as `make_plan` and `complete` do."""
        for model in self.missing:
            complete(model)
        return make_plan(self.given)


def make_plan(config: DeployConfig) -> Plan:
    """Check a deployment, and work out what its configuration leaves open.

    What other machines have is not looked at: with `bind` node a path that is not here is taken to be there, and with
    a cluster that is joined its GPUs are Ray's to count.

    Raises:
        CheckpointError: a model cannot be served.
        OutriderError: something is missing on this machine, with what to do.
        ValueError: options do not fit together.
    """
    given, is_here, is_ours = config, config.bind is Bind.LOOPBACK, config.address == "local"
    models = {}
    for field in ("target_model", "draft_model", "resident_draft"):
        name = getattr(config, field)
        if name is not None and not is_here and not Path(name).is_absolute():
            raise ValueError(f"{field}: {name!r} given, with bind node the path of a folder on every machine is needed")
        if name is not None and (is_here or Path(name).is_dir()):
            models[field] = find_model(name)
    gpus = visible_gpus() if is_ours else []
    config, why = _place_drafter(config, models.get("draft_model"), len(gpus) if is_ours else None)
    shares = worker_gpus(config, len(gpus)) if is_ours else None
    _check_gpus(config, gpus)
    sizes = _sizes(config, models, on_gpu=shares is None or shares[0] > 0)
    held = _held(config, sizes)
    if is_here:
        _check_files(config)
    if is_here and is_ours:
        _check_ports(config)
    found: dict[str, Any] = {
        field: str(model.folder) for field, model in models.items() if model.folder is not None and not model.missing
    }
    if not config.served_model_name and "target_model" in models:
        found["served_model_name"] = (models["target_model"].name,)
    if gpus and shares is not None:
        found |= _kv_shares(config, gpus, shares, *held)
    elif is_ours:
        _check_memory(config, *held)
    planned = dataclasses.replace(config, **found)
    return Plan(
        given=given,
        config=planned,
        lines=tuple(_lines(config, planned, _devices(planned, gpus, shares), shares, sizes, why=why)),
        missing=tuple(model for model in models.values() if model.missing),
    )


# ------------------------------------------------------------------------------------------------------------- checks


def _check_head(config: DeployConfig) -> None:
    """Check that a draft model that is an EAGLE head can grow trees inside each target worker."""
    why = f"{config.draft_model} is an EAGLE head, which reads hidden states inside the target worker"
    if config.drafter_placement not in (None, "resident"):
        raise ValueError(f"drafter_placement: {config.drafter_placement} given, resident needed: {why}")
    for name, value in config.worker_options.items():
        raise ValueError(f"{name}: {value} given, which draft workers alone have, leave it out, or give the head as "
                         f"resident_draft: {why}")  # fmt: skip


class _Sizes(NamedTuple):
    """Sizes of the target, of the model of draft workers, and of the drafter inside each target worker."""

    target: CheckpointSizes
    draft: CheckpointSizes
    resident: CheckpointSizes


def _sizes(config: DeployConfig, models: dict[str, ModelFiles], *, on_gpu: bool) -> _Sizes:
    """Return the sizes of all models, once looked at; zeros of what is not there to be looked at."""
    target_folder = models["target_model"].folder if "target_model" in models else embedded_target_path()
    number_bytes = 2 if on_gpu else 4
    kv_bytes = 1 if config.kv_cache_dtype == "fp8_e4m3" else number_bytes
    complete_ones = {field: not model.missing for field, model in models.items()}
    target = _NO_SIZES
    if target_folder is not None and (config.target_model is None or "target_model" in models):
        weight_bytes = 1 if config.quantization == "fp8" else number_bytes
        has_weights = complete_ones.get("target_model", True)
        target = _read_sizes(
            target_folder, has_weights=has_weights, number_bytes=weight_bytes, kv_number_bytes=kv_bytes
        )
        if config.max_model_len is not None and config.max_model_len > target.longest:
            raise ValueError(f"max_model_len: {config.max_model_len} given, the model ends at {target.longest}")
        if config.tokenizer_path is None:
            _tokenizer(target_folder)

    def drafter(field: Literal["draft_model", "resident_draft"]) -> CheckpointSizes:
        folder = models[field].folder if field in models else embedded_draft_path()
        if folder is None or (getattr(config, field) is not None and field not in models):
            return _NO_SIZES
        has_weights = complete_ones.get(field, True)
        sizes = _read_sizes(folder, has_weights=has_weights, number_bytes=number_bytes, kv_number_bytes=number_bytes)
        if target is not _NO_SIZES and target_folder is not None:
            _check_pair(target_folder, folder, target, sizes)
        return sizes

    draft = resident = _NO_SIZES
    if config.draft_source != "ngram" and most_drafts(config):
        draft = drafter("draft_model")
    if config.resident_model is not None:
        resident = drafter("draft_model" if config.resident_draft is None else "resident_draft")
    return _Sizes(target, draft, resident)


def _held(config: DeployConfig, sizes: _Sizes) -> tuple[CheckpointSizes, CheckpointSizes]:
    """Return what each target worker and each draft worker holds: a target perhaps a drafter besides its own model."""
    target, draft, resident = sizes
    # The drafter is on one of the GPUs that share the target.
    weights = target.weights + resident.weights * config.tensor_parallel_size
    return dataclasses.replace(target, weights=weights, kv=target.kv + resident.kv), draft


def _read_sizes(folder: Path, *, has_weights: bool, number_bytes: int, kv_number_bytes: int) -> CheckpointSizes:
    # Of one whose weights are still on the Hub the rest can be looked at.
    config = read_served_config(folder) if has_weights else read_json_object(folder / "config.json") or {}
    sizes = CheckpointSizes.of(folder, config, number_bytes=number_bytes, kv_number_bytes=kv_number_bytes)
    if not is_eagle_head(folder):
        return sizes
    # Of every token a hidden row of the target's.
    return dataclasses.replace(sizes, kv=sizes.kv + int(config["hidden_size"]) * number_bytes)


def _tokenizer(folder: Path) -> bytes:
    try:
        return (folder / "tokenizer.json").read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder}: no tokenizer.json; save the tokenizer in its fast form") from error


def _check_pair(target_folder: Path, draft_folder: Path, target: CheckpointSizes, draft: CheckpointSizes) -> None:
    if is_eagle_head(draft_folder):
        # It has no tokenizer of its own.
        if draft.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{draft_folder} has {draft.vocab_size} vocabulary entries, {target_folder} {target.vocab_size}: "
                "is it a head of this target?"
            )
        return
    same = _tokenizer(target_folder) == _tokenizer(draft_folder)
    # Different files may still stand for the same tokens.
    if not same and tokenizer_hash(target_folder) != tokenizer_hash(draft_folder):
        raise CheckpointError(
            f"the tokenizers of {target_folder} and {draft_folder} differ: a draft needs its target's"
        )
    if draft.vocab_size > target.vocab_size:
        raise CheckpointError(
            f"{draft_folder} has {draft.vocab_size} vocabulary entries, {target_folder} {target.vocab_size}: "
            "a draft may have no more than its target"
        )


def _check_files(config: DeployConfig) -> None:
    for field, name in (("tokenizer_path", "tokenizer.json"), ("chat_template", "")):
        path: Path | None = getattr(config, field)
        if path is not None and not (path / name if name else path).is_file():
            raise ValueError(f"{field}: {path / name if name else path}: no such file")
    if config.token_file is not None and not TokenFile(config.token_file).entries:
        raise OutriderError(
            f"{config.token_file} holds no token, so nobody could call: "
            f"outrider token new NAME --token-file {config.token_file}"
        )
    if config.certs is not None:
        for role in (Role.COORDINATOR, Role.TARGET, Role.DRAFT):
            TlsConfig.of_folder(config.certs, role).check(role)


def _check_ports(config: DeployConfig) -> None:
    doors = 1 if config.certs is None else 2
    wanted = {
        "port": [config.port + door for door in range(config.coordinators * doors)] if config.port else [],
        "http_port": [config.first_http_port + own * doors for own in range(config.coordinators)]
        if config.first_http_port
        else [],
        "shared_port": [config.shared_port] if config.shared_port else [],
        "shared_http_port": [config.shared_http_port] if config.shared_http_port else [],
    }
    for field, ports in wanted.items():
        for port in ports:
            try:
                check_free(f"{LOOPBACK}:{port}")
            except OSError as error:
                own = "an `outrider serve` of this name runs here; " if local_address(config.name) else ""
                option = f"--{field.replace('_', '-')}"
                raise OutriderError(
                    f"{field}: {LOOPBACK}:{port} is taken: {own}give another {option}, or 0 for a free one"
                ) from error


def _check_gpus(config: DeployConfig, gpus: list[Gpu]) -> None:
    if config.address != "local":
        return
    needed = {
        "target_gpus": max(config.target_gpus or 0.0, config.tensor_parallel_size if config.target_gpus != 0 else 0)
        if config.target_gpus is not None or config.tensor_parallel_size > 1
        else 0.0,
        "draft_gpus": config.draft_gpus or 0.0,
    }
    for field, each in needed.items():
        count = config.targets if field == "target_gpus" else config.draft_workers
        if each * count > len(gpus):
            hint = "" if gpus else ": is the driver loaded, and what does CUDA_VISIBLE_DEVICES say?"
            raise OutriderError(f"{field}: {each * count:g} GPUs needed, {len(gpus)} visible{hint}")


def _check_memory(config: DeployConfig, target: CheckpointSizes, draft: CheckpointSizes) -> None:
    """Check that the weights fit into the memory of a machine without GPUs."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = config.targets * target.weights + config.draft_workers * draft.weights
    if needed > total:
        raise OutriderError(
            f"the weights take {needed / 1e9:.1f} GB as float32, this machine has {total / 1e9:.1f} GB of memory: take "
            "a smaller model, or a GPU"
        )


# --------------------------------------------------------------------------------------------------------- worked out


def _place_drafter(config: DeployConfig, draft: ModelFiles | None, gpus: int | None) -> tuple[DeployConfig, str]:
    """Fill in where the draft model runs.

    Args:
        gpus: of this machine; None where they are a cluster's.

    Returns:
        The configuration, and why the draft model runs there, unless that was asked for.
    """
    is_head = draft is not None and draft.folder is not None and is_eagle_head(draft.folder)
    if config.resident_draft is not None:
        if is_head:
            raise ValueError(f"draft_model: {config.draft_model} given, a draft model needed beside resident_draft: it "
                             "is an EAGLE head, which draft workers cannot run")  # fmt: skip
        return dataclasses.replace(config, drafter_placement="worker"), ""
    if is_head:
        _check_head(config)
        return dataclasses.replace(config, drafter_placement="resident"), ", where heads run"
    if config.drafter_placement is not None or config.drafts == 0 or config.draft_source == "ngram":
        return config, ""
    asked, placement = asked_target_gpus(config), "worker"
    each = 1.0 if asked is None else asked
    if config.worker_options:
        why = f", as --{next(iter(config.worker_options)).replace('_', '-')} asks"
    elif gpus is None:
        why = ", as GPUs are a cluster's"
    elif gpus == 0:
        why = ", as there is no GPU"
    elif gpus - config.targets * each >= 1:
        why, most = ", as a GPU is left for it", int(gpus / each) if each >= 1 else 0
        if most > config.targets:
            why += f" (with many sessions, --targets {most} --drafter-placement resident serves more)"
    else:
        placement, why = "resident", ", as there is one GPU" if gpus == 1 else f", as targets take all {gpus} GPUs"
    return dataclasses.replace(config, drafter_placement=placement), why


def _kv_shares(
    config: DeployConfig,
    gpus: list[Gpu],
    shares: tuple[float, float],
    target: CheckpointSizes,
    draft: CheckpointSizes,
) -> dict[str, int]:
    """Bytes of KV for each worker, where workers share a GPU: room for as many tokens of one as of the other.

    Raises:
        OutriderError: the weights leave no room.
    """
    smallest = min(gpu.total_bytes for gpu in gpus)
    usable = smallest * config.kv_cache_memory_fraction
    weights = (target.weights / config.tensor_parallel_size, draft.weights)
    # Workers on one GPU. Whoever has a GPU for itself takes what is free once it has its weights.
    targets = math.ceil(config.targets / len(gpus)) if 0 < shares[0] < 1 else 0
    drafts = max(min(math.floor(1 / shares[1]) - targets, most_drafts(config)), 0) if 0 < shares[1] < 1 else 0
    together = targets * weights[0] + drafts * weights[1]
    alone = max((own for own, share in zip(weights, shares, strict=True) if share >= 1), default=0)
    budget = usable - together - (targets + drafts) * _BESIDE_BYTES
    if budget <= 0 or (alone and usable - alone - _BESIDE_BYTES <= 0):
        raise OutriderError(
            f"the weights take {max(together, alone) / 1e9:.1f} GB of a GPU, which has {smallest / 1e9:.1f} GB: share "
            "the target among more GPUs (--tensor-parallel-size), take --quantization fp8, or a smaller model"
        )
    sharing = {"target_kv_bytes": (targets, target.kv), "draft_kv_bytes": (drafts, draft.kv)}
    given = {field: size for field, (count, _) in sharing.items() if count and (size := getattr(config, field))}
    left = budget - sum(sharing[field][0] * size for field, size in given.items())
    open_ones = {field: own for field, own in sharing.items() if field not in given and own[0] * own[1]}
    tokens = int(left / max(sum(count * size for count, size in open_ones.values()), 1))
    if open_ones and tokens < 1:
        taken = ", ".join(given) or "kv_cache_memory_fraction"
        raise OutriderError(f"{taken}: no room is left for the KV of the others that share the GPU")
    return {field: tokens * size for field, (_, size) in open_ones.items()}


def _lines(
    given: DeployConfig,
    config: DeployConfig,
    devices: str,
    shares: tuple[float, float] | None,
    sizes: _Sizes,
    *,
    why: str,
) -> Iterator[str]:
    target, draft, resident = sizes
    name = given.target_model or "the embedded pair's target"
    yield _line("model", f"{name}{_gigabytes(target)}", "MODEL")
    source = config.draft_source
    names = {"model": given.draft_model or "the embedded pair's draft", "ngram": "n-grams of prompts and outputs"}
    if config.resident_model is not None:
        text = f"{given.resident_draft or names['model']}{_gigabytes(resident)}, inside each target worker{why}"
        text += "" if most_drafts(config) else "; no draft workers"
        yield _line("drafter", text, "--draft, --drafter-placement, --resident-draft")
    elif not most_drafts(config):
        yield _line("drafter", "none: plain decoding", "--drafts")
    if most_drafts(config):
        texts = [names[word] + (_gigabytes(draft) if word == "model" else "") for word in source.split("+")]
        count = f"{config.draft_workers}"
        if config.max_drafts is not None:
            count = f"{config.min_drafts} to {config.max_drafts}"
        workers = "a worker of its own" if count == "1" else f"{count} workers"
        options = "--draft, --drafter-placement, --drafts, --source"
        yield _line("drafter", f"{' and '.join(texts)}, in {workers}{why}", options)
    yield _line("device", devices, "--target-gpus, --draft-gpus")
    held = _held(config, sizes)
    yield _line("memory", _memory(config, shares, *held), "--target-kv-bytes, --draft-kv-bytes")
    running = config.max_running_sessions or config.targets * config.max_num_seqs
    longest = config.max_model_len or target.longest
    tokens = f" of at most {longest:,} tokens each" if longest else ""
    # Below it a coordinator's queue never is by itself; what begins within a minute makes it longer.
    least = max(_LEAST_QUEUE, 4 * running)
    queue = f"{least:,} or more may wait" if config.max_queue is None else f"{config.max_queue:,} may wait"
    options = "--max-num-seqs, --max-running-sessions, --max-queue, --max-model-len"
    yield _line("sessions", f"{running} at a time{tokens}; {queue}", options)
    host = LOOPBACK if config.bind is Bind.LOOPBACK else "each coordinator's machine"
    access = "no token needed" if config.token_file is None else "with a token"
    ports = [str(port or "a free port") for port in (config.port, config.first_http_port)]
    doors = f"gRPC at {host}:{ports[0]}, OpenAI's API at {host}:{ports[1]}"
    yield _line("doors", f"{doors}; {access}", "--port, --http-port, --bind, --token-file")


def _devices(config: DeployConfig, gpus: list[Gpu], shares: tuple[float, float] | None) -> str:
    if shares is None:
        return "what the Ray cluster has"
    if not any(shares):
        return f"CPU, {usable_cores()} cores"
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    drafts = f", {shares[1]:g} for each draft" if most_drafts(config) and shares[1] else ""
    return f"{len(gpus)} x {names}: {shares[0]:g} for each target{drafts}"


def _memory(
    config: DeployConfig, shares: tuple[float, float] | None, target: CheckpointSizes, draft: CheckpointSizes
) -> str:
    if shares is None:
        return "what the Ray cluster has"
    texts = []
    for word, share, size, kv_bytes in (
        ("target", shares[0], target, config.target_kv_bytes),
        ("draft", shares[1], draft, config.draft_kv_bytes),
    ):
        if not size.kv:
            continue
        if kv_bytes is None and share:
            texts.append(f"KV of each {word} takes {config.kv_cache_memory_fraction:.0%} of what its weights leave")
            continue
        most = config.max_num_seqs * (config.max_model_len or size.longest)
        tokens = min((kv_bytes or _CPU_KV_BYTES) // size.kv, most)
        texts.append(f"KV of each {word} {tokens * size.kv / 1e9:.2f} GB ({tokens:,} tokens)")
    return ", ".join(texts) or "known once the model is here"


def _gigabytes(sizes: CheckpointSizes) -> str:
    return f" ({sizes.weights / 1e9:.2f} GB of weights)" if sizes.weights else ""


def _line(name: str, text: str, options: str) -> str:
    return f"{name:9} {text}  [{options}]"
