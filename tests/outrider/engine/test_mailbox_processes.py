"""The exchange through mailboxes between real processes that share one GPU, and take turns on it.

NCCL refuses two ranks on one device, so these meet over gloo. What is ours is as on two GPUs: handles through the
store, memory of another process, kernels that wait for each other, graphs.

This file is also the program of a rank: `python test_mailbox_processes.py RANK FOLDER`.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage] - documented, not exported

from outrider.engine.tensor_parallel_collectives import (
    CudaCollectives,
    Meeting,
    SumOptions,
    _handle_key,
    _packed,
    _storages_of_all,
    _unpacked,
    share_mailboxes,
)
from outrider.kernels.collectives.all_reduce import exchange_parts_reference, gather_columns_reference
from outrider.kernels.collectives.all_reduce_norm import exchange_norm_reference
from outrider.kernels.linear.residual_norm import residual_norm_reference

# Starting, compiling and exchanging take a small part of it, even where other tests use the GPU and all cores.
_RANK_S = 150.0
# Until a rank that has said where it hangs is gone.
_END_S = 30.0
_EAGER_CALLS, _REPLAYS = 3, 3
_LAG_CYCLES = 20_000_000
_HIDDEN, _EPS = 256, 1e-5
_DEVICE = torch.device("cuda", 0)
# Letters of up to 65,536 numbers are small; float32 ones above that are rounded, but for `fixed` sums.
_OPTIONS = SumOptions(letter_bytes=1 << 19, gathered_bytes=3 << 19, hidden_size=_HIDDEN, dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Data of a rank, [P, T, N] or logits [R, v], and its kind of sum: by `SumOptions.fixed`, by a normed sum."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fixed: bool = False
    norms_addend: bool = False


# A step exchanges an even number of letters (10: three of pieces, two of norms not fused) and of rows (2).
_SUMS = {
    "few float32": Held(shape=(2, 3, 209), dtype=torch.float32),
    "few bfloat16": Held(shape=(1, 3, 208), dtype=torch.bfloat16),
    "many float32": Held(shape=(2, 96, 1024), dtype=torch.float32),
    "many bfloat16": Held(shape=(1, 96, 1024), dtype=torch.bfloat16),
    "many float32, fixed": Held(shape=(2, 96, 1024), dtype=torch.float32, fixed=True),
    "three pieces, fixed": Held(shape=(1, 300, 1024), dtype=torch.float32, fixed=True),
}
_NORMS = {
    "one row": Held(shape=(2, 1, _HIDDEN), dtype=torch.float32),
    "few rows": Held(shape=(2, 3, _HIDDEN), dtype=torch.float32),
    "72 rows": Held(shape=(1, 72, _HIDDEN), dtype=torch.bfloat16, norms_addend=True),
    "73 rows": Held(shape=(1, 73, _HIDDEN), dtype=torch.bfloat16),
}
_FUSED = ("few rows", "72 rows")
_LOGITS = {
    "few logits": Held(shape=(5, 48), dtype=torch.bfloat16),
    "many logits": Held(shape=(64, 3000), dtype=torch.float32),
}


def _numbers(held: Held, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(held.shape, generator=generator).to(held.dtype)


def _inputs(rank: int, call: int) -> dict[str, torch.Tensor]:
    """Return what a rank adds or gathers in a call, by name; on the CPU, equal in every process."""
    generator = torch.Generator().manual_seed(2 * call + rank)
    return {name: _numbers(held, generator) for name, held in (_SUMS | _NORMS | _LOGITS).items()}


def _hidden_rows(call: int) -> dict[str, torch.Tensor]:
    """[T, N] bfloat16 of both ranks before each sum that is normed."""
    generator = torch.Generator().manual_seed(1000 + call)
    rows = {name: replace(held, shape=held.shape[1:], dtype=torch.bfloat16) for name, held in _NORMS.items()}
    return {name: _numbers(held, generator) for name, held in rows.items()}


def _too_large(rank: int) -> torch.Tensor:
    """[2, T, N] float32 that a mailbox has no room for."""
    return torch.randn(2, 300, 1024, generator=torch.Generator().manual_seed(rank))


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """[N] twice: of the norm, and of the norm of the sum."""
    weight, addend_weight = torch.rand(2, _HIDDEN, generator=torch.Generator().manual_seed(7)) + 0.5
    return weight, addend_weight


class _Rank:
    """One of the two processes.

    Args:
        rank: 0 or 1.
        store: both processes'.
        collectives: of this process.
    """

    def __init__(self, rank: int, store: FileStore, collectives: CudaCollectives) -> None:
        self.rank, self.store, self.collectives = rank, store, collectives
        self.fixed = CudaCollectives(collectives.mailbox, replace(_OPTIONS, fixed=True))
        self.weight, self.addend_weight = (weight.to(_DEVICE) for weight in _weights())
        self.held = _on_device(_inputs(rank, 0))
        self.hidden = _on_device(_hidden_rows(0))

    def step(self) -> dict[str, torch.Tensor]:
        """All exchanges. Letters come between two gathers, as in a model: both are gathered in the same place."""
        found = {}
        for name, held in _SUMS.items():
            # What came stands until the next call but one.
            found[name] = (self.fixed if held.fixed else self.collectives).all_reduce(self.held[name]).clone()
        found["few logits"] = self.collectives.gather_logits(self.held["few logits"]).clone()
        for name, held in _NORMS.items():
            hidden = self.hidden[name].clone()
            found[name] = self.collectives.sum_norm(
                hidden,
                self.held[name],
                self.weight,
                eps=_EPS,
                addend_weight=self.addend_weight if held.norms_addend else None,
            )
            found[f"{name}, hidden"] = hidden
        found["many logits"] = self.collectives.gather_logits(self.held["many logits"]).clone()
        return found

    def call(self, call: int, step: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the results of a step on the data of a call."""
        for there, here in ((self.held, _inputs(self.rank, call)), (self.hidden, _hidden_rows(call))):
            for name, numbers in here.items():
                there[name].copy_(numbers)
        # Each rank in turn comes late.
        if call % 2 == self.rank:
            torch.cuda._sleep(_LAG_CYCLES)
        return {name: numbers.cpu() for name, numbers in step().items()}

    def run(self) -> dict[str, Any]:
        """Calls without a graph, then in one; what is too large for the mailbox; and a wait that is aborted."""
        calls = [self.call(call, self.step) for call in range(_EAGER_CALLS)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = self.step()

        def replay() -> dict[str, torch.Tensor]:
            graph.replay()
            return captured

        calls += [self.call(call, replay) for call in range(_EAGER_CALLS, _EAGER_CALLS + _REPLAYS)]
        return {
            "calls": calls,
            "too large": self.collectives.all_reduce(_too_large(self.rank).to(_DEVICE)).cpu(),
            "waited": self.abort(graph),
        }

    def abort(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Return True if rank 0 waits in a step that rank 1 never makes, and returns only because it is aborted."""
        if self.rank == 1:
            self.store.get("rank 0 was let go")
            return True
        # Nothing is allocated while kernels wait: the event is there before, and the graph has all of its memory.
        done = torch.cuda.Event()
        done.record()
        torch.cuda.synchronize()
        graph.replay()
        done.record()
        time.sleep(1)
        waited = not done.query()
        with ThreadPoolExecutor(1) as thread:
            aborted = thread.submit(self.collectives.abort)
            done.synchronize()
            aborted.result()
        self.store.set("rank 0 was let go", "")
        return waited


def _on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(_DEVICE) for name, tensor in tensors.items()}


def _check_handles() -> None:
    """A real handle stands its way as text; a rank that has none is named."""
    storage = torch.ones(1000, device=_DEVICE).untyped_storage()
    handle = storage._share_cuda_()
    assert _unpacked(_packed(handle)) == list(handle)
    store = HashStore()
    store.set(_handle_key(1), "")
    with pytest.raises(RuntimeError, match="rank 1 has none to share"):
        _storages_of_all(storage, Meeting(rank=0, world_size=2, store_path=""), store, _DEVICE)


def _run_rank(rank: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(_RANK_S, exit=True)
    faulthandler.register(signal.SIGTERM, chain=True)
    torch.cuda.set_device(_DEVICE)
    _check_handles()
    meeting = Meeting(rank=rank, world_size=2, store_path=str(folder / "store"))
    store = FileStore(meeting.store_path, meeting.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=meeting.world_size)
    collectives = share_mailboxes(meeting, store, _DEVICE, _OPTIONS)
    assert collectives.mailbox is not None, "this machine does not map one process's GPU memory into another"
    torch.save(_Rank(rank, store, collectives).run(), folder / f"rank-{rank}.pt")
    collectives.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the findings of each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_started(rank, folder)) for rank in range(2)]
        deadline = time.monotonic() + _RANK_S + _END_S
        codes: list[int | None] = [None, None]
        # Where one has failed, the other would wait for it.
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    # None: it was still at work, and has been ended here.
    said = [f"rank {rank}, exit code {code}:\n{_log(rank, folder).read_text()}" for rank, code in enumerate(codes)]
    assert codes == [0, 0], "\n".join(said)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


def _log(rank: int, folder: Path) -> Path:
    return folder / f"rank-{rank}.txt"


@contextlib.contextmanager
def _started(rank: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [sys.executable, __file__, str(rank), str(folder)]
    with (
        _log(rank, folder).open("wb") as log,
        subprocess.Popen(arguments, stdout=log, stderr=log, env=environment) as process,
    ):
        yield process
        # It says where it is.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()


def _both_inputs(call: int) -> list[dict[str, torch.Tensor]]:
    return [_inputs(rank, call) for rank in range(2)]


def _assert_same_bits(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_both_ranks_get_all_letters_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for call in range(_EAGER_CALLS + _REPLAYS):
        inputs = _both_inputs(call)
        for name, held in _SUMS.items():
            dtype = torch.bfloat16 if name == "many float32" else held.dtype
            wanted = exchange_parts_reference([given[name] for given in inputs], dtype)
            for rank, found in enumerate(ranks):
                _assert_same_bits(found["calls"][call][name], wanted, f"{name}, call {call}, rank {rank}")
    first, second = (_too_large(rank).sum(0, keepdim=True) for rank in range(2))
    for rank, found in enumerate(ranks):
        _assert_same_bits(found["too large"], first + second, f"too large, rank {rank}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_both_ranks_norm_the_sum_alike(ranks: list[dict[str, Any]]) -> None:
    weight, addend_weight = _weights()
    for call in range(_EAGER_CALLS + _REPLAYS):
        inputs, hidden_rows = _both_inputs(call), _hidden_rows(call)
        for name, held in _NORMS.items():
            hidden, parts = hidden_rows[name], [given[name] for given in inputs]
            by = addend_weight if held.norms_addend else None
            if name in _FUSED:
                wanted = exchange_norm_reference(hidden, parts, weight, eps=_EPS, addend_weight=by)
            else:
                letters = exchange_parts_reference(parts)
                wanted = residual_norm_reference(hidden, letters, weight, eps=_EPS, addend_weight=by)
            first, second = (found["calls"][call] for found in ranks)
            for part in (name, f"{name}, hidden"):
                _assert_same_bits(second[part], first[part], f"{part}, call {call}, of both ranks")
            if by is None:
                _assert_same_bits(first[f"{name}, hidden"], hidden, f"{name}, hidden, call {call}")
            # A bit of bfloat16 where the sums of squares were added in another order, two where the sum was normed.
            torch.testing.assert_close(first[f"{name}, hidden"], hidden, rtol=2e-2, atol=1e-3)
            torch.testing.assert_close(first[name], wanted, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rank_0_gets_all_columns(ranks: list[dict[str, Any]]) -> None:
    for call in range(_EAGER_CALLS + _REPLAYS):
        inputs = _both_inputs(call)
        for name in _LOGITS:
            wanted = gather_columns_reference([given[name] for given in inputs])
            _assert_same_bits(ranks[0]["calls"][call][name], wanted, f"{name}, call {call}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rank_waits_for_the_other_until_it_is_aborted(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["waited"]


def test_a_handle_stands_its_way_as_text() -> None:
    handle = (0, bytes(range(256)), 3 << 20, 512, b"/torch_1_2_3", 7, b"", True)
    assert _unpacked(_packed(handle)) == list(handle)
    # True is 1, and CUDA's side takes no 1 for it.
    assert _unpacked(_packed(handle))[-1] is True


def test_a_rank_that_cannot_share_its_memory_keeps_nobody_waiting() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError):
        _storages_of_all(
            torch.UntypedStorage(8), Meeting(rank=1, world_size=2, store_path=""), store, torch.device("cpu")
        )
    assert store.get(_handle_key(1)) == b""


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), Path(sys.argv[2]))
