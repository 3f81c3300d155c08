"""Lines of the log, for people and for programs."""

import json
import logging
import subprocess
import sys

from outrider.roles.log_output import FORMAT, JsonFormatter, TextFormatter, about


def record(text: str, *values: object, **ids: str | int) -> logging.LogRecord:
    made = logging.LogRecord("outrider.test", logging.WARNING, __file__, 1, text, values, None)
    for name, value in (about(**ids) if ids else {}).items():
        setattr(made, name, value)
    return made


def test_a_json_line_is_one_object_with_the_ids():
    line = JsonFormatter("target").format(record('said "%s"\nand went on', "ö", request_id="r-1", session_id=7))
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == 'said "ö"\nand went on'
    assert (told["level"], told["logger"], told["role"]) == ("warning", "outrider.test", "target")
    assert (told["request_id"], told["session_id"]) == ("r-1", 7)
    assert told["time"].endswith("+00:00")


def test_a_json_line_holds_the_traceback():
    try:
        raise ValueError("here")
    except ValueError:
        made = record("it failed")
        made.exc_info = sys.exc_info()
    told = json.loads(JsonFormatter("draft").format(made))
    assert "ValueError: here" in told["traceback"]
    assert "request_id" not in told


def test_a_text_line_has_the_ids_behind_it():
    formatter = TextFormatter(FORMAT)
    assert formatter.format(record("gone", request_id="r-1", session_id=7)).endswith(
        "gone [request_id=r-1 session_id=7]"
    )
    assert formatter.format(record("gone")).endswith("outrider.test: gone")


def test_every_line_of_a_process_that_logs_json_parses_whoever_wrote_it():
    code = (
        "import logging; from outrider.roles.log_output import about, log_to_stderr\n"
        "log_to_stderr('info', 'json', role='x')\n"
        "logging.getLogger('a').info('one %d', 1, extra=about(request_id='r'))\n"
        "logging.getLogger('b.c').error('two')\n"
        "logging.getLogger('b.c').debug('not this')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["logger"], line["message"], line.get("request_id")) for line in lines] == [
        ("a", "one 1", "r"),
        ("b.c", "two", None),
    ]
