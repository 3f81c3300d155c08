import re

import pytest
from benchmarks.tls_cost import run


def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str]):
    assert run(["--round-trips", "100"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"(\d+) KiB +(clear|mutual TLS) +(\d+) +(\d+) +(\d+)", printed)
    assert [(size, way) for size, way, *_ in rows] == [
        (size, way) for size in ("1", "16", "256") for way in ("clear", "mutual TLS")
    ]
    assert all(0 < int(p50) <= int(p99) for *_, p50, p99, _ in rows)
    assert len(re.findall(r"a new connection, (clear|mutual TLS): [\d.]+ ms", printed)) == 2
