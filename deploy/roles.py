"""From a deployment's configuration to each role's own: the functions that an actor runs to serve its role.

A role's modules are loaded in a thread, and only inside its actor: importing torch takes seconds, in which the actor
has to answer, and the deployment itself needs none of it.
"""

import asyncio
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.deploy.config import DeployConfig, target_threads
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.target_worker.config import TargetWorkerConfig


class ServeCoordinator(Protocol):
    """Serves the coordinator on `host:port` until `stop`."""

    async def __call__(
        self, config: DeployConfig, *, port: int, host: str, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Runs the server."""
        ...


class ServeWorker(Protocol):
    """Serves a worker on a free port of `host`, registered with `coordinator`, until `stop`."""

    async def __call__(
        self,
        config: DeployConfig,
        *,
        coordinator: str,
        device: str,
        host: str,
        ready: Callable[[str], None],
        stop: asyncio.Event,
    ) -> None:
        """Runs the server."""
        ...


async def serve_coordinator(
    config: DeployConfig, *, port: int, host: str, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """The coordinator of `config`."""
    await asyncio.to_thread(importlib.import_module, "outrider.coordinator.server")
    from outrider.coordinator import server
    from outrider.coordinator.config import CoordinatorConfig

    role = CoordinatorConfig(
        host=host, port=port, model_path=config.target_model, drafts_per_session=config.drafts_per_session
    )
    await server.serve(role, ready=ready, stop=stop)


async def serve_target(
    config: DeployConfig,
    *,
    coordinator: str,
    device: str,
    host: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    """A target worker of `config`."""
    await asyncio.to_thread(importlib.import_module, "outrider.target_worker.server")
    from outrider.target_worker import server

    await server.serve(target_config(config, coordinator=coordinator, device=device, host=host), ready=ready, stop=stop)


async def serve_draft(
    config: DeployConfig,
    *,
    coordinator: str,
    device: str,
    host: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    """A draft worker of `config`."""
    await asyncio.to_thread(importlib.import_module, "outrider.draft_worker.server")
    from outrider.draft_worker import server

    await server.serve(draft_config(config, coordinator=coordinator, device=device, host=host), ready=ready, stop=stop)


def target_config(config: DeployConfig, *, coordinator: str, device: str, host: str) -> TargetWorkerConfig:
    """A target worker's own configuration."""
    return TargetWorkerConfig(
        model_path=config.target_model,
        quantization=config.quantization,
        host=host,
        coordinators=(coordinator,),
        device=device,
        threads=target_threads(config, _cores()),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_step_tokens=max(TargetWorkerConfig.max_step_tokens, config.max_num_seqs),
        max_prefill_tokens=config.max_prefill_tokens,
        prefill_slowdown=config.prefill_slowdown,
        kv_cache_memory_fraction=config.kv_cache_memory_fraction,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def draft_config(config: DeployConfig, *, coordinator: str, device: str, host: str) -> DraftWorkerConfig:
    """A draft worker's own configuration."""
    return DraftWorkerConfig(
        model_path=config.draft_model,
        host=host,
        coordinators=(coordinator,),
        device=device,
        threads=config.draft_threads,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        kv_cache_memory_fraction=config.kv_cache_memory_fraction,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the actors run; tests put their own here."""

    coordinator: ServeCoordinator = serve_coordinator
    target: ServeWorker = serve_target
    draft: ServeWorker = serve_draft
