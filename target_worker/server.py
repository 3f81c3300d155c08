"""The target worker process: what of serving is a target's own."""

import asyncio
import functools
from pathlib import Path

from outrider.engine.model_runner import ModelRunner
from outrider.front.calls import Call, Calls
from outrider.front.handle import Front
from outrider.front.inbox import Inbox
from outrider.metrics.families import Describe, Families
from outrider.metrics.worker import WorkerGauges, describe_worker
from outrider.roles import collector
from outrider.roles.worker import model_info
from outrider.roles.worker_service import Loaded, Worker, serve_worker
from outrider.security.roles import Role
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.drafters.loading import load_draft, room_for_draft
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.reload import Reloader
from outrider.target_worker.rounds.thread import RoundThread
from outrider.target_worker.service import SERVICE, ReloadCall, TargetStream, pack_load
from outrider.v1 import common_pb2, registry_pb2

__all__ = ["TargetWorkerConfig", "serve"]

# Rounds of some ten milliseconds each: every one is told by itself.
_MOST_WAITING = 16


class TargetWorker(Worker[RoundThread]):
    """Verifies trees; see `Worker`."""

    role = Role.TARGET

    def __init__(self, config: TargetWorkerConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None
        self.front = Front(SERVICE, role=self.role, address=config.address, most_waiting=_MOST_WAITING, tls=config.tls)
        calls = Calls(self.front.data, SERVICE, {"Verify": self._verify, "Reload": self._reload})
        self.inbox = Inbox(self.front.data, calls.commands)
        self.thread = RoundThread(self._make_loop, self.inbox)
        self._reloader = Reloader(self.thread)
        self._event_loop = asyncio.get_running_loop()

    def _verify(self, call: Call) -> TargetStream:
        return TargetStream(call, self.thread)

    def _reload(self, call: Call) -> ReloadCall:
        return ReloadCall(call, self._reloader, self._event_loop)

    def _make_loop(self) -> RoundLoop:
        config, engine = self._config, self._config.engine()
        folder = config.draft_model
        neighbour = None if folder is None else room_for_draft(engine, folder)
        runner = self._runner = self._reloader.load(
            Path(engine.model_path), lambda: ModelRunner(engine, neighbour=neighbour)
        )
        draft = None
        if folder is not None:
            draft = load_draft(
                runner,
                folder,
                branching=config.draft_branching,
                most_steps=config.max_draft_steps,
                prefill_tokens=config.prefill_tokens,
            )
        rounds = config.rounds(max_model_len=runner.info.max_model_len)
        loop = RoundLoop(runner, rounds, program=RoundProgram.of_runner(runner, rounds, draft=draft))
        collector.begin_serving()
        return loop

    def loaded(self) -> Loaded:
        """See `Worker`."""
        assert self._runner is not None
        self.thread.ready.result()
        card, config = self._runner.info, self._config
        model = model_info(card)
        model.weights.CopyFrom(self._reloader.running)
        return Loaded(
            model=model,
            limits=registry_pb2.WorkerLimits(max_sessions=config.max_num_seqs),
            metrics=_metrics(self.thread, model_name=card.name),
            failures=[self._runner.ranks.failed],
        )

    def load(self) -> common_pb2.WorkerLoad:
        """See `Worker`."""
        load = pack_load(self.thread.report())
        load.weights.CopyFrom(self._reloader.running)
        return load

    def close(self) -> None:
        """End the processes that share the model."""
        if self._runner is not None:
            self._runner.close()


def _metrics(rounds: RoundThread, *, model_name: str) -> Describe:
    """Describe a round thread's metrics; they are read from any thread."""

    def describe(families: Families) -> None:
        load = rounds.load
        gauges = WorkerGauges(
            sessions=load.sessions,
            slots_used=load.slots_used,
            slots_cached=load.slots_cached,
            slots_total=load.slots_total,
            waiting=rounds.waiting,
            step_age_s=rounds.watch.age_s,
        )
        describe_worker(families, rounds.counts, gauges, role="target", model_name=model_name)

    return describe


serve = functools.partial(serve_worker, TargetWorker)
