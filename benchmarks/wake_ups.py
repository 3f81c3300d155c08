"""What sleeping cores cost: a message's way to another process and back, with pauses in between.

    python benchmarks/wake_ups.py

Two processes of this machine hold a gRPC stream, as a coordinator and a worker do. One sends a small message, waits for
it to come back, sleeps for the pause, and so on. Turns alternate between cores as they are and cores that are kept
awake (`--keep-cores-awake` of the roles).
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import grpc
import grpc.aio
import uvloop
from rich.console import Console
from rich.table import Table

from outrider.awake import cores_awake

_SERVICE, _METHOD = "benchmark.Echo", "Echo"


async def _echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
    async for message in requests:
        yield message


async def _serve(settle: Callable[[], None]) -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_echo)  # pyright: ignore[reportArgumentType]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settle()
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


_WAYS = "as they are", "kept awake"


@contextlib.contextmanager
def _echo_process(cores: int) -> Iterator[int]:
    """The port of a process that answers, on cores that are kept awake if any."""
    command = [sys.executable, __file__, "--serve", "--cores", str(cores)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())


def _turn(pause_s: float, count: int, cores: int) -> list[float]:
    before = os.sched_getaffinity(0)
    try:
        with (
            _echo_process(cores) as port,
            cores_awake(cores) as settle,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            settle()
            return runner.run(_measure(port, pause_s, count))
    finally:
        os.sched_setaffinity(0, before)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What sleeping cores cost a message between two processes.")
    parser.add_argument("--pauses-ms", nargs="+", type=float, default=[0.0, 1.0, 4.0, 8.0])
    parser.add_argument("--messages", type=int, default=200, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cores", type=int, default=max((os.cpu_count() or 2) // 8, 1), help="kept awake, a process")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with cores_awake(options.cores) as settle:
            uvloop.run(_serve(settle))
        return 0
    table = Table(title="There and back, microseconds")
    for name in ("pause ms", "cores", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for pause in options.pauses_ms:
        taken: dict[str, list[float]] = {way: [] for way in _WAYS}
        for _ in range(options.turns):
            for way, cores in zip(_WAYS, (0, options.cores), strict=True):
                taken[way] += _turn(pause / 1e3, options.messages, cores)
        for way, times in taken.items():
            cuts = statistics.quantiles(times, n=100)
            table.add_row(f"{pause:g}", way, *(f"{cuts[at]:.0f}" for at in (49, 89, 98)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
