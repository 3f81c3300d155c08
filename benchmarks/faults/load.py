"""Mixed load: requests of several kinds, asked for by clients of several habits, and the history of what each heard.

Two kinds of clients: the library, which goes on by itself when a stream breaks, and one on the bare wire, which sees
every delta as it was sent and resumes by hand. The library would hide a duplicate; the wire would not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, cast

import grpc
import grpc.aio
from benchmarks.faults.history import Broken, ChoiceWanted, End, Ended, History, ToldDelta

from outrider.client import AsyncClient, GenerateOptions
from outrider.client.request import build_request
from outrider.errors import OutriderError
from outrider.models import held_out_prompts
from outrider.rpc import CHANNEL_OPTIONS
from outrider.v1 import generation_pb2, generation_pb2_grpc

Mode = Literal["off", "sync", "async"]

_PROMPT_CHARACTERS = 160
# A request that has not ended by then has lost its end.
REQUEST_TIMEOUT_S = 120.0
_RETRY_PAUSE_S = (0.1, 0.5)
_LOOK_S = 0.05
_RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, kw_only=True)
class Script:
    """A request whose output is known.

    Attributes:
        options: of the generation, a seed among them; how it is speculated is up to the client.
    """

    name: str
    prompt: str
    options: Mapping[str, Any]

    @property
    def choices(self) -> int:
        """Number of outputs."""
        return self.options.get("n") or 1


class Habit(Enum):
    """Behaviour of a client towards its stream."""

    LIBRARY = "library"
    WIRE = "wire"
    CANCELS = "cancels"
    """Leaves in the middle."""
    STALLS = "stalls"
    """Reads nothing for a while."""
    RESUMES = "resumes"
    """Drops its own stream and asks for the rest elsewhere."""


# Of ten requests; the library is what most people use.
_HABITS = (*[Habit.LIBRARY] * 4, *[Habit.WIRE] * 2, Habit.CANCELS, Habit.STALLS, *[Habit.RESUMES] * 2)
_MODES: tuple[Mode, ...] = ("off", "sync", "async", "async", "async")


def make_scripts(count: int, *, seed: int, longest: int = 160) -> list[Script]:
    """Greedy and sampled requests, short and longer ones, some with several choices, some that a string ends."""
    choices, prompts = random.Random(seed), held_out_prompts()
    scripts = []
    for number in range(count):
        options: dict[str, Any] = {
            "temperature": choices.choice([0.0, 0.0, 0.7, 1.0]),
            "seed": choices.getrandbits(64),
            "max_new_tokens": choices.choice([8, 24, longest // 2, longest]),
            "ignore_eos": choices.random() < 0.8,
        }
        if choices.random() < 0.2:
            options["n"] = 2
        if choices.random() < 0.2:
            options["stop"] = ["\n\n\n", "return"]
        if choices.random() < 0.2:
            options |= {"repetition_penalty": 1.1, "top_k": 40} if options["temperature"] else {"presence_penalty": 0.3}
        prompt = choices.choice(prompts)[:_PROMPT_CHARACTERS]
        scripts.append(Script(name=f"script {number}", prompt=prompt, options=options))
    return scripts


async def without_faults(
    endpoint: str, scripts: Sequence[Script], *, at_once: int = 4
) -> dict[str, list[ChoiceWanted]]:
    """Return the scripts' outputs, each through the target alone, speculation off."""
    gate = asyncio.Semaphore(at_once)

    async def run(client: AsyncClient, script: Script) -> list[ChoiceWanted]:
        async with gate:
            output = await client.generate(script.prompt, **_options(script, "off"))
        return [
            ChoiceWanted(token_ids=choice.token_ids, text=choice.text, finish_reason=choice.finish_reason or "none")
            for choice in output.choices
        ]

    async with AsyncClient(endpoint) as client:
        outputs = await asyncio.gather(*(run(client, script) for script in scripts))
    return {script.name: output for script, output in zip(scripts, outputs, strict=True)}


