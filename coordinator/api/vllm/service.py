"""vllm.grpc.engine.VllmEngine over the same generations as every other door, for routers that drive vLLM by gRPC.

The messages are those of the package smg-grpc-proto, which is an extra. docs/vllm-grpc.md says what is mapped to what.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2

from outrider import request_decoding, tracing
from outrider.coordinator.api.access import Access
from outrider.coordinator.api.generations import LARGE_REQUEST_BYTES, Generations
from outrider.coordinator.api.vllm.requests import as_it_came, generate_request
from outrider.coordinator.api.vllm.responses import Answer
from outrider.coordinator.sessions.messages import GenerationRequest, GenerationResult, TokenDelta
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, Unauthenticated
from outrider.rpc import abort_with
from outrider.v1 import generation_pb2, registry_pb2

SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]


class VllmEngineServicer:
    """The part of the service that a router needs to generate; the rest answers UNIMPLEMENTED."""

    def __init__(
        self,
        generations: Generations,
        access: Access,
        *,
        server_info: Callable[[], generation_pb2.ServerInfo],
        model_folder: Path,
        max_running: int,
    ) -> None:
        self._generations, self._access, self._server_info = generations, access, server_info
        self._folder, self._max_running = model_folder, max_running
        self._last_received_s = 0.0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        request_decoding.add_service(self, SERVICE, server)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 the protocol's names
        """Chunks, where `stream` is set, then one GenerateComplete a choice."""
        self._last_received_s = time.time()
        try:
            caller = self._access.caller(context)
            self._generations.check_room()
            ours = await self._translate(request)
            parent = "" if tracing.active is None else tracing.received(context.invocation_metadata())
            begun = self._generations.stream(ours, caller, connection=context.peer(), traceparent=parent)
            async with contextlib.aclosing(begun) as events:
                checked = await anext(events)
                assert isinstance(checked, GenerationRequest)
                eos = self._generations.model.eos_token_ids
                answer = Answer(checked, stream=request.stream, eos_token_ids=eos)
                async for event in events:
                    if isinstance(event, TokenDelta):
                        for message in answer.delta(event):
                            yield message
                    elif isinstance(event, GenerationResult):
                        for message in answer.complete(event):
                            yield message
        except InvalidRequest as error:
            await abort_with(context, as_it_came(error))
        except OutriderError as error:
            await abort_with(context, error)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """End the caller's own live requests; others, and unknown ones, are left alone."""
        try:
            caller = self._access.caller(context)
        except Unauthenticated as error:
            await abort_with(context, error)
        await self._generations.abort(caller, request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Healthy while a target serves."""
        workers = self._server_info().workers
        targets = [worker for worker in workers if worker.introduction.role == registry_pb2.WORKER_ROLE_TARGET]
        serving = sum(worker.state == "serving" for worker in targets)
        message = f"{serving} of {len(targets)} target workers serve"
        return vllm_engine_pb2.HealthCheckResponse(healthy=serving > 0, message=message)

    async def GetModelInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """The model that is served."""
        model = self._generations.model
        text = await asyncio.to_thread((self._folder / "config.json").read_text, encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=str(self._folder),
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=str(self._folder),
            model_type=config.get("model_type", ""),
            architectures=config.get("architectures") or [],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=_one(config.get("pad_token_id")),
            bos_token_id=_one(config.get("bos_token_id")),
            max_req_input_len=model.max_model_len - 1,
        )

    async def GetServerInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """The state of the server now."""
        info = self._server_info()
        dtypes = [each.introduction.model.dtype for each in info.workers if each.introduction.model.dtype]
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=info.running_sessions + info.waiting_requests,
            last_receive_timestamp=self._last_received_s,
            uptime_seconds=info.uptime_s,
            # What a router that knows vLLM looks for.
            server_type="vllm-grpc",
            data_parallel_size=1,
            model_dtype=f"torch.{dtypes[0]}" if dtypes else "",
            max_num_seqs=self._max_running,
            constrained_decoding_start="first_token",
        )

    def __getattr__(self, name: str) -> Any:
        """The service's other methods."""
        method = SERVICE.methods_by_name.get(name)
        if method is None:
            raise AttributeError(name)

        async def refuse(_request: Any, context: Any) -> Any:
            reason = f"{name} is not served here: Generate, Abort, HealthCheck, GetModelInfo and GetServerInfo are"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)

        async def refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await refuse(request, context)
            yield

        return refuse_stream if method.server_streaming else refuse

    async def _translate(self, request: Any) -> generation_pb2.GenerateRequest:
        prompt = None
        try:
            if request.WhichOneof("input") == "text":
                prompt = await self._tokens(request.text)
            return generate_request(request, prompt=prompt, max_model_len=self._generations.model.max_model_len)
        except InvalidRequest as error:
            self._generations.on_refusal(error)
            raise

    async def _tokens(self, text: str) -> list[int]:
        tokenizer = self._generations.tokenizer
        if tokenizer is None:
            raise InvalidRequest([FieldViolation("text", "this model has no tokenizer: give tokenized.input_ids")])
        longest, most = tokenizer.longest_token_bytes, self._generations.model.max_model_len
        if longest is not None and len(text) > longest * most:
            raise InvalidRequest([FieldViolation("text", f"longer than the {most} tokens that the model takes")])
        if len(text) < LARGE_REQUEST_BYTES:
            return tokenizer.encode(text)
        return await asyncio.to_thread(tokenizer.encode, text)


def _one(value: Any) -> int:
    """The first of several; 0 where there is none."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value or 0
