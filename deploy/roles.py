"""From a deployment's configuration to each role's own: the functions that an actor runs to serve its role.

A role's modules are loaded in a thread, and only inside its actor: importing torch takes seconds, in which the actor
has to answer, and the deployment itself needs none of it.
"""

import asyncio
import dataclasses
import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.deploy.config import NGRAM_FIELDS, DeployConfig
from outrider.deploy.resources import target_threads
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.roles.awake import usable_cores
from outrider.roles.start_progress import report_stage
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.target_worker.config import TargetWorkerConfig

Serve = Callable[..., Awaitable[None]]
"""Serves one role on `host` until `stop` is set; calls `ready` with host:port once it listens."""
# Ports of targets' metrics before those of drafts' begin.
_DRAFTS_METRICS = 100
_IMPORTING = "importing PyTorch"


@dataclass(frozen=True, kw_only=True)
class WorkerSetting:
    """Settings of one worker beside the deployment's configuration."""

    name: str  # that it keeps over restarts
    coordinators: tuple[str, ...]  # host:port of each as it starts
    resolve: Callable[[], Awaitable[Sequence[str]]] | None = None  # gives the list as it is later
    device: str = "cpu"  # "cpu" or "cuda"
    model: Path | None = None  # checkpoint folder; default the configured one
    # Gives what is to be loaded instead of both, where that has changed since this was made.
    model_now: Callable[[], Awaitable[str | None]] | None = None


async def _server(folder: str) -> Any:
    return await asyncio.to_thread(importlib.import_module, f"outrider.{folder}.server")


async def serve_coordinator(config: DeployConfig, *, host: str, port: int, worker_port: int, **more: Any) -> None:
    """Serve the coordinator of `config`; clients come in on `port`, workers on `worker_port`.

    `more` is what its server takes beside its own configuration: `peers`, `ready`, `stop`, `tell`.
    """
    server = await _server("coordinator")
    own = coordinator_config(config, host=host, port=port, worker_port=worker_port)
    await server.serve(own, **more)


def coordinator_config(config: DeployConfig, *, host: str, port: int, worker_port: int) -> CoordinatorConfig:
    """A coordinator's own configuration."""
    return CoordinatorConfig(
        host=host,
        port=port,
        worker_port=worker_port if config.certs is not None else None,
        model_path=None if config.target_model is None else Path(config.target_model),
        tokenizer_path=config.tokenizer_path,
        served_model_name=config.served_model_name,
        chat_template=config.chat_template,
        default_max_new_tokens=config.default_max_new_tokens,
        max_running_sessions=config.max_running_sessions or config.targets * config.max_num_seqs,
        max_queue=config.max_queue,
        drain_s=config.stop_timeout_s,
        drafts_per_session=config.drafts_per_session,
        target_wait_s=config.target_wait_s,
        allow_synthetic=config.allow_synthetic,
        http_port=config.first_http_port,
        http_cors=config.http_cors,
        shared_port=config.shared_port,
        shared_http_port=config.shared_http_port,
        live_page=config.live_page,
        vllm_grpc=config.vllm_grpc,
        token_file=config.token_file,
        **security(config, Role.COORDINATOR),
    )


async def serve_target(config: DeployConfig, setting: WorkerSetting, *, host: str, **more: Any) -> None:
    """Serve a target worker of `config`, registered with every coordinator; `more` is `ready` and `stop`."""
    report_stage(_IMPORTING)
    server = await _server("target_worker")
    if setting.model_now is not None and (changed := await setting.model_now()) is not None:
        # This actor may be an old one's successor, which was given what the deployment began with.
        setting = dataclasses.replace(setting, model=Path(changed))
    own = target_config(config, setting, host=host)
    await server.serve(own, resolve=setting.resolve, **more)


async def serve_draft(config: DeployConfig, setting: WorkerSetting, *, host: str, **more: Any) -> None:
    """Serve a draft worker of `config`, likewise."""
    report_stage(_IMPORTING)
    server = await _server("draft_worker")
    own = draft_config(config, setting, host=host)
    await server.serve(own, resolve=setting.resolve, **more)


def target_config(config: DeployConfig, setting: WorkerSetting, *, host: str) -> TargetWorkerConfig:
    """A target worker's own configuration."""
    return TargetWorkerConfig(
        model_path=setting.model or config.target_model,
        draft_model=config.resident_model,
        quantization=config.quantization,
        name=setting.name,
        host=host,
        port=config.target_port,
        coordinators=setting.coordinators,
        device=setting.device,
        threads=target_threads(config, usable_cores()),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_step_tokens=max(TargetWorkerConfig.max_step_tokens, config.max_num_seqs),
        max_prefill_tokens=config.max_prefill_tokens,
        prefill_slowdown=config.prefill_slowdown,
        kv_cache_memory_fraction=config.kv_cache_memory_fraction,
        kv_bytes=config.target_kv_bytes,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        tensor_parallel_size=config.tensor_parallel_size,
        metrics_port=_metrics_port(config, setting, first=0),
        metrics_host=host,
        **security(config, Role.TARGET),
    )


def draft_config(config: DeployConfig, setting: WorkerSetting, *, host: str) -> DraftWorkerConfig:
    """A draft worker's own configuration."""
    source = config.draft_source
    return DraftWorkerConfig(
        # N-grams are of the target's tokens.
        model_path=setting.model or config.draft_model or (config.target_model if source == "ngram" else None),
        name=setting.name,
        host=host,
        port=config.draft_port,
        coordinators=setting.coordinators,
        device=setting.device,
        threads=config.draft_threads,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        kv_cache_memory_fraction=config.kv_cache_memory_fraction,
        kv_bytes=config.draft_kv_bytes,
        source=source,
        **{name: getattr(config, name) for name in NGRAM_FIELDS},
        metrics_port=_metrics_port(config, setting, first=_DRAFTS_METRICS),
        metrics_host=host,
        **security(config, Role.DRAFT),
    )


def tls_of(config: DeployConfig, role: Role) -> TlsConfig | None:
    """A role's certificate, from the deployment's folder; None without TLS."""
    return None if config.certs is None else TlsConfig.of_folder(config.certs, role)


def security(config: DeployConfig, role: Role) -> dict[str, Any]:
    """Return the security fields of a role's configuration."""
    tls = tls_of(config, role)
    files = {} if tls is None else {"tls_ca": tls.ca, "tls_certificate": tls.certificate, "tls_key": tls.key}
    return {"insecure": config.insecure, **files}


def _metrics_port(config: DeployConfig, setting: WorkerSetting, *, first: int) -> int | None:
    """Return the metrics port, from the worker's number, which survives restarts."""
    if config.metrics_port is None:
        return None
    return config.metrics_port + first + int(setting.name.rpartition("-")[2]) % _DRAFTS_METRICS


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Serve functions that actors run; tests inject their own."""

    coordinator: Serve = serve_coordinator
    target: Serve = serve_target
    draft: Serve = serve_draft
