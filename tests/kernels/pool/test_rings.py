"""The device's ends of the rings. Host and device beside each other: tests/outrider/engine/test_round_rings.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels import backend
from outrider.kernels.pool.records import WORDS
from outrider.kernels.pool.rings import publish_early, publish_report, take_records

_NEEDS_CUDA = pytest.mark.skipif(backend.INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")


def _hosts(*shape: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Memory of the host that the device can reach, filled with -9."""
    return torch.full(shape, -9, dtype=dtype, pin_memory=device.type == "cuda")


def _counter(value: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=device)


def _read(tensor: torch.Tensor) -> list[Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tensor.tolist()


def _check_taking(device: torch.device, *, size: int, most: int, first: int, come: int) -> None:
    ring = torch.arange(size * WORDS, dtype=torch.int32).view(size, WORDS) + 1
    ring = ring.pin_memory() if device.type == "cuda" else ring
    head = _hosts(1, device=device).fill_(first + come)
    records = torch.full((most, WORDS), -9, dtype=torch.int32, device=device)
    count, tail, began = _counter(-9, device, torch.int32), _counter(first, device), _counter(-9, device)
    take_records(ring, head, records, count, tail, began)
    taken = min(come, most)
    assert (_read(count), _read(tail)) == ([taken], [first + taken])
    places = torch.arange(first, first + taken) % size
    assert _read(records[:taken]) == ring[places].tolist()
    assert (records[taken:] == -9).all()
    assert _read(head) == [first + come]
    # The interpreter has no clock of a device.
    assert _read(began)[0] >= (not backend.INTERPRETED)


def _check_publishing(device: torch.device, *, words: int) -> None:
    early, reports = _hosts(1, 3, device=device), _hosts(2, 2 + words, device=device)
    rounds, tail = _counter(0, device), _counter(0, device)
    content = torch.arange(words, device=device) * 2**33
    expected = [[-9] * (2 + words), [-9] * (2 + words)]
    for round_ in range(3):
        tail += 5
        publish_early(early, torch.tensor([round_, 2**40 + round_], device=device), rounds)
        assert _read(early) == [[round_ + 1, round_, 2**40 + round_]]
        assert _read(rounds) == [round_]
        publish_report(reports, content + round_, tail, rounds)
        expected[round_ % 2] = [round_ + 1, 5 * (round_ + 1), *(content + round_).tolist()]
        assert _read(reports) == expected
        assert _read(rounds) == [round_ + 1]


def test_references(device: torch.device) -> None:
    _check_taking(device, size=8, most=4, first=0, come=0)
    _check_taking(device, size=8, most=4, first=5, come=3)
    # Around the end of the ring, more than a round takes, and past 32 bits.
    _check_taking(device, size=8, most=4, first=2**35 + 6, come=7)
    _check_publishing(device, words=3)


def test_several_turns_and_programs(triton_device: torch.device) -> None:
    _check_taking(triton_device, size=1024, most=700, first=900, come=1000)
    _check_publishing(triton_device, words=1100)


def test_no_report_words(triton_device: torch.device) -> None:
    _check_publishing(triton_device, words=0)


@pytest.mark.gpu
@_NEEDS_CUDA
def test_a_captured_round_takes_what_is_there_when_it_begins() -> None:
    device = torch.device("cuda")
    ring, head = _hosts(256, WORDS, device=device, dtype=torch.int32), _hosts(1, device=device).zero_()
    reports = _hosts(2, 2 + 64 * WORDS, device=device)
    records = torch.zeros(64, WORDS, dtype=torch.int32, device=device)
    count = _counter(0, device, torch.int32)
    tail, rounds, began = _counter(0, device), _counter(0, device), _counter(0, device)

    def round_() -> None:
        take_records(ring, head, records, count, tail, began)
        publish_report(reports, records.flatten().long(), tail, rounds)

    round_()
    torch.cuda.synchronize()
    rounds.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_()
    sent, taken = torch.zeros(0, WORDS, dtype=torch.int32), 0
    for number, come in enumerate([3, 64, 0, 100, 0, 17]):
        new = torch.randint(0, 2**31 - 1, (come, WORDS), dtype=torch.int32)
        ring[torch.arange(len(sent), len(sent) + come) % 256] = new
        sent = torch.cat((sent, new))
        head[0] = len(sent)
        graph.replay()
        torch.cuda.synchronize()
        expected = sent[taken : taken + 64]
        taken += len(expected)
        report = reports[number % 2, : 2 + expected.numel()].tolist()
        assert report == [number + 1, taken, *expected.flatten().tolist()]
    assert taken == 184


def test_bad_arguments_are_named() -> None:
    ring, records = torch.zeros(8, WORDS, dtype=torch.int32), torch.zeros(4, WORDS, dtype=torch.int32)
    one, count = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    words, buffers = torch.zeros(3, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)

    def refused(message: str, call: Any, *arguments: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=message):
            call(*arguments)

    refused("ring: 6 records given, a power of two needed", take_records, ring[:6], one, records, count, one, one)
    refused(r"ring: shape \[8, 7\] given, \[R, 8\] needed", take_records, ring[:, :7], one, records, count, one, one)
    refused("head: dtype torch.int32", take_records, ring, count, records, count, one, one)
    refused(r"records: strides \(16, 1\)", take_records, ring, one, ring.view(4, 16)[:, :8], count, one, one)
    refused("count: dtype torch.int64", take_records, ring, one, records, one, one, one)
    refused(r"tail: shape \[3\] given, \[1\] needed", take_records, ring, one, records, count, words, one)
    refused("began: dtype torch.int32", take_records, ring, one, records, count, one, count)
    refused(r"early: shape \[2, 5\] given, \[B, 4\] needed", publish_early, buffers, words, one)
    refused("words: dtype torch.int32", publish_early, buffers, words.int(), one)
    refused("reports: 5 words given, 6 needed", publish_report, buffers, torch.zeros(4).long(), one, one)
    refused("rounds: dtype torch.int32", publish_report, buffers, words, one, count)
    refused("ring: device meta given, cpu", take_records, ring.to("meta"), one, records, count, one, one)
