"""Roles of a deployment whose models are a sleep and a hash: they listen, register and drain as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.fake_workers import FakeDraft, FakeTarget
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings

from outrider.addresses import resolver
from outrider.coordinator.tokenizer import read_model_info
from outrider.deploy.config import DeployConfig
from outrider.deploy.roles import Roles, WorkerSetting
from outrider.models import embedded_target_path
from outrider.registration import Registrar
from outrider.rpc import RoleServer
from outrider.v1 import common_pb2, registry_pb2
from outrider.worker import introduce, until_any

_SERVICES = {
    registry_pb2.WORKER_ROLE_TARGET: ("outrider.v1.TargetService", FakeTarget),
    registry_pb2.WORKER_ROLE_DRAFT: ("outrider.v1.DraftService", FakeDraft),
}


@dataclass(frozen=True)
class FakeRole:
    """Serves one role.

    Args:
        settings: step times, and how often drafts are right.
        load_s: that its model takes to load.
        places: sessions that it takes.
    """

    role: registry_pb2.WorkerRole
    settings: Settings
    load_s: float
    places: int

    async def __call__(
        self,
        config: DeployConfig,
        setting: WorkerSetting,
        *,
        host: str,
        ready: Callable[[str], None],
        stop: asyncio.Event,
    ) -> None:
        """Runs the server until `stop`."""
        await asyncio.sleep(self.load_s)
        service, kind = _SERVICES[self.role]
        info = read_model_info(embedded_target_path(), max_model_len=None)
        settings = self.settings
        model = PathModel(
            seed=settings.seed,
            rank_rates=settings.rank_rates,
            spread=settings.spread,
            vocab_size=info.vocab_size,
        )
        worker = kind(settings, model)
        server = RoleServer(services=[service], add_services=worker.add_to, address=f"{host}:0")
        await server.start()
        limits = registry_pb2.WorkerLimits(
            max_sessions=self.places, max_tree_nodes=settings.max_nodes, max_step_tokens=settings.max_step_rows
        )
        introduction = introduce(self.role, address=server.address, model=info, limits=limits, name=setting.name)
        resolve = setting.resolve or resolver(setting.coordinators)
        registrar = Registrar(resolve, introduction, common_pb2.WorkerLoad, drain_s=2.0)
        registrar.start()
        ready(server.address)
        try:
            await until_any(stop.wait(), registrar.drain_asked.wait(), registrar.failed)
        finally:
            await server.stop(drain=registrar.close)


def fake_roles(settings: Settings, *, draft_load_s: float, places: int) -> Roles:
    """The real coordinator, fake targets and fake drafts."""
    return Roles(
        target=FakeRole(registry_pb2.WORKER_ROLE_TARGET, settings, 0.0, 256),
        draft=FakeRole(registry_pb2.WORKER_ROLE_DRAFT, settings, draft_load_s, places),
    )
