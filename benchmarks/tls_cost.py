"""What mutual TLS costs between coordinator and worker: round trips on one stream, in the clear and encrypted.

    python benchmarks/tls_cost.py [--round-trips 2000]

A server as a worker has it answers every message of a Verify stream at once with one of 1 KiB; the caller sends
messages of the given sizes and waits for the answer. Both ends share this process, so the processor time a round trip
takes is that of both. The two ways take turns, block by block, so that whatever else the machine does falls on both
alike. A new connection's handshake is measured apart.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from outrider import rpc
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import target_pb2, target_pb2_grpc

_SIZES = (1 << 10, 16 << 10, 256 << 10)
_BLOCKS = 10
_CONNECTIONS = 30


class _Echo(target_pb2_grpc.TargetServiceServicer):
    async def Verify(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        answer = target_pb2.RoundResults(tokens=[1 << 20] * 300)
        async for _ in request_iterator:
            await context.write(answer)


def _server(tls: TlsConfig | None) -> rpc.RoleServer:
    return rpc.RoleServer(
        services=["outrider.v1.TargetService"],
        add_services=lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(_Echo(), server),
        address="127.0.0.1:0",
        tls=tls,
    )


async def _round_trips(address: str, tls: TlsConfig | None, size: int, count: int) -> tuple[list[float], float]:
    """Microseconds of each round trip, and processor time of one."""
    request = target_pb2.RoundCommands(opens=[{"prompt": bytes(size)}])
    async with rpc.open_channel(address, tls=tls, peer=Role.TARGET) as channel:
        call: Any = target_pb2_grpc.TargetServiceStub(channel).Verify()
        await call.write(request)
        await call.read()
        times, before = [], _processor_s()
        for _ in range(count):
            start = time.perf_counter_ns()
            await call.write(request)
            await call.read()
            times.append((time.perf_counter_ns() - start) / 1e3)
        processor_us = (_processor_s() - before) / count * 1e6
        call.cancel()
    return times, processor_us


async def _connect_ms(address: str, tls: TlsConfig | None) -> float:
    start = time.perf_counter_ns()
    # Channels with equal options share a connection: this one is its own.
    async with rpc.open_channel(address, tls=tls, peer=Role.TARGET) as channel:
        await channel.channel_ready()
        return (time.perf_counter_ns() - start) / 1e6


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _measure(round_trips: int, folder: Path) -> None:
    write_development_set(folder, days=1)
    ways: dict[str, TlsConfig | None] = {"clear": None, "mutual TLS": TlsConfig.of_folder(folder, Role.COORDINATOR)}
    servers = {"clear": _server(None), "mutual TLS": _server(TlsConfig.of_folder(folder, Role.TARGET))}
    for server in servers.values():
        await server.start()
    _print(f"{'message':>10} {'way':>12} {'p50 us':>8} {'p99 us':>8} {'processor us':>13}")
    for size in _SIZES:
        times: dict[str, list[float]] = {way: [] for way in ways}
        processor: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_BLOCKS):
            for way, tls in ways.items():
                took, processor_us = await _round_trips(servers[way].address, tls, size, round_trips // _BLOCKS)
                times[way] += took
                processor[way].append(processor_us)
        for way in ways:
            p99 = statistics.quantiles(times[way], n=100)[98]
            middle = statistics.median(processor[way])
            _print(f"{size >> 10:>6} KiB {way:>12} {statistics.median(times[way]):8.0f} {p99:8.0f} {middle:13.0f}")
    for way, tls in ways.items():
        connects = [await _connect_ms(servers[way].address, tls) for _ in range(_CONNECTIONS)]
        _print(f"a new connection, {way}: {statistics.median(connects):.2f} ms (median of {_CONNECTIONS})")
    for server in servers.values():
        await server.stop(grace_s=0)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(options: Sequence[str]) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--round-trips", type=int, default=2000, help="of each size and way (default 2000)")
    arguments = parser.parse_args(options)
    if arguments.round_trips < 100:
        parser.error(f"--round-trips: {arguments.round_trips} given, at least 100 needed")
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_measure(arguments.round_trips, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
