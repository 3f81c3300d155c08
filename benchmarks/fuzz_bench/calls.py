"""One fuzzed call: the bytes go over a real channel, and what comes back is judged."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from benchmarks.fuzz_bench.messages import MessageFuzzer
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

Status = grpc.StatusCode

CALL_S = 30.0
# Between messages of one stream, try by try.
_PAUSES_S = (0.0, 0.02, 0.1, 0.5, 2.0)
# A door may refuse larger messages.
_SMALLEST_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """End of a call.

    Attributes:
        code: its status; OK also where this side hung up on a stream that has no end.
        responses: as bytes.
        seconds: until then.
    """

    code: grpc.StatusCode
    details: str
    responses: Sequence[bytes]


async def call(
    channel: grpc.aio.Channel,
    method: MethodDescriptor,
    payloads: Sequence[bytes],
    *,
    most_responses: int | None = None,
    linger_s: float = 0.0,
    timeout_s: float = CALL_S,
) -> Answer:
    """Send the payloads as they are.

    Args:
        most_responses: of a stream without an end.
        linger_s: from the last message of a stream until its end, for what is sent unasked.
        timeout_s: for the call.
    """
    for pause_s in _PAUSES_S:
        pauses = [pause_s] * (len(payloads) - 1) + [pause_s + linger_s]
        answer = await _call(channel, method, payloads, most_responses, timeout_s, pauses_s=pauses)
        # What the client of gRPC says of a call that the server ended while it was still being written; the status
        # that the server gave is lost then. With a pause before the next message it comes first.
        if answer.details != "Internal error from Core":
            break
    return answer


async def _call(
    channel: grpc.aio.Channel,
    method: MethodDescriptor,
    payloads: Sequence[bytes],
    most_responses: int | None,
    timeout_s: float,
    *,
    pauses_s: Sequence[float],
) -> Answer:
    path = f"/{method.containing_service.full_name}/{method.name}"
    responses: list[bytes] = []
    try:
        if method.client_streaming:
            stream = channel.stream_stream(path)(timeout=timeout_s)
            # Who has ended the call takes no more; its status says why.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for payload, pause_s in zip(payloads, pauses_s, strict=True):
                    await stream.write(payload)
                    await asyncio.sleep(pause_s)
                    if stream.done():
                        break
                else:
                    await stream.done_writing()
        elif method.server_streaming:
            stream = channel.unary_stream(path)(payloads[0], timeout=timeout_s)
        else:
            answer = await channel.unary_unary(path)(payloads[0], timeout=timeout_s)
            return Answer(code=Status.OK, details="", responses=[answer])
        async for response in stream:
            responses.append(response)
            if most_responses is not None and len(responses) >= most_responses:
                stream.cancel()
                return Answer(code=Status.OK, details="", responses=responses)
        code, details = await stream.code(), await stream.details()
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
    return Answer(code=code, details=details or "", responses=responses)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A method under fire.

    Attributes:
        method: its descriptor.
        examples: what it would take; where it streams, each is one conversation.
        codes: that a message it can read may end with.
        judge: raises AssertionError for responses that are wrong.
        most_responses, linger_s: as of `call`.
    """

    method: MethodDescriptor
    examples: Callable[[int], Sequence[Sequence[Message]]]
    codes: frozenset[grpc.StatusCode]
    judge: Callable[[Sequence[bytes], Answer], None] = lambda payloads, answer: None
    most_responses: int | None = None
    linger_s: float = 0.0

    def conversations(self, seed: int) -> Iterator[list[bytes]]:
        """Yield conversations without end: correct messages with one or two incorrect ones among them."""
        fuzzer = MessageFuzzer(_class_of(self.method), seed=f"{self.method.full_name} {seed}")
        for number in itertools.count():
            given = self.examples(number)
            example = fuzzer.random.choice(given)
            everything = [message for conversation in given for message in conversation]
            payloads = [message.SerializeToString() for message in example]
            for _ in range(fuzzer.random.choice((1, 1, 2))):
                payloads[fuzzer.random.randrange(len(payloads))] = fuzzer.message(everything)
            yield payloads

    def check(self, payloads: Sequence[bytes], answer: Answer) -> None:
        """Check that the answer is right for these bytes.

        Raises:
            AssertionError: it is not, with what it is.
        """
        said = f"{answer.code.name}: {answer.details}"
        if answer.code is Status.RESOURCE_EXHAUSTED and max(map(len, payloads)) > _SMALLEST_LIMIT:
            assert "larger than max" in answer.details, said
            return
        if all(self._is_readable(payload) for payload in payloads):
            assert answer.code in self.codes, f"{said}; {', '.join(code.name for code in self.codes)} would be right"
        else:
            # Of a stream, what came before the unreadable message may end it first.
            codes = self.codes if self.method.client_streaming else frozenset()
            assert answer.code in codes | {Status.INVALID_ARGUMENT}, f"{said}, for bytes that are no message"
        if answer.code is not Status.OK:
            assert len(answer.details) > 10, f"{said}: no reason is given"
        for response in answer.responses:
            _output_class(self.method).FromString(response)
        self.judge(payloads, answer)

    def _is_readable(self, payload: bytes) -> bool:
        try:
            _class_of(self.method).FromString(payload)
        except DecodeError:
            return False
        return True


def _class_of(method: MethodDescriptor) -> type[Message]:
    return message_factory.GetMessageClass(method.input_type)


def _output_class(method: MethodDescriptor) -> type[Message]:
    return message_factory.GetMessageClass(method.output_type)
