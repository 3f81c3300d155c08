"""Triton side of `outrider.kernels.collectives.all_reduce`, whose terms and conventions hold here."""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import torch

from outrider.kernels.backend import jit, tl, triton
from outrider.kernels.collectives.mailbox import COUNT_KINDS, PROGRAMS, Inbox, Mailbox
from outrider.kernels.early_launch import early_options

__all__ = ["launch_exchange", "launch_gather"]

# Of small letters always as many: they all count the same calls, and a word's count says which call wrote it.
_SMALL_PROGRAMS = 32


def launch_exchange(parts: torch.Tensor, inbox: Inbox, mailbox: Mailbox) -> None:
    """`exchange_parts` of checked arguments."""
    count = parts[0].numel()
    options = {"PARTS": parts.shape[0], "RANK": mailbox.rank, "WORLD": mailbox.world_size, "num_warps": 4}
    if inbox.words is not None:
        _small_kernel[(_SMALL_PROGRAMS,)](
            parts,
            inbox.letters,
            inbox.words,
            inbox.addresses,
            mailbox.calls[COUNT_KINDS],
            mailbox.stopped,
            parts.stride(0),
            count,
            BLOCK=max(triton.next_power_of_2(triton.cdiv(count, _SMALL_PROGRAMS)), 128),
            **options,
            **early_options(parts.device),
        )
        return
    block = 512 if count <= 512 * PROGRAMS else 2048
    programs = min(triton.cdiv(count, block), PROGRAMS)
    _exchange_kernel[(programs,)](
        parts,
        inbox.letters,
        inbox.addresses,
        mailbox.count_addresses,
        mailbox.counts,
        mailbox.calls,
        mailbox.stopped,
        parts.stride(0),
        count,
        programs,
        PROGRAMS=PROGRAMS,
        BLOCK=block,
        **options,
        **early_options(parts.device),
    )