def _options(script: Script, mode: Mode) -> GenerateOptions:
    return cast("GenerateOptions", {**script.options, "speculation": mode, "timeout_s": REQUEST_TIMEOUT_S})


class Load:
    """Clients that ask again as soon as they have been answered.

    Args:
        endpoints: of the coordinators.
        scripts: to draw from.
        clients: at a time.
        seed: of who asks for what, and how.
        pause_s: most that a client waits before it asks again.

    Attributes:
        histories: of all requests, in the order of their beginning.
    """

    def __init__(
        self, endpoints: Sequence[str], scripts: Sequence[Script], *, clients: int, seed: int, pause_s: float = 1.0
    ) -> None:
        self.histories: list[History] = []
        self._endpoints, self._scripts, self._seed = list(endpoints), scripts, seed
        self._pause_s = pause_s
        self._numbers = itertools.count()
        self._is_stopping = False
        self._begun = asyncio.Barrier(clients)
        self._tasks = [asyncio.create_task(self._ask_again(number)) for number in range(clients)]

    async def until_asked(self, count: int = 1) -> None:
        """Wait until this many requests have begun; before the first, every client has been served once.

        Raises what a client has failed with, if one has.
        """
        while len(self.histories) < count:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Let the running requests end, and begin no more."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    async def _ask_again(self, client: int) -> None:
        choices = random.Random(f"{self._seed} {client}")
        # A client that lives as long as its program, as most do: one that has never been served is told at once that
        # there is no service.
        async with AsyncClient(choices.sample(self._endpoints, len(self._endpoints))) as library:
            await library.generate("import", max_new_tokens=1)
            await self._begun.wait()
            await self._ask_with(library, choices)

    async def _ask_with(self, library: AsyncClient, choices: random.Random) -> None:
        while not self._is_stopping:
            script, habit, mode = choices.choice(self._scripts), choices.choice(_HABITS), choices.choice(_MODES)
            name = f"request {next(self._numbers)}"
            history = History(name=name, script=script.name, client=f"{habit.value}, {mode}")
            self.histories.append(history)
            endpoints = choices.sample(self._endpoints, len(self._endpoints))
            request = _Asked(script, mode, habit, library, endpoints, history, random.Random(choices.getrandbits(64)))
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S + 10):
                    await request.run()
            except TimeoutError:
                # No end: the checker says so.
                history.add(Broken(reason="the client gave up waiting", at_s=time.monotonic()))
            # The machine also has to start roles anew.
            await asyncio.sleep(choices.uniform(0, self._pause_s))


