"""Requests over the service's own gRPC door, through its stubs.

The package's client would resume a stream that broke, at another endpoint if need be; here a stream that breaks is a
request that has failed, and the figures say so.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import grpc.aio

from outrider.client.errors import error_of
from outrider.client.progress import Progress
from outrider.coordinator.loadtest.records import RequestRecord, positions, round_times
from outrider.coordinator.loadtest.senders import Ask
from outrider.coordinator.loadtest.workloads import Prompt
from outrider.errors import OutriderError
from outrider.rpc import CHANNEL_OPTIONS
from outrider.security.bearer import authorized, check_transport
from outrider.security.tls import TlsConfig
from outrider.v1 import generation_pb2, generation_pb2_grpc

# Without it all channels to an address are one connection, whose streams share a limit and a window.
_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]


class GrpcSender:
    """Connections to all endpoints; requests take them in turn.

    Raises:
        InvalidRequest: a token without TLS, to another machine.
        CertificateError: a file of `tls` cannot be read.
    """

    def __init__(
        self, endpoints: Sequence[str], *, connections: int = 1, tls: TlsConfig | None = None, token: str | None = None
    ) -> None:
        self._channels: list[grpc.aio.Channel] = []
        stubs: list[tuple[str, Any]] = []
        for _ in range(connections):
            for endpoint in endpoints:
                check_transport(endpoint, tls=tls, token=token, insecure=False)
                if tls is None:
                    channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
                else:
                    channel = grpc.aio.secure_channel(endpoint, tls.channel_credentials(), options=_OPTIONS)
                self._channels.append(channel)
                stubs.append((endpoint, authorized(generation_pb2_grpc.GenerationServiceStub(channel), token)))
        self._stubs: Iterator[tuple[str, Any]] = itertools.cycle(stubs)

    async def send(self, ask: Ask, record: RequestRecord, *, begin_s: float) -> Prompt:
        """One request, to its end; see `Sender`."""
        record.endpoint, stub = next(self._stubs)
        request = _request(ask)
        output = _Output(ask)
        record.sent_s = time.monotonic() - begin_s
        call = stub.Generate(request, timeout=ask.timeout_s)
        try:
            async for response in call:
                event = response.WhichOneof("event")
                if event == "delta":
                    delta = response.delta
                    if delta.token_ids:
                        record.chunk_s.append(time.monotonic() - begin_s)
                        record.chunk_tokens.append(len(delta.token_ids))
                    output.take(delta)
                elif event == "round":
                    output.rounds.append(response.round)
                elif event == "finished":
                    _finish(record, response.finished, output.rounds)
                elif event == "started":
                    record.prompt_tokens = response.started.prompt_tokens
        except grpc.RpcError as failure:
            error = error_of(failure)
            record.error = f"{type(error).__name__}: {error}"
        except OutriderError as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            call.cancel()
        if not record.error and not record.output_tokens:
            record.error = "the stream ended before its end"
        return output.whole()

    async def close(self) -> None:
        """End the connections."""
        for channel in self._channels:
            await channel.close()


class _Output:
    """Parts of a response that the workload needs."""

    def __init__(self, ask: Ask) -> None:
        self._keeps, self._is_text = ask.keeps_output, isinstance(ask.prompt, str)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self.rounds: list[generation_pb2.Round] = []

    def take(self, delta: generation_pb2.Delta) -> None:
        if not self._keeps:
            return
        if self._is_text:
            self._texts.append(delta.text)
        else:
            self._token_ids += delta.token_ids

    def whole(self) -> Prompt:
        return "".join(self._texts) if self._is_text else tuple(self._token_ids)


def _request(ask: Ask) -> generation_pb2.GenerateRequest:
    options: dict[str, Any] = {
        "max_new_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "ignore_eos": ask.ignore_eos,
        "speculation": ask.speculation,
        "sources": ask.sources,
        "trace": ask.is_traced,
    }
    # Its options are a TypedDict.
    request = Progress(ask.prompt, options, max_resumes=0, endpoints=1).request()  # pyright: ignore[reportArgumentType]
    request.request_id = ""
    return request


def _finish(record: RequestRecord, finished: generation_pb2.Finished, rounds: Sequence[generation_pb2.Round]) -> None:
    record.output_tokens = finished.usage.completion_tokens
    speculation = finished.speculation
    record.verify_steps = speculation.verify_steps
    record.drafted_tokens = speculation.spec_draft_tokens
    record.accepted_tokens = speculation.spec_accepted_tokens
    accepted = [each.accepted for each in rounds]
    record.accepted_per_position, record.position_steps = positions(accepted), len(rounds)
    record.rounds = round_times(rounds)
