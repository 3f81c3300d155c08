"""Collectives of a tensor-parallel forward: sums of hidden rows, gathered logits.

On GPUs what fits goes through mailboxes that the GPUs write into directly (`outrider.kernels.collectives.all_reduce`);
the rest goes through NCCL. NVLink multicast stays off in both. On a CPU everything goes through gloo.

Shapes: W ranks, P parts, T rows, N hidden, R rows of logits, v columns of a rank.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented, not exported

from outrider.kernels.collectives.all_reduce import Mailbox, MailboxLayout, exchange_parts, gather_columns
from outrider.kernels.collectives.all_reduce_norm import exchange_norm
from outrider.kernels.linear.residual_norm import residual_norm

logger = logging.getLogger(__name__)

# What is waited for is watched by `outrider.engine.tensor_parallel_leader`; this only ends ranks that nobody watches.
_TIMEOUT = timedelta(minutes=30)
_ALIGNMENT = 128
# Rows that are summed and normed in one launch: those of a step of one large tree.
_FEW_ROWS = 72
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
# Otherwise torch ends the process where NCCL notices a lost rank, before anybody has said which.
_NO_ABORT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
# One host: what ranks say while they connect never leaves it.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Rendezvous of the ranks."""

    rank: int  # of this process, 0 to world_size - 1
    world_size: int
    store_path: str  # a file on this host, new for every group, in a folder that only its user may enter


@dataclass(frozen=True, kw_only=True)
class SumOptions:
    """Options of the collectives, equal on all ranks."""

    letter_bytes: int  # of the largest sum that goes through mailboxes; none with 0
    gathered_bytes: int  # of the largest matrix of logits that does
    hidden_size: int  # N
    dtype: torch.dtype  # of the hidden rows: sums may be rounded to it on their way
    # Every sum in one order and unrounded, however many rows: what does not fit is sent in pieces.
    fixed: bool = False