@dataclass(frozen=True)
class _Asked:
    """One request of one client."""

    script: Script
    mode: Mode
    habit: Habit
    library: AsyncClient
    endpoints: Sequence[str]
    history: History
    choices: random.Random

    async def run(self) -> None:
        if self.habit is Habit.LIBRARY:
            await self._through_library()
        else:
            await self._through_wire()

    def _end(self, end: End, detail: str = "", **more: Any) -> None:
        self.history.add(Ended(end=end, detail=detail, at_s=time.monotonic(), **more))

    async def _through_library(self) -> None:
        stream = self.library.stream(self.script.prompt, **_options(self.script, self.mode))
        try:
            async with stream:
                async for delta in stream:
                    self.history.add(
                        ToldDelta(
                            index=delta.index,
                            offset=delta.offset,
                            token_ids=delta.token_ids,
                            text=delta.text,
                            text_offset=delta.text_offset,
                            at_s=time.monotonic(),
                        )
                    )
        except (OutriderError, TimeoutError) as error:
            self._end(_refused_or_failed(str(error)), f"{type(error).__name__}: {error}")
            return
        result = stream.result
        self.history.resumes = result.resumes
        self._end(
            End.FINISHED,
            finish_reasons=[choice.finish_reason or "none" for choice in result.choices],
            token_counts=[len(choice.token_ids) for choice in result.choices],
        )

    # ------------------------------------------------------------------------------------------------ on the bare wire

    async def _through_wire(self) -> None:
        request = build_request(self.script.prompt, _without_timeout(_options(self.script, self.mode)))
        # A name of its own: what another coordinator still holds under it is of this request.
        request.request_id = f"{self.history.name.replace(' ', '-')}-{self.choices.getrandbits(64):x}"
        received = [_Received() for _ in range(self.script.choices)]
        turning_point = self.choices.randint(1, 40) if self.habit is not Habit.WIRE else None
        for endpoint in itertools.cycle(self.endpoints):
            del request.received[:]
            for index, choice in enumerate(received):
                if choice.token_ids:
                    request.received.add(index=index, token_ids=choice.token_ids, text_bytes=choice.text_bytes)
            try:
                if await self._attempt(endpoint, request, received, turning_point):
                    return
                turning_point = None
                reason = "dropped by the client itself"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if self.history.end is not None and error.code() in _RETRIED:
                    # The connection broke behind the last message: the request is complete all the same.
                    return
                if error.code() not in _RETRIED:
                    self._end(_refused_or_failed(reason), reason)
                    return
                await asyncio.sleep(self.choices.uniform(*_RETRY_PAUSE_S))
            self.history.add(Broken(reason=reason, at_s=time.monotonic()))
            self.history.resumes += 1

    async def _attempt(
        self,
        endpoint: str,
        request: generation_pb2.GenerateRequest,
        received: Sequence[_Received],
        turning_point: int | None,
    ) -> bool:
        """One stream; whether the request has ended with it. The turning point is in tokens."""
        async with _call(endpoint, request) as responses:
            has_ended = False
            async for response in responses:
                if response.HasField("delta"):
                    delta = response.delta
                    self.history.add(
                        ToldDelta(
                            index=delta.index,
                            offset=delta.offset,
                            token_ids=tuple(delta.token_ids),
                            text=delta.text,
                            text_offset=delta.text_offset,
                            at_s=time.monotonic(),
                        )
                    )
                    if delta.index >= len(received):
                        self._end(End.FAILED, f"choice {delta.index} was not asked for")
                        return True
                    received[delta.index].take(delta)
                elif response.HasField("finished"):
                    has_ended = True
                    self._end(
                        End.FINISHED,
                        finish_reasons=[
                            _FINISH_REASONS.get(choice.finish_reason, "none") for choice in response.finished.choices
                        ],
                        token_counts=[choice.completion_tokens for choice in response.finished.choices],
                    )
                if turning_point is not None and not has_ended and _tokens(received) >= turning_point:
                    turning_point = None
                    if self.habit is Habit.CANCELS:
                        self._end(End.CANCELLED)
                        return True
                    if self.habit is Habit.RESUMES:
                        return False
                    await asyncio.sleep(self.choices.uniform(0.3, 2.0))
        if not has_ended:
            self._end(End.FAILED, "the stream ended OK without Finished")
        return True


def _refused_or_failed(reason: str) -> End:
    """PoisonRequest says it in these words; its code is that of other errors, too."""
    return End.REFUSED if "two target workers crashed" in reason else End.FAILED


@dataclass
class _Received:
    token_ids: list[int]
    text_bytes: int = 0

    def __init__(self) -> None:
        self.token_ids = []

    def take(self, delta: generation_pb2.Delta) -> None:
        self.token_ids += delta.token_ids
        self.text_bytes += len(delta.text.encode())


def _tokens(received: Sequence[_Received]) -> int:
    return sum(len(choice.token_ids) for choice in received)


def _without_timeout(options: GenerateOptions) -> GenerateOptions:
    kept = dict(options)
    del kept["timeout_s"]
    return cast("GenerateOptions", kept)


@contextlib.asynccontextmanager
async def _call(
    endpoint: str, request: generation_pb2.GenerateRequest
) -> AsyncIterator[AsyncIterator[generation_pb2.GenerateResponse]]:
    async with grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=REQUEST_TIMEOUT_S)
        try:
            yield call
        finally:
            call.cancel()
