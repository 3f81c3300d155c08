"""The log of a role: written by a thread of its own, so that nobody who does not read it holds anybody up."""

import contextlib
import logging
import os
import subprocess
import sys
import threading

import pytest

from outrider.roles.log_output import QueuedHandler

LINES_THAT_FIT_NOWHERE = 20_000


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("outrider.test", logging.INFO, __file__, 1, text, (), None)


def read_lines(reading: int, until: str) -> list[str]:
    data = b""
    while until.encode() not in data:
        data += os.read(reading, 1 << 16)
    return data.decode().splitlines()


def test_lines_come_in_order_and_the_last_ones_are_waited_for(pipe):
    reading, writing = pipe
    handler = QueuedHandler(writing)
    for number in range(100):
        handler.emit(record(f"line {number}"))
    handler.finish(timeout_s=30.0)
    assert read_lines(reading, "line 99") == [f"line {number}" for number in range(100)]


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_says_later_what_is_missing(pipe):
    reading, writing = pipe
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n")
    os.set_blocking(writing, True)
    handler = QueuedHandler(writing, waiting_lines=10)
    # It would stand still here, with the pipe full.
    for number in range(LINES_THAT_FIT_NOWHERE):
        handler.emit(record(f"line {number}"))

    def emit_until_told() -> None:
        while not told.wait(0.05):
            handler.emit(record("back"))

    told = threading.Event()
    emitting = threading.Thread(target=emit_until_told)
    emitting.start()
    lines = read_lines(reading, "back\n")
    told.set()
    emitting.join()
    missing = sum(int(line.split()[0]) for line in lines if "missing" in line)
    numbered = sum(line.startswith("line ") for line in lines)
    assert missing >= LINES_THAT_FIT_NOWHERE - numbered > 0
    assert sum("missing" in line for line in lines) == 1
    handler.finish(timeout_s=30.0)


def test_a_process_whose_stderr_is_full_works_and_ends():
    """As a role does it; with the usual handler it would stand still at the first line."""
    code = (
        "import logging; from outrider.roles.log_output import log_to_stderr; log_to_stderr('info')\n"
        f"for number in range({LINES_THAT_FIT_NOWHERE}): logging.info('line %d', number)\n"
        "print('done', flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.wait(timeout=60) == 0
            assert process.stdout.read() == "done\n"
        finally:
            process.kill()


def test_a_reader_that_has_gone_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    handler = QueuedHandler(writing)
    handler.emit(record("to nobody"))
    handler.emit(record("again"))
    handler.finish(timeout_s=30.0)
    os.close(writing)