class Collectives:
    """Sums and exchanges of a `Decoder` with other ranks; on a CPU by gloo, over the loopback interface."""

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """[P, T, N] of this rank to parts [P', T, N] that add up to the sum over ranks, the same bits on every rank."""
        total = addend[0].contiguous() if len(addend) == 1 else addend.sum(0)
        letters = [torch.empty_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(letters, total)
        return torch.stack(letters)

    def sum_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        addend_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual_norm` with the sum over ranks of `addend`."""
        return residual_norm(hidden, self.all_reduce(addend), weight, eps=eps, addend_weight=addend_weight)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, v] of this rank to [R, W v] of all, in their order, at rank 0."""
        parts = logits.new_empty(dist.get_world_size(), *logits.shape)
        dist.all_gather(list(parts), logits.contiguous())
        return parts.transpose(0, 1).reshape(len(logits), -1)

    def broadcast(self, words: torch.Tensor) -> None:
        """Write rank 0's words into those of every other rank."""
        dist.broadcast(words, 0)

    def abort(self) -> None:
        """Let go whoever waits for a rank that is gone; what comes out is void. Any thread may call it.

        Gloo itself notices a rank that is gone.
        """

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(meeting: Meeting, device: torch.device, options: SumOptions) -> Collectives:
    """Join the process group and return its collectives."""
    os.environ.update(_NO_MULTICAST | _NO_ABORT)
    for name, value in _LOOPBACK.items():
        os.environ.setdefault(name, value)
    store = FileStore(meeting.store_path, meeting.world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cpu":
        return Collectives()
    # The first collective makes the communicator, which must not happen in a capture.
    dist.all_reduce(torch.zeros(1, device=device))
    return share_mailboxes(meeting, store, device, options)


def share_mailboxes(meeting: Meeting, store: Store, device: torch.device, options: SumOptions) -> "CudaCollectives":
    """Return the collectives of GPU ranks that are in one process group, whatever its backend.

    Args:
        meeting: where they have joined each other.
        device: of this rank, with its index; two ranks may have one GPU.
    """
    layout = MailboxLayout(
        world_size=meeting.world_size,
        letter_bytes=_aligned(options.letter_bytes),
        gathered_bytes=_aligned(options.gathered_bytes),
        row_size=options.hidden_size,
        row_counts=_FEW_ROWS,
    )
    return CudaCollectives(_mailbox(layout, meeting, store, device) if options.letter_bytes else None, options)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _mailbox(layout: MailboxLayout, meeting: Meeting, store: Store, device: torch.device) -> Mailbox | None:
    """Return this rank's mailbox, or None on all ranks if one of them cannot reach another's memory."""
    memory = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    mailbox = None
    try:
        storages = _storages_of_all(memory.untyped_storage(), meeting, store, device)
        addresses = [storage.data_ptr() for storage in storages]
        mailbox = Mailbox(layout, rank=meeting.rank, memory=memory, addresses=addresses, owner=storages)
    except RuntimeError as error:
        logger.warning("rank %d cannot share memory with the other GPUs, NCCL alone is used: %s", meeting.rank, error)
    willing = torch.tensor(int(mailbox is not None), device=device)
    dist.all_reduce(willing, dist.ReduceOp.MIN)
    torch.cuda.synchronize(device)
    return mailbox if int(willing) else None


def _storages_of_all(
    own: torch.UntypedStorage, meeting: Meeting, store: Store, device: torch.device
) -> list[torch.UntypedStorage]:
    """[W] the ranks' storages by CUDA's inter-process handles, the others' mapped for this rank's GPU.

    torch's symmetric memory would be the public way. It counts the meetings of each process, and where one rank has had
    more than another, such as a second model in its process, all of them wait for five minutes and then fail.

    Raises:
        RuntimeError: a rank's memory cannot be shared, or not be mapped.
    """
    try:
        handle = _packed(own._share_cuda_())
    except RuntimeError:
        # The others need not wait for it.
        store.set(_handle_key(meeting.rank), "")
        raise
    store.set(_handle_key(meeting.rank), handle)
    storages = []
    for rank in range(meeting.world_size):
        if rank == meeting.rank:
            storages.append(own)
        elif handle := store.get(_handle_key(rank)).decode():
            # The first entry is the owner's GPU: mapped for that one, a second context would be made there.
            _, *others = _unpacked(handle)
            storages.append(torch.UntypedStorage._new_shared_cuda(device.index, *others))
        else:
            raise RuntimeError(f"rank {rank} has none to share")
    return storages


def _packed(parts: Sequence[int | bytes]) -> str:
    """A handle as text."""
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in parts])


def _unpacked(handle: str) -> list[int | bytes]:
    return [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(handle)]


def _handle_key(rank: int) -> str:
    return f"mailbox of rank {rank}"


class CudaCollectives(Collectives):
    """Mailboxes for what fits, NCCL for the rest. Nothing waits on the host: a graph may capture all of it.

    Args:
        mailbox: of this rank; None where GPUs cannot reach each other's memory.
    """

    def __init__(self, mailbox: Mailbox | None, options: SumOptions) -> None:
        self.mailbox, self._options = mailbox, options
        self._world_size = dist.get_world_size()
        # A copy on a stream of its own: while kernels wait, nothing that needs the device to come to rest gets through.
        self._stream = torch.cuda.Stream()
        self._stop = torch.ones(1, dtype=torch.int32).pin_memory()

    def all_reduce(self, addend: torch.Tensor) -> torch.Tensor:
        """[P, T, N] of this rank to [W, T, N] through mailboxes, [1, T, N] through NCCL."""
        if self.mailbox is not None:
            dtype = self._letter_dtype(addend)
            if self.mailbox.takes_letter(addend[0].numel(), dtype):
                return exchange_parts(addend, self.mailbox, dtype)
            if self._options.fixed:
                rows = self.mailbox.layout.letter_bytes // (addend.shape[2] * dtype.itemsize)
                pieces = (piece.contiguous() for piece in addend.split(rows, dim=1))
                # A piece is copied before its inbox is written again.
                return torch.cat([exchange_parts(piece, self.mailbox).clone() for piece in pieces], dim=1)
        total = addend[0] if len(addend) == 1 else addend.sum(0)
        dist.all_reduce(total)
        return total[None]

    def sum_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        addend_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual_norm` with the sum over ranks of `addend`; of few rows in one launch."""
        # One row alone was faster in two launches on H200s: its sum in 32 programs, then the norm.
        fuses = len(hidden) > 1 and hidden.element_size() == 2 and not self._options.fixed
        if fuses and self.mailbox is not None and self.mailbox.takes_rows(*hidden.shape):
            return exchange_norm(hidden, addend, weight, self.mailbox, eps=eps, addend_weight=addend_weight)
        return super().sum_norm(hidden, addend, weight, eps=eps, addend_weight=addend_weight)

    def _letter_dtype(self, addend: torch.Tensor) -> torch.dtype:
        """Few numbers travel as they are: what they take is not the wires' time."""
        assert self.mailbox is not None
        whole = self._options.fixed or addend[0].numel() <= self.mailbox.small_most
        return addend.dtype if whole else self._options.dtype

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, v] of this rank to [R, W v] of all, in their order, at rank 0."""
        rows, columns = logits.shape
        width = columns * self._world_size
        if self.mailbox is not None and self.mailbox.takes_columns(rows, width, logits.dtype):
            return gather_columns(logits.contiguous(), self.mailbox)
        return super().gather_logits(logits)

    def abort(self) -> None:
        """Set the word that waiting kernels look at, and end NCCL's communicator."""
        if self.mailbox is not None:
            with torch.cuda.stream(self._stream):
                self.mailbox.stopped.copy_(self._stop, non_blocking=True)
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
