"""The device's ends of the rings between host and rounds: records come in, early words and reports go out.

    take_records      first kernel of a round: the records that have come by now, into device memory
    publish_early     as soon as select is done: a few words that the host needs to launch the next round
    publish_report    last kernels of a round: its report, and how far the device has read the ring

`ring`, `head`, `early` and `reports` are the host's memory, pinned where the device is a GPU; everything else is the
device's. The operators are captured in graphs: what changes from round to round (`tail`, `rounds`) is counted in device
memory. Nothing waits for the host, and no atomic touches its memory. The host's ends are in
`outrider.engine.round_rings`.

A buffer of words is valid once its word 0 holds the number of its round, counted from 1. Rounds take turns on the
buffers of a tensor: round r writes buffer r mod B, so the host has to have copied out round r before it launches the
first kernel of round r + B that writes there.

Shapes: R records of the ring, a power of two; G records that a round takes at most; B buffers; E, N words of a round.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import time

import numpy as np
import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import INTERPRETED, check_shape, jit, tl, triton, uses_triton
from outrider.kernels.pool.records import WORDS

__all__ = [
    "EARLY_HEADER",
    "REPORT_HEADER",
    "device_time",
    "publish_early",
    "publish_early_reference",
    "publish_report",
    "publish_report_reference",
    "take_records",
    "take_records_reference",
]

EARLY_HEADER = 1
"""Words of a buffer before the early words: the number of the round, counted from 1."""
REPORT_HEADER = 2
"""Words of a buffer before the report: the number of the round, counted from 1, and the tail."""

_HOST = torch.device("cpu")
# Records that `take_records` loads at a time: a second turn costs another way to the host's memory and back.
_RECORDS = 256
_TAKING_WARPS = 8
# Words of a report that a program copies.
_COPIED = 512
# Inline assembly is not there under the interpreter, which runs one thread and needs none.
_HARDWARE = tl.constexpr(not INTERPRETED)


def take_records(
    ring: torch.Tensor,
    head: torch.Tensor,
    records: torch.Tensor,
    count: torch.Tensor,
    tail: torch.Tensor,
    began: torch.Tensor,
) -> None:
    """Begin a round: copy the next records of the ring to the device, at most G, and move the tail past them.

    `head` is read once. All kernels of the round use `records` and `count`: none of them reads the ring.

    Args:
        ring: [R, 8] int32, the host's.
        head: [1] int64, the host's: records that it has ever written.
        records: [G, 8] int32, written up to `count`.
        count: [1] int32, written.
        tail: [1] int64: records that the device has ever taken; updated.
        began: [1] int64, written: the time on the device's clock, in nanoseconds.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, naming the argument.
    """
    _check("ring", ring, ("R", WORDS), torch.int32, _HOST, "the host")
    _check("head", head, (1,), torch.int64, _HOST, "the host")
    size = ring.shape[0]
    if size & (size - 1) or not size:
        raise ValueError(f"ring: {size} records given, a power of two needed")
    device = records.device
    _check("records", records, ("G", WORDS), torch.int32, device, "records")
    _check("count", count, (1,), torch.int32, device, "records")
    _check("tail", tail, (1,), torch.int64, device, "records")
    _check("began", began, (1,), torch.int64, device, "records")
    if not uses_triton(records):
        take_records_reference(ring, head, records, count, tail, began)
        return
    _take_records_kernel[(1,)](
        ring,
        head,
        records,
        count,
        tail,
        began,
        SIZE=size,
        MOST=records.shape[0],
        WORDS=WORDS,
        BLOCK=_RECORDS,
        THREADS=32 * _TAKING_WARPS,
        num_warps=_TAKING_WARPS,
    )


def take_records_reference(
    ring: torch.Tensor,
    head: torch.Tensor,
    records: torch.Tensor,
    count: torch.Tensor,
    tail: torch.Tensor,
    began: torch.Tensor,
) -> None:
    """`take_records` in numpy, on a CPU."""
    began.numpy()[0] = time.perf_counter_ns()
    first = int(tail.numpy()[0])
    taken = min(int(head.numpy()[0]) - first, records.shape[0])
    if taken:
        records.numpy()[:taken] = ring.numpy()[np.arange(first, first + taken) % ring.shape[0]]
    count.numpy()[0] = taken
    tail.numpy()[0] = first + taken


@jit
def _take_records_kernel(
    ring_ptr,  # [R, 8] int32, the host's
    head_ptr,  # [1] int64, the host's
    records_ptr,  # [G, 8] int32
    count_ptr,  # [1] int32
    tail_ptr,  # [1] int64
    began_ptr,  # [1] int64
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):
    tl.store(began_ptr, device_time())
    tail = tl.load(tail_ptr)
    count = tl.minimum(_load_acquire(head_ptr, THREADS) - tail, MOST).to(tl.int32)
    word = tl.arange(0, WORDS)[None, :]
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)[:, None]
        place = ((tail + index) & (SIZE - 1)).to(tl.int32)
        # Volatile, so that no cache answers: the place has held other records. Triton drops the modifier `.cv`.
        record = tl.load(ring_ptr + place * WORDS + word, mask=index < count, volatile=True)
        tl.store(records_ptr + index * WORDS + word, record, mask=index < count)
    tl.store(count_ptr, count)
    tl.store(tail_ptr, tail + count)


@jit
def device_time():
    """Return the nanoseconds on the clock that all kernels of a GPU share."""
    if _HARDWARE:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.zeros((), tl.int64)
    return now


@jit
def _load_acquire(word_ptr, THREADS: tl.constexpr):
    """Load a word that the host writes after others, so that no thread sees those others as they were before.

    One thread loads: two could see different heads. Its load is an acquire at the scope of the system, and the sum is
    a barrier of all threads behind it. So whatever any thread loads afterwards comes after what the host wrote before
    the word. (A volatile load alone would order nothing but itself.)
    """
    if _HARDWARE:
        thread = tl.arange(0, THREADS)
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            setp.eq.s32 first, $2, 0;
            @first ld.acquire.sys.global.s64 $0, [$1];
            @!first mov.s64 $0, 0;
            }""",
            "=l,l,r",
            [word_ptr.to(tl.int64), thread],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        word = tl.sum(words)
    else:
        word = tl.load(word_ptr)
    return word