def launch_gather(columns: torch.Tensor, gathered: torch.Tensor, mailbox: Mailbox) -> None:
    """`gather_columns` of checked arguments."""
    rows, width = columns.shape
    block = 2048
    blocks = triton.cdiv(width, block)
    programs = min(rows * blocks, PROGRAMS)
    _gather_kernel[(programs,)](
        columns,
        gathered,
        mailbox.gathered_addresses,
        mailbox.count_addresses,
        mailbox.counts,
        mailbox.calls,
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


@jit
def _small_kernel(
    parts_ptr,  # [PARTS, count]
    letters_ptr,  # [WORLD, count], of this rank
    words_ptr,  # [WORLD, count] int64, of this rank
    addresses_ptr,  # [WORLD] int64, of every rank's words
    calls_ptr,  # [programs] int64
    stopped_ptr,  # [1] int32
    part_stride,
    count,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    kept = place < count
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    call = tl.load(calls_ptr + program) + 1
    letter = _letter(parts_ptr, place, kept, part_stride, PARTS).to(letters_ptr.dtype.element_ty)
    # The count of the call above the number's bits; eight bytes are written and read as one.
    word = (call << 32) | (letter.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            there = tl.multiple_of(tl.load(addresses_ptr + rank).to(words_ptr.dtype), 16)
            tl.store(there + RANK * count.to(tl.int64) + place, word, mask=kept)
    tl.store(letters_ptr + RANK * count.to(tl.int64) + place, letter, mask=kept)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            here = words_ptr + rank * count.to(tl.int64) + place
            word = tl.load(here, mask=kept, other=0, volatile=True)
            late = tl.max((kept & ((word ^ (call << 32)) >> 32 != 0)).to(tl.int32))
            stopped = tl.load(stopped_ptr, volatile=True)
            while (late != 0) & (stopped == 0):
                word = tl.load(here, mask=kept, other=0, volatile=True)
                late = tl.max((kept & ((word ^ (call << 32)) >> 32 != 0)).to(tl.int32))
                stopped = tl.load(stopped_ptr, volatile=True)
            number = (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
            number = number.to(letters_ptr.dtype.element_ty)
            tl.store(letters_ptr + rank * count.to(tl.int64) + place, number, mask=kept)
    tl.store(calls_ptr + program, call)


@jit
def _letter(parts_ptr, place, kept, part_stride, PARTS: tl.constexpr):
    """The sum of a block of all parts; of one part, the part as it is."""
    letter = tl.load(parts_ptr + place, mask=kept, other=0)
    if PARTS > 1:
        letter = letter.to(tl.float32)
        part_ptr = parts_ptr
        for _ in tl.static_range(PARTS - 1):
            part_ptr += part_stride
            letter += tl.load(part_ptr + place, mask=kept, other=0).to(tl.float32)
    return letter


@jit(do_not_specialize=["programs"])
def _exchange_kernel(
    parts_ptr,  # [PARTS, count]
    letters_ptr,  # [WORLD, count], of this rank
    addresses_ptr,  # [WORLD] int64, of every rank's letters
    count_addresses_ptr,  # [WORLD] int64, of every rank's counts
    counts_ptr,  # [kinds, WORLD, PROGRAMS] int64, of this rank
    calls_ptr,  # [kinds + 1, PROGRAMS] int64
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
        letter = _letter(parts_ptr, place, kept, part_stride, PARTS).to(letters_ptr.dtype.element_ty)
        for rank in tl.static_range(WORLD):
            there = tl.multiple_of(tl.load(addresses_ptr + rank).to(letters_ptr.dtype), 16)
            tl.store(there + RANK * count.to(tl.int64) + place, letter, mask=kept)
    _announce_and_wait(count_addresses_ptr, counts_ptr, calls_ptr, stopped_ptr, program, RANK, WORLD, PROGRAMS, WORLD)


@jit(do_not_specialize=["rows", "programs"])
def _gather_kernel(
    columns_ptr,  # [rows, width]
    gathered_ptr,  # [rows, WORLD width], of this rank
    addresses_ptr,  # [WORLD] int64, of every rank's gathered columns
    count_addresses_ptr,  # [WORLD] int64, of every rank's counts
    counts_ptr,  # [kinds, WORLD, PROGRAMS] int64, of this rank
    calls_ptr,  # [kinds + 1, PROGRAMS] int64
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
    # The second kind of counts; rank 0 alone is told, and waits.
    counts_ptr += WORLD * PROGRAMS
    calls_ptr += PROGRAMS
    _announce_and_wait(count_addresses_ptr, counts_ptr, calls_ptr, stopped_ptr, program, RANK, WORLD, PROGRAMS, 1)


@jit
def _announce_and_wait(
    count_addresses_ptr,  # [WORLD] int64
    counts_ptr,  # [WORLD, PROGRAMS] int64
    calls_ptr,  # [PROGRAMS] int64
    stopped_ptr,  # [1] int32
    program,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    RECEIVERS: tl.constexpr,
):
    """Tell the same program of the first RECEIVERS ranks that what it wrote there is complete; these wait for all."""
    call = tl.load(calls_ptr + program) + 1
    done = call
    # Every thread's stores come before the one thread's release below.
    tl.debug_barrier()
    for rank in tl.static_range(RECEIVERS):
        if rank != RANK:
            # These counts lie at the same place of every rank's mailbox.
            begin = tl.load(count_addresses_ptr + rank) - tl.load(count_addresses_ptr + RANK)
            there = (counts_ptr.to(tl.int64) + begin).to(counts_ptr.dtype)
            tl.atomic_xchg(there + RANK * PROGRAMS + program, call, sem="release", scope="sys")
    if RANK < RECEIVERS:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                here = counts_ptr + rank * PROGRAMS + program
                seen = tl.load(here, volatile=True)
                stopped = tl.load(stopped_ptr, volatile=True)
                while (seen < call) & (stopped == 0):
                    seen = tl.load(here, volatile=True)
                    stopped = tl.load(stopped_ptr, volatile=True)
                # What was written before that count is read after it. The answer is used, or it would be left out.
                done = tl.minimum(done, tl.atomic_add(here, 0, sem="acquire", scope="sys"))
    tl.store(calls_ptr + program, done)
