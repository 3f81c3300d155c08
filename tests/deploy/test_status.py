"""What `outrider status` draws."""

from rich.console import Console

from outrider.deploy.status import status_tables


def test_why_a_worker_does_not_serve_is_shown_as_it_was_said():
    reason = "CheckpointError: [/models/big] lacks [weights]"
    worker = {
        "name": "draft-0",
        "state": "starting",
        "reason": reason,
        "node": "machine",
        "pid": 1,
        "address": None,
        "model": "big[8bit]",
        "sessions": 0,
        "busy": 0.0,
        "restarts": 2,
    }
    status = {
        "name": "mine",
        "state": "serving",
        "uptime_s": 1.0,
        "endpoints": ["a:1"],
        "shared_endpoints": ["a:7"],
        "wanted": {"draft": 1},
        "workers": [worker],
        "autoscaler": {"enabled": False, "min_drafts": 0, "max_drafts": None, "latest": None, "decisions": []},
        "coordinators": [],
    }
    console = Console(width=300, record=True)
    for table in status_tables(status):
        console.print(table)
    text = console.export_text()
    assert reason in text
    assert "a:7" in text
    assert "big[8bit]" in text
