"""Output of `outrider status`."""

import io
from typing import Any

from rich.console import Console

from outrider.deploy.status import status_tables


def worker(name: str, **more: object) -> dict[str, Any]:
    usual = {
        "name": name,
        "state": "serving",
        "reason": None,
        "node": "machine",
        "pid": 1,
        "address": "127.0.0.1:40123",
        "model": "llama-3.1-8b",
        "sessions": 12,
        "busy": 0.5,
        "restarts": 2,
    }
    return usual | more


def status_of(*workers: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "mine",
        "state": "serving",
        "uptime_s": 1.0,
        "endpoints": ["a:1"],
        "shared_endpoints": ["a:7"],
        "wanted": {"draft": 1},
        "workers": list(workers),
        "autoscaler": {"enabled": False, "min_drafts": 0, "max_drafts": None, "latest": None, "decisions": []},
        "coordinators": [],
    }


def shown(status: dict[str, Any], *, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in status_tables(status):
        console.print(table)
    return console.export_text()


def test_why_a_worker_does_not_serve_is_shown_as_it_was_said():
    reason = "CheckpointError: [/models/big] lacks [weights]"
    text = shown(status_of(worker("draft-0", state="starting", reason=reason, model="big[8bit]")), width=300)
    assert reason in text
    assert "a:7" in text
    assert "big[8bit]" in text


def test_80_columns_are_enough_for_a_line_each():
    reason = "a checkpoint that has moved, of which there is so much to say that it takes more than a line of its own"
    text = shown(
        status_of(
            worker("coordinator-0", model=None),
            worker("target-0"),
            worker("draft-0", state="connecting", reason=reason),
        ),
        width=80,
    )
    (line,) = (line for line in text.splitlines() if line.startswith("target-0"))
    assert line.split() == ["target-0", "serving", "127.0.0.1:40123", "llama-3.1-8b", "12", "50%", "2"]
    (line,) = (line for line in text.splitlines() if "connecting" in line)
    assert line.split()[0] == "draft-0"
    assert "there is so much to say" in " ".join(text.split())
    assert "…" not in text


def test_several_machines_are_named():
    assert "machine" not in shown(status_of(worker("target-0"), worker("draft-0")), width=80)
    text = shown(status_of(worker("target-0"), worker("draft-0", node="other")), width=100)
    assert "machine" in text
    assert "other" in text
