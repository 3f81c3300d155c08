"""What a sum over ranks takes by its size: through mailboxes, through NCCL, and through torch's symmetric memory.

Each is captured many times in one CUDA graph, as in a model's step; every rank replays its graph at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outrider.engine.tensor_parallel_collectives import CudaCollectives, Meeting, SumOptions, connect
from outrider.kernels.all_reduce import exchange_parts, exchange_parts_reference

_COPIES = 64
_LETTER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """[parts, rows, hidden] of `dtype`; as a decoder's products give them."""

    rows: int
    hidden: int
    parts: int
    dtype: torch.dtype


def sizes(hidden: Sequence[int]) -> list[Size]:
    """Few rows in split products, float32; many in whole ones, bfloat16."""
    return [
        Size(rows=rows, hidden=width, parts=2 if rows <= 64 else 1,
             dtype=torch.float32 if rows <= 64 else torch.bfloat16)
        for width in hidden for rows in (1, 8, 64, 256, 512, 1024, 2048)
    ]  # fmt: skip


def measure_exchange(ranks: int, wanted: Sequence[Size]) -> list[dict[str, Any]]:
    """Microseconds of one sum, by way; this process is rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        others = [
            context.Process(target=_measure, args=(Meeting(rank=rank, world_size=ranks, store_path=store), wanted))
            for rank in range(1, ranks)
        ]
        for other in others:
            other.start()
        try:
            return _measure(Meeting(rank=0, world_size=ranks, store_path=store), wanted)
        finally:
            for other in others:
                other.join(10)
                other.kill()


def _measure(meeting: Meeting, wanted: Sequence[Size]) -> list[dict[str, Any]]:
    device = torch.device("cuda", meeting.rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = SumOptions(letter_bytes=_LETTER_BYTES, gathered_bytes=64 << 20, hidden_size=0, dtype=torch.bfloat16)
    collectives = connect(meeting, device, options)
    assert isinstance(collectives, CudaCollectives)
    rows = []
    with torch.inference_mode():
        for size in wanted:
            rows.append(_measure_size(collectives, size, device))
        rows.append(_measure_logits(collectives, device))
    torch.cuda.synchronize()
    dist.barrier()
    collectives.close()
    return rows


def _measure_size(collectives: CudaCollectives, size: Size, device: torch.device) -> dict[str, Any]:
    # As in the service; read where the memory is made.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as symmetric_memory

    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (size.parts, size.rows, size.hidden)
    parts = torch.randn(shape, device=device, generator=generator).to(size.dtype)
    row: dict[str, Any] = {"rows": size.rows, "hidden": size.hidden, "dtype": str(size.dtype)[6:]}
    mailbox = collectives.mailbox
    if mailbox is not None and mailbox.takes_letter(parts[0].numel(), parts.dtype):
        row["right"] = _is_right(parts, exchange_parts(parts, mailbox), exchange_parts(parts, mailbox))
        row["mailbox"] = _time_us(lambda: exchange_parts(parts, mailbox))
        small_most = mailbox.small_most
        if parts[0].numel() <= small_most:
            # As large letters go.
            mailbox.small_most = 0
            row["as large"] = _time_us(lambda: exchange_parts(parts, mailbox))
        mailbox.small_most = small_most
        if size.dtype == torch.float32:
            row["rounded"] = _time_us(lambda: exchange_parts(parts, mailbox, torch.bfloat16))
    total = parts.sum(0).zero_()
    row["nccl"] = _time_us(lambda: dist.all_reduce(total if size.parts == 1 else torch.sum(parts, 0, out=total)))
    group = dist.distributed_c10d._get_default_group()
    buffer = symmetric_memory.empty(size.rows, size.hidden, dtype=size.dtype, device=device)
    symmetric_memory.rendezvous(buffer, group)
    for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
        operator = getattr(torch.ops.symm_mem, name)
        try:
            row[name.removesuffix("_all_reduce_").removesuffix("_all_reduce")] = _time_us(
                lambda operator=operator: operator(buffer.copy_(parts[0]), "sum", group.group_name)
            )
        except RuntimeError as error:
            row[name] = str(error).splitlines()[0][:60]
    return row


def _is_right(parts: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Both answers hold what all ranks gave, bit for bit."""
    given = [torch.empty_like(parts) for _ in range(dist.get_world_size())]
    dist.all_gather(given, parts)
    wanted = exchange_parts_reference(given)
    return torch.equal(first, wanted) and torch.equal(second, wanted)


def _measure_logits(collectives: CudaCollectives, device: torch.device) -> dict[str, Any]:
    logits = torch.randn(64, 128_256 // dist.get_world_size(), device=device).to(torch.bfloat16)
    mailbox, row = collectives.mailbox, {"rows": 64, "hidden": 128_256, "dtype": "logits"}
    given = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(given, logits)
    gathered = collectives.gather_logits(logits)
    row["right"] = dist.get_rank() > 0 or torch.equal(gathered, torch.cat(given, 1))
    row["mailbox"] = _time_us(lambda: collectives.gather_logits(logits))
    collectives.mailbox = None
    row["nccl"] = _time_us(lambda: collectives.gather_logits(logits))
    collectives.mailbox = mailbox
    return row


def _time_us(run: Callable[[], object]) -> float:
    """Median over replays of a graph of many runs, each begun by all ranks at once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_COPIES):
            run()
    times = []
    for _ in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / _COPIES)
    return statistics.median(times[1:])
