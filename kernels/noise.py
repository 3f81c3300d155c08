"""Counter-based noise shared by draft and target: Philox4x32-10 words and the Gumbel variables made of them.

For a request seed s, the index i (in prompt + output) of the token being chosen and a vocabulary id v:

    key     = (low 32 bits of s, high 32 bits of s)
    counter = (v >> 2, i, stream, choice)      lane v & 3 of the four output words is x
    w = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)
    E = w + w^2/2 + w^3/3 if w < 2^-11 else -log(1 - w)
    G = -log E

E is an exponential variable, G a Gumbel one, finite for every x. The series keeps the upper tail of G fine-grained,
where 1 - w would round away most of x's bits. Nothing else enters: not the row of the batch, not the device.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Streams: 0 choice, 1 draft sampling,
2 coins, 3 residual; choice is the index of the completion when a request asks for several.

Shapes: T rows, V vocabulary size, k ids of a row.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import torch

from outrider.kernels.argument_checks import INDEX_DTYPES, NeededTensor, check_at_least, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.sampling.noise_blocks import gumbel_of_word, philox_words, word_of_ids

__all__ = [
    "STREAM_CHOICE",
    "STREAM_COINS",
    "STREAM_DRAFT",
    "STREAM_RESIDUAL",
    "gumbel_from_uint32",
    "gumbel_noise",
    "gumbel_noise_reference",
    "philox_uint32",
    "philox_uint32_reference",
    "philox_words",
]

STREAM_CHOICE, STREAM_DRAFT, STREAM_COINS, STREAM_RESIDUAL = range(4)

_ROUND_A, _ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LARGEST_UNIFORM = np.float32(1 - 2**-24)
_SERIES_BELOW = np.float32(2**-11)


def philox_uint32(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_ids: torch.Tensor,
    stream: int = STREAM_CHOICE,
    choice_index: torch.Tensor | int = 0,
) -> torch.Tensor:
    """The 32-bit word x of each id.

    Args:
        seeds: [T] int64, the bit pattern of the 64-bit seed.
        positions: [T] int32 or int64.
        vocab_ids: [T, k] or [k] int32 or int64, not negative.
        stream: which of the four streams.
        choice_index: [T] or one int.

    Returns:
        [T, k] int64 with values in [0, 2^32).

    Raises:
        ValueError: a shape or dtype that does not fit, naming the argument.
    """
    shape = ("k",) if vocab_ids.dim() == 1 else ("T", "k")
    _check_rows(seeds, positions, stream, choice_index, vocab_ids=(vocab_ids, shape, INDEX_DTYPES))
    vocab_ids = vocab_ids.expand(seeds.shape[0], -1)
    if uses_triton(seeds):
        return _launch(seeds, positions, vocab_ids, stream, choice_index, as_words=True)
    return philox_uint32_reference(seeds, positions, vocab_ids, stream, choice_index)


def gumbel_noise(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab: int | torch.Tensor,
    stream: int = STREAM_CHOICE,
    choice_index: torch.Tensor | int = 0,
) -> torch.Tensor:
    """The Gumbel noise G of whole rows, or of chosen ids.

    Args:
        seeds: [T] int64, the bit pattern of the 64-bit seed.
        positions: [T] int32 or int64.
        vocab: V for all ids below it, or [T, k] int32 or int64 ids.
        stream: which of the four streams.
        choice_index: [T] or one int.

    Returns:
        [T, V] or [T, k] float32, all finite.

    Raises:
        ValueError: a shape or dtype that does not fit, naming the argument.
    """
    vocab_ids = vocab if isinstance(vocab, torch.Tensor) else None
    _check_rows(seeds, positions, stream, choice_index, vocab=(vocab_ids, ("T", "k"), INDEX_DTYPES))
    if not isinstance(vocab, torch.Tensor):
        check_at_least("vocab", vocab, 1)
    if uses_triton(seeds):
        ids = vocab if isinstance(vocab, torch.Tensor) else _all_ids(vocab, seeds)
        return _launch(seeds, positions, ids, stream, choice_index, as_words=False)
    return gumbel_noise_reference(seeds, positions, vocab, stream, choice_index)


def _check_rows(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int, choice_index: torch.Tensor | int, **ids: NeededTensor
) -> None:
    choices = choice_index if isinstance(choice_index, torch.Tensor) else None
    check_tensors(
        seeds=(seeds, ("T",), (torch.int64,)),
        positions=(positions, ("T",), INDEX_DTYPES),
        choice_index=(choices, ("T",), INDEX_DTYPES),
        **ids,
    )
    if not 0 <= stream < 2**32:
        raise ValueError(f"stream: {stream} given, 0 to 2^32 - 1 needed")


def _all_ids(vocab_size: int, seeds: torch.Tensor) -> torch.Tensor:
    return torch.arange(vocab_size, device=seeds.device).expand(seeds.shape[0], -1)


def philox_uint32_reference(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_ids: torch.Tensor,
    stream: int = STREAM_CHOICE,
    choice_index: torch.Tensor | int = 0,
) -> torch.Tensor:
    """`philox_uint32` on the CPU: all four words of each id's counter, of which the id's lane is taken."""
    ids = vocab_ids.numpy().astype(np.uint64)
    words = _philox4x32(ids >> np.uint64(2), *_counter_columns(seeds, positions, stream, choice_index))
    lane = ids & np.uint64(3)
    return torch.from_numpy(np.choose(lane.astype(np.intp), words).astype(np.int64))


def gumbel_noise_reference(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab: int | torch.Tensor,
    stream: int = STREAM_CHOICE,
    choice_index: torch.Tensor | int = 0,
) -> torch.Tensor:
    """`gumbel_noise` on the CPU. Whole rows are remembered: a step mostly asks for rows that the last one had."""
    if isinstance(vocab, torch.Tensor):
        words = philox_uint32_reference(seeds, positions, vocab, stream, choice_index)
        return torch.from_numpy(gumbel_from_uint32(words.numpy().astype(np.uint32)))
    if seeds.shape[0] == 0:
        return torch.empty(0, vocab)
    choices = choice_index.tolist() if isinstance(choice_index, torch.Tensor) else [choice_index] * seeds.shape[0]
    keys = [(*row, stream, vocab) for row in zip(seeds.tolist(), positions.tolist(), choices, strict=True)]
    return torch.stack(_ROWS.rows(keys))


def gumbel_from_uint32(words: np.ndarray) -> np.ndarray:
    """G of each 32-bit word: uint32 in, float32 out, in float32 arithmetic throughout."""
    uniform = words.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2**-32)
    np.minimum(uniform, _LARGEST_UNIFORM, out=uniform)
    exponential = np.negative(np.log(np.float32(1) - uniform))
    small = np.nonzero(uniform < _SERIES_BELOW)
    w = uniform[small]
    exponential[small] = w + w * w / np.float32(2) + w * w * w / np.float32(3)
    return np.negative(np.log(exponential, out=exponential), out=exponential)


class _RememberedRows:
    """Noise rows by (seed, position, choice, stream, V), least recently used out first.

    A row is a pure function of its key, so remembering changes nothing but time: the nodes of a tree at one depth
    share a row, and consecutive steps of a session share all but a few.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._rows: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, keys: list[tuple[int, ...]]) -> list[torch.Tensor]:
        with self._lock:
            found = {key: self._rows[key] for key in keys if key in self._rows}
            for key in found:
                self._rows.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            found.update(zip(missing, _gumbel_rows(missing), strict=True))
            self._remember({key: found[key] for key in missing})
        return [found[key] for key in keys]

    def _remember(self, rows: dict[tuple[int, ...], torch.Tensor]) -> None:
        with self._lock:
            for key, row in rows.items():
                if key not in self._rows:
                    self._rows[key] = row
                    self._bytes += row.nbytes + _ROW_OVERHEAD_BYTES
            while self._bytes > self._capacity_bytes:
                _, dropped = self._rows.popitem(last=False)
                self._bytes -= dropped.nbytes + _ROW_OVERHEAD_BYTES


