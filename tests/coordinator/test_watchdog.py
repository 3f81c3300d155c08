"""Steps that do not come back, in virtual time: a busy machine hangs too."""

import asyncio

import pytest
from benchmarks.simulation import virtual_time

from outrider.coordinator import watchdog
from outrider.coordinator.messages import GenerationRequest
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2

REQUEST = GenerationRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingSpec(max_new_tokens=30))


def add_hanging_target(bench, reasons: list[str]):
    """A target whose tenth step hangs until `go_on` is set; its loss is told as the registry would."""

    def lose(reason: str) -> None:
        reasons.append(reason)
        bench.scheduler.remove_target("first", reason)

    target = bench.add_target("first", on_hang=lose)
    go_on, step = asyncio.Event(), target._step

    async def hang(trees):
        if len(target.batches) == 10:
            await go_on.wait()
        return await step(trees)

    target._step = hang
    return target, go_on


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.02)


def test_a_hung_target_is_lost_and_its_sessions_go_on_elsewhere(make_bench, expect_output, quick_looks):
    async def main() -> None:
        bench, reasons = make_bench(step_timeout_s=0.3), []
        add_hanging_target(bench, reasons)
        generating = asyncio.create_task(bench.generate(REQUEST))
        while len(bench.scheduler._lanes["first"].sessions) == 0:
            await asyncio.sleep(0)
        second = bench.add_target("second")
        outputs, _ = await generating
        assert outputs == [expect_output(REQUEST.prompt_token_ids, REQUEST.sampling)]
        assert len(reasons) == 1
        assert "rows has not come back for 0." in reasons[0]
        assert second.batches
        await bench.scheduler.stop(RuntimeError())  # type: ignore[arg-type]

    virtual_time.run(main())


def test_what_may_be_compiling_is_waited_for(make_bench, expect_output, quick_looks):
    async def main() -> None:
        bench, reasons = make_bench(step_timeout_s=0.2), []
        target, go_on = add_hanging_target(bench, reasons)
        bench.scheduler.note_load("first", common_pb2.WorkerLoad(preparing=True))
        generating = asyncio.create_task(bench.generate(REQUEST))
        while len(target.batches) < 10:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        # Its time counts from here on.
        bench.scheduler.note_load("first", common_pb2.WorkerLoad())
        await asyncio.sleep(0.1)
        assert not reasons
        go_on.set()
        outputs, _ = await generating
        assert outputs == [expect_output(REQUEST.prompt_token_ids, REQUEST.sampling)]
        assert not reasons
        await bench.scheduler.stop(RuntimeError())  # type: ignore[arg-type]

    virtual_time.run(main())
