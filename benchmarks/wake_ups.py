"""What sleeping cores cost: a message's way to another process and back, with pauses in between.

    python benchmarks/wake_ups.py                 # needs write access to /dev/cpu_dma_latency for the last columns

Two processes of this machine hold a gRPC stream, as a coordinator and a worker do. One sends a small message, waits for
it to come back, sleeps for the pause, and so on. Turns alternate between cores as they are, cores kept awake
(`--keep-cores-awake` of the roles), and, with --spin, a process of idle priority that spins on every core.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import grpc
import grpc.aio
import uvloop
from rich.console import Console
from rich.table import Table

from outrider.awake import cores_awake
from outrider.errors import OutriderError

_SERVICE, _METHOD = "benchmark.Echo", "Echo"


async def _echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
    async for message in requests:
        yield message


async def _serve() -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_echo)  # pyright: ignore[reportArgumentType]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


async def _measure(port: int, pause_s: float, count: int) -> list[float]:
    """Microseconds of each way there and back."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
        taken = []
        for _ in range(count + 5):
            await asyncio.sleep(pause_s)
            begun = time.perf_counter()
            await call.write(b"x" * 200)
            await call.read()
            taken.append((time.perf_counter() - begun) * 1e6)
        await call.done_writing()
    return taken[5:]


_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(20000): pass
"""
_AS_THEY_ARE, _AWAKE, _SPINNING = "as they are", "kept awake", "spinning"


@contextlib.contextmanager
def _cores_spinning(wanted: bool) -> Iterator[None]:
    cores = os.sched_getaffinity(0) if wanted else ()
    children = [subprocess.Popen([sys.executable, "-c", _SPIN, str(core)]) for core in cores]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def _turn(port: int, pause_s: float, count: int, way: str) -> list[float]:
    with (
        cores_awake(way == _AWAKE),
        _cores_spinning(way == _SPINNING),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(port, pause_s, count))


def _ways(spin: bool) -> list[str]:
    ways = [_AS_THEY_ARE]
    try:
        with cores_awake(True):
            ways.append(_AWAKE)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
    return [*ways, _SPINNING] if spin else ways


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What sleeping cores cost a message between two processes.")
    parser.add_argument("--pauses-ms", nargs="+", type=float, default=[0.0, 1.0, 4.0, 8.0])
    parser.add_argument("--messages", type=int, default=200, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--spin", action="store_true", help="also with cores that spin")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(_serve())
        return 0
    ways = _ways(options.spin)
    child = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    try:
        port = int(child.stdout.readline())
        table = Table(title="There and back, microseconds")
        for name in ("pause ms", "cores", "p50", "p90", "p99"):
            table.add_column(name, justify="right")
        for pause in options.pauses_ms:
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(options.turns):
                for way in ways:
                    taken[way] += _turn(port, pause / 1e3, options.messages, way)
            for way, times in taken.items():
                cuts = statistics.quantiles(times, n=100)
                table.add_row(f"{pause:g}", way, *(f"{cuts[at]:.0f}" for at in (49, 89, 98)))
        Console().print(table)
    finally:
        child.stdin.close()
        child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