def publish_early(early: torch.Tensor, words: torch.Tensor, rounds: torch.Tensor) -> None:
    """Give the host a few words of the round before its report.

    Args:
        early: [B, 1 + E] int64, the host's: the number of the round, then the words.
        words: [E] int64.
        rounds: [1] int64, rounds reported.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, naming the argument.
    """
    _check("words", words, ("E",), torch.int64, words.device, "words")
    _check("rounds", rounds, (1,), torch.int64, words.device, "words")
    _check("early", early, ("B", EARLY_HEADER + words.shape[0]), torch.int64, _HOST, "the host")
    if not uses_triton(words):
        publish_early_reference(early, words, rounds)
    else:
        _announce(early, words, rounds, ends_round=False)


def publish_early_reference(early: torch.Tensor, words: torch.Tensor, rounds: torch.Tensor) -> None:
    """`publish_early` in numpy, on a CPU."""
    round_ = int(rounds.numpy()[0])
    buffer, buffers = round_ % early.shape[0], early.numpy()
    buffers[buffer, EARLY_HEADER:] = words.numpy()
    buffers[buffer, 0] = round_ + 1


def publish_report(reports: torch.Tensor, words: torch.Tensor, tail: torch.Tensor, rounds: torch.Tensor) -> None:
    """Give the host the round's report, and end the round.

    Args:
        reports: [B, 2 + N or more] int64, the host's: the number of the round, the tail, then the words.
        words: [N] int64; of no length where an operator before has written the report itself.
        tail: [1] int64, as `take_records` left it.
        rounds: [1] int64, rounds reported; counts this one afterwards.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, naming the argument.
    """
    _check("words", words, ("N",), torch.int64, words.device, "words")
    _check("tail", tail, (1,), torch.int64, words.device, "words")
    _check("rounds", rounds, (1,), torch.int64, words.device, "words")
    _check("reports", reports, ("B", "2 + N"), torch.int64, _HOST, "the host")
    if reports.shape[1] < REPORT_HEADER + words.shape[0]:
        raise ValueError(f"reports: {reports.shape[1]} words given, {REPORT_HEADER + words.shape[0]} needed")
    if not uses_triton(words):
        publish_report_reference(reports, words, tail, rounds)
        return
    if words.shape[0]:
        _copy_words_kernel[(triton.cdiv(words.shape[0], _COPIED),)](
            reports,
            words,
            rounds,
            words.shape[0],
            BUFFERS=reports.shape[0],
            STRIDE=reports.shape[1],
            HEADER=REPORT_HEADER,
            BLOCK=_COPIED,
            num_warps=4,
        )
    _announce(reports, tail, rounds, ends_round=True)


