"""The sum over ranks of what every rank holds in parts, through memory that the GPUs of one host share.

    letter[r]  = sum_p parts of rank r [p]                        float32, or the parts' dtype where there is one part
    returned   = letter[0], letter[1], ... letter[W - 1]          on every rank

A rank writes its letter straight into every rank's mailbox, then a number beside it, and waits for the numbers of the
others: one trip over NVLink. Whoever reads the letters adds them in the order of the ranks, in float32, as it adds the
parts of a split product on one GPU (`residual_norm`), so all ranks come to the same bits in every run.

`gather_columns` brings the columns of a matrix that ranks hold side by side to rank 0 in the same way.

    mailbox    numbers [LETTERS + LOGITS, W, PROGRAMS] int64 | inbox 0 | inbox 1 | gathered columns
               A number counts the calls of one program, and so never has to be taken back.

Two inboxes take turns: who writes a letter has had the answer to the one before, which the other rank gave after it
had read the inbox that is now written. A step must therefore exchange an even number of letters.

Shapes: W ranks, P parts, T rows, N hidden sizes, R rows and v columns of logits.
Source: one-shot all-reduce, as in TensorRT-LLM's custom all-reduce and FlashInfer's; this one sends and never fetches.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803, PLR0917

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton
from outrider.kernels.early_launch import early_options

__all__ = [
    "Mailbox",
    "MailboxLayout",
    "exchange_parts",
    "exchange_parts_reference",
    "gather_columns",
    "gather_columns_reference",
]

# Programs of a launch: each waits for its twin on the other ranks, so all must be at work at once.
PROGRAMS = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KINDS = 2  # of numbers: letters, columns


@dataclass(frozen=True, kw_only=True)
class MailboxLayout:
    """Where things lie in every rank's mailbox.

    Attributes:
        world_size: W.
        letter_bytes: of the largest letter, a multiple of 128.
        gathered_bytes: of the largest gathered matrix.
    """

    world_size: int
    letter_bytes: int
    gathered_bytes: int

    @property
    def numbers_bytes(self) -> int:
        """Of the numbers."""
        return _KINDS * self.world_size * PROGRAMS * 8

    @property
    def inbox_bytes(self) -> int:
        """Of one inbox."""
        return self.world_size * self.letter_bytes

    @property
    def total_bytes(self) -> int:
        """Of a mailbox."""
        return self.numbers_bytes + 2 * self.inbox_bytes + self.gathered_bytes

    def inbox_start(self, turn: int) -> int:
        """First byte of an inbox."""
        return self.numbers_bytes + turn * self.inbox_bytes

    @property
    def gathered_start(self) -> int:
        """First byte of the gathered columns."""
        return self.numbers_bytes + 2 * self.inbox_bytes


class Mailbox:
    """One rank's mailbox, and how it reaches the others'.

    Args:
        layout: the same on all ranks.
        rank: whose this is.
        memory: [total_bytes] uint8 on this rank's device, zeros, mapped by the other ranks.
        addresses: of every rank's memory as this rank's device sees it.
        owner: kept as long as the mailbox: what the others' memory is mapped by.

    Attributes:
        stopped: [1] int32; once it is not 0, nothing waits any more and what comes out is void.
    """

    def __init__(
        self, layout: MailboxLayout, *, rank: int, memory: torch.Tensor, addresses: Sequence[int], owner: object = None
    ) -> None:
        check_shape("memory", memory, (layout.total_bytes,))
        check_dtype("memory", memory, (torch.uint8,))
        if len(addresses) != layout.world_size:
            raise ValueError(f"addresses: {len(addresses)} given, {layout.world_size} needed")
        self.layout, self.rank, self.memory = layout, rank, memory
        starts = (0, layout.inbox_start(0), layout.inbox_start(1), layout.gathered_start)
        table = [[address + start for address in addresses] for start in starts]
        self._numbers, *inboxes, self._gathered = torch.tensor(table, dtype=torch.int64, device=memory.device)
        self._inboxes = inboxes
        self._calls = torch.zeros(_KINDS, PROGRAMS, dtype=torch.int64, device=memory.device)
        self.stopped = torch.zeros(1, dtype=torch.int32, device=memory.device)
        self._turn = 0
        self._owner = owner

    @property
    def world_size(self) -> int:
        """W."""
        return self.layout.world_size

    def takes_letter(self, parts: torch.Tensor) -> bool:
        """Whether there is room for the sum of `parts`."""
        return parts[0].numel() * parts.element_size() <= self.layout.letter_bytes

    def takes_columns(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether there is room for a matrix of all ranks' columns."""
        return rows * columns * dtype.itemsize <= self.layout.gathered_bytes


