"""What a token costs by HTTP and by gRPC: CPU time of the coordinator's process from the event to the socket.

    python benchmarks/http_door_cost.py [--streams 32] [--rounds 500] [--repeats 5] [--json]

Both doors stand over one service whose scheduler is a script: every stream has one event of two tokens in every turn of
the event loop, so that nothing is joined which would come apart in earnest. The clients are a process of their own, and
only read. Counted is the serving process's CPU time over all its threads, gRPC's included; the doors take turns.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import uvloop

if __name__ == "__main__":
    # Of this folder nothing is meant.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.coordinator.api.http.app import create_app
from outrider.coordinator.api.http.server import HttpServer
from outrider.coordinator.api.service import SERVICE, GenerationServicer
from outrider.coordinator.api.validation import RequestLimits
from outrider.coordinator.sessions.messages import (
    ChoiceResult,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    SpeculationCounts,
    TokenDelta,
)
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer, read_model_info
from outrider.errors import OutriderError
from outrider.models import embedded_target_path
from outrider.rpc import RoleServer, open_channel
from outrider.v1 import generation_pb2, generation_pb2_grpc

_TOKENS = (1000, 2000)
_DOORS = ("grpc", "completions", "chat")


class Script:
    """A generation and the scheduler that gives it: `rounds` events, a turn of the loop before each."""

    weights = ""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def check_room(self, choices: int = 1, *, entry: str = "") -> None:
        """There always is."""

    def submit(self, request: GenerationRequest, text_streams: Sequence[TextStream]) -> "Script":
        """One that plays from the start."""
        return Script(self._rounds)

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        for number in range(self._rounds):
            await asyncio.sleep(0)
            yield TokenDelta(index=0, token_ids=_TOKENS, text=" some text", offset=2 * number, text_offset=10 * number)
        tokens = 2 * self._rounds
        yield GenerationResult(
            choices=[ChoiceResult(index=0, finish_reason=FinishReason.LENGTH, completion_tokens=tokens)],
            speculation=SpeculationCounts(),
            queue_s=0.0,
            ttft_s=0.1,
            total_s=1.0,
        )

    def cancel(self) -> None:
        """Nothing is held."""

    def abort(self, error: OutriderError) -> None:
        """Nobody does."""


async def read_grpc(address: str, streams: int) -> None:
    """Reads that many streams to their ends."""

    async def one() -> None:
        request = generation_pb2.GenerateRequest(text="import os")
        async for _ in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request):
            pass

    async with open_channel(address) as channel:
        await asyncio.gather(*(one() for _ in range(streams)))


async def read_http(address: str, streams: int, path: str) -> None:
    """Likewise."""
    prompt = '"messages":[{"role":"user","content":"import os"}]' if "chat" in path else '"prompt":"import os"'
    body = f'{{{prompt},"stream":true}}'
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close"
    request = f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    host, _, port = address.rpartition(":")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        last = b""
        while chunk := await reader.read(1 << 16):
            last = (last + chunk)[-64:]
        if b"[DONE]" not in last:
            raise SystemExit(f"a stream of {path} ended early: {last!r}")
        writer.close()

    await asyncio.gather(*(one() for _ in range(streams)))


async def measure(streams: int, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of CPU time an event, by door, one entry a repeat."""
    folder = embedded_target_path()
    servicer = GenerationServicer(
        Script(rounds),
        model=read_model_info(folder),
        tokenizer=TextTokenizer.load(folder),
        limits=RequestLimits(),
        server_info=generation_pb2.ServerInfo,
    )
    grpc_server = RoleServer(services=[SERVICE.full_name], add_services=servicer.add_to, address="127.0.0.1:0")
    from outrider.coordinator.api.http.chat_template import load_chat_template

    http_server = HttpServer(create_app(servicer, template=load_chat_template(folder)), host="127.0.0.1", port=0)
    await grpc_server.start()
    await http_server.start()
    addresses = {"grpc": grpc_server.address, "completions": http_server.address, "chat": http_server.address}
    found: dict[str, list[float]] = {door: [] for door in _DOORS}
    try:
        for repeat in range(repeats + 1):
            for door in _DOORS:
                command = [sys.executable, __file__, "--read", door, addresses[door], "--streams", str(streams)]
                reader = await asyncio.create_subprocess_exec(*command)
                while not servicer.generations.live and reader.returncode is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                begun = time.process_time()
                if await reader.wait() != 0:
                    raise SystemExit(f"the reader of {door} failed")
                # The first turn warms up.
                if repeat:
                    found[door].append((time.process_time() - begun) / (streams * rounds) * 1e6)
    finally:
        await http_server.stop()
        await grpc_server.stop(grace_s=0)
    return found


def main() -> None:
    """Prints a line a door."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=500, help="events of each stream, of two tokens each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", nargs=2, metavar=("DOOR", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        door, address = options.read
        path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}.get(door)
        read = read_http(address, options.streams, path) if path else read_grpc(address, options.streams)
        uvloop.run(read)
        return
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    found = uvloop.run(measure(options.streams, options.rounds, options.repeats))
    medians = {door: statistics.median(values) for door, values in found.items()}
    if options.json:
        print(json.dumps({"event_us": found, "median_event_us": medians}))  # noqa: T201
        return
    for door, median in medians.items():
        spread = f"{min(found[door]):.1f} to {max(found[door]):.1f}"
        print(f"{door:12} {median:6.1f} us an event of two tokens, {median / 2:5.1f} us a token ({spread})")  # noqa: T201


if __name__ == "__main__":
    main()
