"""The report of a load test in a real browser: all of it is in the file, and everything in it is drawn."""

import os
import sys
from pathlib import Path

import pytest

from outrider import cli

pytest.importorskip("matplotlib", reason="the extra plots is not installed")

SCREENSHOT = Path(__file__).parents[3] / "docs" / "loadtest-report.png"
MOST_SCREENSHOT_BYTES = 300_000
ARGUMENTS = [
    "--num-prompts", "12", "--output-len", "24", "--request-rate", "2,6", "--speculation", "off,async",
]  # fmt: skip


def test_a_report_needs_nothing_beside_it(new_page, one_draft, tmp_path, monkeypatch):
    report = tmp_path / "report.html"
    # The report tells it.
    monkeypatch.setattr(sys, "argv", ["outrider", "loadtest", "--local", *ARGUMENTS, "--html", "report.html"])
    assert cli.run(["loadtest", "--endpoint", one_draft.endpoint, *ARGUMENTS, "--html", str(report)]) == 0
    page = new_page(height=1400)
    page.open(report.as_uri())
    assert page.complaints() == []
    assert [url for url in page.requested() if not url.startswith(("file:", "data:"))] == []
    assert page.count("table") >= 4
    pictures = page.run("[...document.images].map(image => image.naturalWidth * image.complete)")
    assert len(pictures) >= 4
    assert min(pictures) > 300
    # A phone scrolls tables sideways, not the page.
    page.resize(390, 800)
    page.until("document.documentElement.scrollWidth <= window.innerWidth")
    if os.environ.get("OUTRIDER_SCREENSHOT"):
        page.resize(1280, 1400)
        page.screenshot(SCREENSHOT)
        assert SCREENSHOT.stat().st_size < MOST_SCREENSHOT_BYTES
