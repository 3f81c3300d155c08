"""Times that an actor may be silent, and that a failing one is left alone."""

import asyncio
import dataclasses

import pytest

from outrider.deploy.actors import RoleReport
from outrider.deploy.config import DeployConfig
from outrider.deploy.health import LONGEST_BACKOFF_S, RoleHandle, patience_s, watch
from outrider.security.roles import Role

CONFIG = DeployConfig(port=0, ping_interval_s=0.2, hang_timeout_s=4.0, start_timeout_s=60.0, stop_timeout_s=5.0)


async def test_an_actor_that_loads_may_be_silent_for_longer():
    serving = RoleReport(pid=1, node="n", node_id="i", address="h:1", failure=None)
    loading = RoleReport(pid=1, node="n", node_id="i", address=None, failure=None)
    assert patience_s(serving, CONFIG) == CONFIG.hang_timeout_s
    assert patience_s(loading, CONFIG) == patience_s(None, CONFIG) == CONFIG.start_timeout_s


class FailingActor:
    """Loads, fails, is started anew, loads, fails."""

    def __init__(self) -> None:
        self.report = self
        self._asked = 0

    async def remote(self) -> RoleReport:
        self._asked += 1
        failure = "OSError: no such checkpoint" if self._asked % 2 == 0 else None
        return RoleReport(pid=self._asked // 2, node="n", node_id="i", address=None, failure=failure)


async def test_a_role_that_fails_again_and_again_gets_longer_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outrider.deploy.health.ray.kill", lambda *_, **__: None)
    handle = RoleHandle(name="target-0", role=Role.TARGET, actor=FailingActor())
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def note_pause(seconds: float) -> None:
        if handle.report is None:
            pauses.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("outrider.deploy.health.asyncio.sleep", note_pause)
    watching = asyncio.create_task(watch(handle, CONFIG))
    while len(pauses) < 10:
        await real_sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert pauses[:4] == pytest.approx([0.4, 0.8, 1.6, 3.2])
    assert pauses[-1] == LONGEST_BACKOFF_S


def test_a_loss_is_told_until_it_is_made_good():
    told: list[str] = []
    handle = RoleHandle(name="draft-0", role=Role.DRAFT, tell=told.append)
    loading = RoleReport(pid=7, node="n", node_id="i", address=None, failure=None, stages=("weights: 1 of 2 GB",))
    serving = RoleReport(
        pid=7, node="n", node_id="i", address="h:1", failure=None, stages=("weights: 1 of 2 GB", "KV: 9 tokens")
    )
    for report in (loading, loading, serving, serving):
        handle.note(report)
    assert told == ["draft-0: weights: 1 of 2 GB", "draft-0: KV: 9 tokens"]
    handle.lose("its process 7 is gone")
    assert told[2:] == [
        "draft-0 is lost: its process 7 is gone. Decoding goes on, only slower. Starting it anew",
    ]
    handle.note(dataclasses.replace(serving, pid=8, stages=()))
    assert len(told) == 4
    assert told[3].startswith("draft-0 serves again, after 0.")
