"""Application of a RayService: it is as healthy as the deployment that it has started."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.deploy import serve_app
from outrider.errors import WorkerUnavailable


class FakeDeployment:
    """Says the states it is given, one a question; an error is raised."""

    def __init__(self, states: Sequence[str | Exception]) -> None:
        self._states = list(states)
        self.starts = 0

    async def start(self) -> list[str]:
        self.starts += 1
        return ["10.0.0.1:50051"]

    async def status(self) -> dict[str, Any]:
        state = self._states.pop(0)
        if isinstance(state, Exception):
            raise state
        if state == "silent":
            await asyncio.sleep(60)
        return {"state": state}


def replica(*states: str | Exception) -> serve_app.ServeReplica:
    return serve_app.ServeReplica(FakeDeployment(states))  # pyright: ignore[reportArgumentType] (what it uses of one)


async def test_it_is_as_healthy_as_the_deployment():
    kept = replica("serving", "starting", WorkerUnavailable("no controller"), "serving")
    await kept.bring_up()
    assert kept.deployment.starts == 1  # pyright: ignore[reportAttributeAccessIssue]
    await kept.check_health()
    with pytest.raises(WorkerUnavailable, match="is starting"):
        await kept.check_health()
    with pytest.raises(WorkerUnavailable, match="no controller"):
        await kept.check_health()
    await kept.check_health()


async def test_a_controller_that_does_not_answer_is_no_health(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve_app, "STATUS_TIMEOUT_S", 0.05)
    with pytest.raises(WorkerUnavailable, match="has not answered"):
        await replica("silent").check_health()