def exchange_parts(parts: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """Every rank's sum of its parts, once all ranks have called this with parts of the same size.

    Args:
        parts: [P, T, N] bfloat16, float16 or float32, each part contiguous.
        mailbox: of this rank.

    Returns:
        [W, T, N] in the dtype of `parts`, a view of the mailbox that stands until the next call but one.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, or parts larger than the mailbox takes.
    """
    check_shape("parts", parts, ("P", "T", "N"))
    check_dtype("parts", parts, _DTYPES)
    check_place("parts", parts, mailbox.memory.device, "mailbox")
    if not parts[0].is_contiguous():
        raise ValueError(f"parts: strides {parts.stride()} given, contiguous parts needed")
    if not mailbox.takes_letter(parts):
        raise ValueError(f"parts: {parts[0].numel()} numbers each given, the mailbox takes "
                         f"{mailbox.layout.letter_bytes // parts.element_size()}")  # fmt: skip
    count, world_size, turn = parts[0].numel(), mailbox.world_size, mailbox._turn
    start = mailbox.layout.inbox_start(turn)
    inbox = mailbox.memory[start : start + world_size * count * parts.element_size()].view(parts.dtype)
    mailbox._turn = 1 - turn
    if count:
        _launch_exchange(parts, inbox, mailbox, mailbox._inboxes[turn])
    return inbox.view(world_size, *parts.shape[1:])


def exchange_parts_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `exchange_parts` gives every rank when rank r calls it with parts[r], [P, T, N] each, in plain torch."""
    return torch.stack([rank_parts.float().sum(0).to(rank_parts.dtype) for rank_parts in parts])


def gather_columns(columns: torch.Tensor, mailbox: Mailbox) -> torch.Tensor:
    """The matrix of all ranks' columns at rank 0, once all ranks have called this with columns of the same size.

    Args:
        columns: [R, v] bfloat16, float16 or float32, contiguous.
        mailbox: of this rank.

    Returns:
        [R, W v], a view of the mailbox that stands until the next call; on other ranks than 0 its content is void.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, or a matrix larger than the mailbox takes.
    """
    check_shape("columns", columns, ("R", "v"))
    check_dtype("columns", columns, _DTYPES)
    check_place("columns", columns, mailbox.memory.device, "mailbox")
    if not columns.is_contiguous():
        raise ValueError(f"columns: strides {columns.stride()} given, a contiguous matrix needed")
    rows, width = columns.shape[0], columns.shape[1] * mailbox.world_size
    if not mailbox.takes_columns(rows, width, columns.dtype):
        raise ValueError(f"columns: a matrix [{rows}, {width}] asked for, the mailbox takes "
                         f"{mailbox.layout.gathered_bytes} bytes")  # fmt: skip
    start = mailbox.layout.gathered_start
    gathered = mailbox.memory[start : start + rows * width * columns.element_size()].view(columns.dtype)
    if gathered.numel():
        _launch_gather(columns, gathered, mailbox)
    return gathered.view(rows, width)


def gather_columns_reference(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `gather_columns` gives rank 0 when rank r calls it with columns[r], [R, v] each, in plain torch."""
    return torch.cat(list(columns), dim=1)


def _launch_exchange(parts: torch.Tensor, inbox: torch.Tensor, mailbox: Mailbox, addresses: torch.Tensor) -> None:
    count = parts[0].numel()
    # Small letters in many programs, for the sooner each has sent its part; large ones in 16-byte pieces a thread.
    block = 512 if count <= 512 * PROGRAMS else 2048
    programs = min(triton.cdiv(count, block), PROGRAMS)
    _exchange_kernel[(programs,)](
        parts,
        inbox,
        addresses,
        mailbox._numbers,
        mailbox.memory.view(torch.int64),
        mailbox._calls,
        mailbox.stopped,
        parts.stride(0),
        count,
        programs,
        PARTS=parts.shape[0],
        RANK=mailbox.rank,
        WORLD=mailbox.world_size,
        PROGRAMS=PROGRAMS,
        BLOCK=block,
        num_warps=4,
        **early_options(parts.device),
    )


def _launch_gather(columns: torch.Tensor, gathered: torch.Tensor, mailbox: Mailbox) -> None:
    rows, width = columns.shape
    block = 2048
    blocks = triton.cdiv(width, block)
    programs = min(rows * blocks, PROGRAMS)
    _gather_kernel[(programs,)](
        columns,
        gathered,
        mailbox._gathered,
        mailbox._numbers,
        mailbox.memory.view(torch.int64),
        mailbox._calls,
        mailbox.stopped,
        rows,
        width,
        blocks,
        programs,
        RANK=mailbox.rank,
        WORLD=mailbox.world_size,
        PROGRAMS=PROGRAMS,
        BLOCK=block,
        num_warps=4,
        **early_options(columns.device),
    )


@jit(do_not_specialize=["programs"])
def _exchange_kernel(
    parts_ptr,  # [PARTS, count]
    inbox_ptr,  # [WORLD, count], of this rank
    addresses_ptr,  # [WORLD] int64, of every rank's inbox
    number_addresses_ptr,  # [WORLD] int64, of every rank's numbers
    numbers_ptr,  # [kinds, WORLD, PROGRAMS] int64, of this rank
    calls_ptr,  # [kinds, PROGRAMS] int64
    stopped_ptr,  # [1] int32
    part_stride,
    count,
    programs,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = programs * BLOCK
    for start in range(program * BLOCK, count, step):
        place = start + tl.arange(0, BLOCK)
        kept = place < count
        if PARTS == 1:
            letter = tl.load(parts_ptr + place, mask=kept)
        else:
            total = tl.load(parts_ptr + place, mask=kept, other=0).to(tl.float32)
            part_ptr = parts_ptr
            for _ in tl.static_range(PARTS - 1):
                part_ptr += part_stride
                total += tl.load(part_ptr + place, mask=kept, other=0).to(tl.float32)
            letter = total.to(inbox_ptr.dtype.element_ty)
        for rank in tl.static_range(WORLD):
            inbox = tl.load(addresses_ptr + rank).to(inbox_ptr.dtype)
            inbox = tl.multiple_of(inbox, 16)
            tl.store(inbox + RANK * count.to(tl.int64) + place, letter, mask=kept)
    _announce_and_wait(number_addresses_ptr, numbers_ptr, calls_ptr, stopped_ptr, program, RANK, WORLD, PROGRAMS, WORLD)


@jit(do_not_specialize=["rows", "programs"])
def _gather_kernel(
    columns_ptr,  # [rows, width]
    gathered_ptr,  # [rows, WORLD width], of this rank
    addresses_ptr,  # [WORLD] int64, of every rank's gathered columns
    number_addresses_ptr,  # [WORLD] int64, of every rank's numbers
    numbers_ptr,  # [kinds, WORLD, PROGRAMS] int64, of this rank
    calls_ptr,  # [kinds, PROGRAMS] int64
    stopped_ptr,  # [1] int32
    rows,
    width,
    blocks,
    programs,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gathered = tl.multiple_of(tl.load(addresses_ptr).to(gathered_ptr.dtype), 16)
    for tile in range(program, rows * blocks, programs):
        row = (tile // blocks).to(tl.int64)
        column = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        kept = column < width
        values = tl.load(columns_ptr + row * width + column, mask=kept)
        tl.store(gathered + (row * WORLD + RANK) * width + column, values, mask=kept)
    # The second kind of numbers; rank 0 alone is told, and waits.
    _announce_and_wait(
        number_addresses_ptr,
        numbers_ptr + WORLD * PROGRAMS,
        calls_ptr + PROGRAMS,
        stopped_ptr,
        program,
        RANK,
        WORLD,
        PROGRAMS,
        1,
    )


@jit
def _announce_and_wait(
    number_addresses_ptr,  # [WORLD] int64
    numbers_ptr,  # [WORLD, PROGRAMS] int64
    calls_ptr,  # [PROGRAMS] int64
    stopped_ptr,  # [1] int32
    program,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    RECEIVERS: tl.constexpr,
):
    """Tells the same program of the first RECEIVERS ranks that what it wrote there is complete; these wait for all."""
    call = tl.load(calls_ptr + program) + 1
    done = call
    # Every thread's stores come before the one thread's release below.
    tl.debug_barrier()
    own = tl.load(number_addresses_ptr + RANK)
    for rank in tl.static_range(RECEIVERS):
        if rank != RANK:
            # The place of these numbers is the same at every rank.
            there = tl.load(number_addresses_ptr + rank) + (numbers_ptr.to(tl.int64) - own)
            number = there.to(numbers_ptr.dtype) + RANK * PROGRAMS + program
            tl.atomic_xchg(number, call, sem="release", scope="sys")
    if RANK < RECEIVERS:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                number = numbers_ptr + rank * PROGRAMS + program
                seen = tl.load(number, volatile=True)
                stopped = tl.load(stopped_ptr, volatile=True)
                while (seen < call) & (stopped == 0):
                    seen = tl.load(number, volatile=True)
                    stopped = tl.load(stopped_ptr, volatile=True)
                # What was written before that number is read after it. The answer is used, or it would be left out.
                done = tl.minimum(done, tl.atomic_add(number, 0, sem="acquire", scope="sys"))
    tl.store(calls_ptr + program, done)
