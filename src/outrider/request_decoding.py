"""Requests that are no messages: named for what they are, where gRPC alone would answer UNKNOWN without a reason.

gRPC ends a call with UNKNOWN when a deserializer raises. Ours returns the error instead, and the handler answers it.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from outrider.errors import FieldViolation, InvalidRequest
from outrider.rpc import abort_with, add_methods

# Of what may be megabytes of broken text; a status has to fit into 8 KiB.
_MAX_REASONS = 16


def add_service(servicer: object, service: ServiceDescriptor, server: grpc.aio.Server) -> None:
    """Add the servicer's methods to the server.

    It does what the generated `add_..._to_server` does, but bytes that are not the request's message are answered with
    INVALID_ARGUMENT and a reason. A method that reads a stream meets them as an InvalidRequest of its iterator.
    """
    handlers = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name)
        make, guarded = _handler(method, behaviour)
        handlers[method.name] = make(
            guarded,
            request_deserializer=functools.partial(decode, method.input_type),
            response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
        )
    add_methods(server, service.full_name, handlers)


def _handler(method: MethodDescriptor, behaviour: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the gRPC handler of a method."""
    if method.client_streaming:
        # All of ours write to their context: such a method is one coroutine, not a generator.
        assert method.server_streaming
        assert inspect.iscoroutinefunction(behaviour)
        return grpc.stream_stream_rpc_method_handler, _guard_stream_of_requests(behaviour)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler, _guard_stream(behaviour)
    return grpc.unary_unary_rpc_method_handler, _guard_unary(behaviour)


def decode(message_type: Descriptor, data: bytes) -> Message | InvalidRequest:
    """The message, or what is wrong with its bytes."""
    try:
        return message_factory.GetMessageClass(message_type).FromString(data)
    except DecodeError:
        return InvalidRequest(list(itertools.islice(_reasons(message_type, data), _MAX_REASONS)))


def _guard_stream(behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Message]]:
    async def stream(request: Message | InvalidRequest, context: Any) -> AsyncIterator[Message]:
        if isinstance(request, InvalidRequest):
            await abort_with(context, request)
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    return stream


def _guard_stream_of_requests(behaviour: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def readable(requests: AsyncIterator[Message | InvalidRequest]) -> AsyncIterator[Message]:
        async for request in requests:
            if isinstance(request, InvalidRequest):
                raise request
            yield request

    async def answer(requests: AsyncIterator[Message | InvalidRequest], context: Any) -> None:
        await behaviour(readable(requests), context)

    return answer


def _guard_unary(behaviour: Callable[..., Awaitable[Message]]) -> Callable[..., Awaitable[Message]]:
    async def answer(request: Message | InvalidRequest, context: Any) -> Message:
        if isinstance(request, InvalidRequest):
            await abort_with(context, request)
        return await behaviour(request, context)

    return answer


def _reasons(message_type: Descriptor, data: bytes) -> Iterator[FieldViolation]:
    twin = _twin_with_bytes_for_strings(message_type.full_name)
    try:
        message = twin.FromString(data)
    except DecodeError:
        yield FieldViolation(
            "request", f"these {len(data)} bytes are no {message_type.full_name}: encode it with this protocol's files"
        )
        return
    found = False
    for path in _broken_strings(message, message_type, ""):
        found = True
        yield FieldViolation(path, "broken UTF-8: encode this text as UTF-8")
    if not found:
        yield FieldViolation("request", f"no valid {message_type.full_name}: encode it with this protocol's files")


def _broken_strings(twin: Message, original: Descriptor, path: str) -> Iterator[str]:
    for twin_field, value in twin.ListFields():
        field = original.fields_by_number[twin_field.number]
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map or field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING):
            continue
        single = isinstance(value, Message | bytes)
        for position, entry in enumerate([value] if single else value):
            place = f"{path}{field.name}" if single else f"{path}{field.name}[{position}]"
            if isinstance(entry, Message):
                assert field.message_type is not None
                yield from _broken_strings(entry, field.message_type, f"{place}.")
            elif not _is_utf8(entry):
                yield place


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@functools.cache
def _twin_with_bytes_for_strings(full_name: str) -> type[Message]:
    """Return the message type with strings as bytes: it takes broken UTF-8, so that the field can be named."""
    pool = descriptor_pool.DescriptorPool()

    def add(file: FileDescriptor) -> None:
        for dependency in file.dependencies:
            add(dependency)
        twin = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(twin)
        for message_type in twin.message_type:
            for field in message_type.field:
                if field.type == field.TYPE_STRING:
                    field.type = field.TYPE_BYTES
        pool.AddSerializedFile(twin.SerializeToString())

    original = descriptor_pool.Default().FindMessageTypeByName(full_name)
    add(original.file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))