# What a tensor and its key take beside the data; it keeps rows of a small vocabulary from piling up.
_ROW_OVERHEAD_BYTES = 1024
# 32 MiB hold about 1,000 rows of 8,192 entries: tens of sessions with trees of usual depth.
_ROWS = _RememberedRows(capacity_bytes=32 << 20)


def _gumbel_rows(keys: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Rows of G for keys of one stream and V, computed together; each row is a tensor of its own."""
    stream, vocab_size = keys[0][-2:]
    columns = torch.tensor([key[:3] for key in keys])
    counters = np.arange((vocab_size + 3) // 4, dtype=np.uint64)[None, :]
    words = _philox4x32(counters, *_counter_columns(columns[:, 0], columns[:, 1], stream, columns[:, 2]))
    packed = np.empty((len(keys), counters.shape[1], 4), dtype=np.uint32)
    for lane in range(4):
        packed[..., lane] = words[lane]
    noise = gumbel_from_uint32(packed.reshape(len(keys), -1)[:, :vocab_size])
    return [torch.from_numpy(row.copy()) for row in noise]


def _counter_columns(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int, choice_index: torch.Tensor | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Counter words 1 to 3 and the two key words, each [T, 1] or [1, 1] uint64."""
    seed = seeds.contiguous().numpy().view(np.uint64)[:, None]
    choice = choice_index.numpy() if isinstance(choice_index, torch.Tensor) else np.array([choice_index])
    return (
        positions.numpy().astype(np.uint64)[:, None] & _LOW,
        np.array([[stream]], dtype=np.uint64),
        choice.astype(np.int64).astype(np.uint64)[:, None] & _LOW,
        seed & _LOW,
        seed >> _HALF,
    )


def _philox4x32(
    c0: np.ndarray, c1: np.ndarray, c2: np.ndarray, c3: np.ndarray, k0: np.ndarray, k1: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ten rounds over 32-bit words held in uint64, so that a product keeps both halves.

    The first two rounds broadcast, for most words still depend on the row or on the id alone; from then on every
    operation writes into buffers of the full shape, which halves the time of fresh arrays.
    """
    for _ in range(2):
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = (product_b >> _HALF) ^ (c1 ^ k0), product_b & _LOW
        c2, c3 = (product_a >> _HALF) ^ (c3 ^ k1), product_a & _LOW
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    c0, c1, c2, c3 = (np.array(word) for word in np.broadcast_arrays(c0, c1, c2, c3))
    product_a, product_b = np.empty_like(c0), np.empty_like(c0)
    for _ in range(8):
        np.multiply(c0, _ROUND_A, out=product_a)
        np.multiply(c2, _ROUND_B, out=product_b)
        np.right_shift(product_b, _HALF, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, k0, out=c0)
        np.right_shift(product_a, _HALF, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, k1, out=c2)
        np.bitwise_and(product_b, _LOW, out=c1)
        np.bitwise_and(product_a, _LOW, out=c3)
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def _launch(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    stream: int,
    choice_index: torch.Tensor | int,
    *,
    as_words: bool,
) -> torch.Tensor:
    rows, count = ids.shape
    out = torch.empty(rows, count, dtype=torch.int64 if as_words else torch.float32, device=seeds.device)
    if out.numel() == 0:
        return out
    choice = choice_index if isinstance(choice_index, torch.Tensor) else torch.full_like(positions, choice_index)
    block = min(1024, triton.next_power_of_2(count))
    _noise_kernel[(rows, triton.cdiv(count, block))](
        seeds.contiguous(),
        positions.contiguous(),
        choice.contiguous(),
        ids,
        out,
        ids.stride(0),
        ids.stride(1),
        count,
        stream,
        AS_WORDS=as_words,
        BLOCK=block,
    )
    return out


@jit
def _noise_kernel(
    seeds_ptr,  # [T] int64
    positions_ptr,  # [T] int32 or int64
    choice_ptr,  # [T] int32 or int64
    ids_ptr,  # [T, k] int32 or int64
    out_ptr,  # [T, k] int64 words or float32 noise
    ids_row_stride,
    ids_stride,
    count,
    stream,
    AS_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    ids = tl.load(ids_ptr + row * ids_row_stride + offsets * ids_stride, mask=inside, other=0)
    stream = tl.full([], stream, tl.int64)
    word = word_of_ids(tl.load(seeds_ptr + row), ids, tl.load(positions_ptr + row), stream, tl.load(choice_ptr + row))
    if AS_WORDS:
        tl.store(out_ptr + row * count + offsets, word.to(tl.int64), mask=inside)
    else:
        tl.store(out_ptr + row * count + offsets, gumbel_of_word(word), mask=inside)