def publish_report_reference(
    reports: torch.Tensor, words: torch.Tensor, tail: torch.Tensor, rounds: torch.Tensor
) -> None:
    """`publish_report` in numpy, on a CPU."""
    round_ = int(rounds.numpy()[0])
    buffer, buffers = round_ % reports.shape[0], reports.numpy()
    buffers[buffer, REPORT_HEADER : REPORT_HEADER + len(words)] = words.numpy()
    buffers[buffer, 1] = tail.numpy()[0]
    buffers[buffer, 0] = round_ + 1
    rounds.numpy()[0] = round_ + 1


@jit
def _copy_words_kernel(
    buffers_ptr,  # [B, STRIDE] int64, the host's
    words_ptr,  # [count] int64
    rounds_ptr,  # [1] int64
    count,
    BUFFERS: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer = (tl.load(rounds_ptr) % BUFFERS).to(tl.int32)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + index, mask=index < count)
    tl.store(buffers_ptr + buffer * STRIDE + HEADER + index, word, mask=index < count)


def _announce(buffers: torch.Tensor, words: torch.Tensor, rounds: torch.Tensor, *, ends_round: bool) -> None:
    """Write the first words of the round's buffer, those behind the number of the round, and then that number."""
    _announce_kernel[(1,)](
        buffers,
        words,
        rounds,
        words.shape[0],
        BUFFERS=buffers.shape[0],
        STRIDE=buffers.shape[1],
        ENDS_ROUND=ends_round,
        BLOCK=max(triton.next_power_of_2(words.shape[0]), 32),
        num_warps=1,
    )


@jit
def _announce_kernel(
    buffers_ptr,  # [B, STRIDE] int64, the host's
    words_ptr,  # [count] int64
    rounds_ptr,  # [1] int64
    count,
    BUFFERS: tl.constexpr,
    STRIDE: tl.constexpr,
    ENDS_ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    round_ = tl.load(rounds_ptr)
    buffer_ptr = buffers_ptr + (round_ % BUFFERS).to(tl.int32) * STRIDE
    index = tl.arange(0, BLOCK)
    tl.store(buffer_ptr + 1 + index, tl.load(words_ptr + index, mask=index < count), mask=index < count)
    tl.debug_barrier()
    _store_fenced(buffer_ptr, round_ + 1)
    if ENDS_ROUND:
        tl.store(rounds_ptr, round_ + 1)


@jit
def _store_fenced(word_ptr, value):
    """Store a word that the host waits for, after everything that this kernel and those before it have stored.

    The fence is one of the whole system and is cumulative: behind a barrier, or in a later kernel, one thread orders
    what the others stored. For a kernel of one warp.
    """
    if _HARDWARE:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            setp.eq.s32 first, $3, 0;
            @first fence.sc.sys;
            @first st.relaxed.sys.global.s64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r",
            [word_ptr.to(tl.int64), value, tl.arange(0, 32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(word_ptr, value)


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int | str, ...], dtype: torch.dtype, device: torch.device, owner: str
) -> None:
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, (dtype,))
    check_place(name, tensor, device, owner)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} given, a contiguous tensor needed")
