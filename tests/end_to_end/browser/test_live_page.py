"""The live page in a real browser, on a real service."""

import contextlib
import json
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider import cli
from outrider.errors import WorkerUnavailable
from outrider.local import LocalService
from outrider.models import held_out_prompts
from outrider.roles.ports import free_port

SCREENSHOT = Path(__file__).parents[3] / "docs" / "live-page.png"
MOST_SCREENSHOT_BYTES = 300_000
MOST_TRIES = 30
STATES = ("accepted", "abandoned")
PLAYING = "(document.querySelector('#play').dataset.playing === 'true')"
WHOLE = "document.body.dataset.state === 'whole'"


@dataclass(frozen=True)
class Live:
    """A service with its page, and the trace of one demo session."""

    service: LocalService
    url: str
    trace: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.trace.read_text().splitlines()]


@pytest.fixture(scope="module")
def live(browser, tmp_path_factory) -> Iterator[Live]:
    port = free_port()
    with LocalService(drafts=1, coordinator_args=["--http-port", str(port), "--live-page"]) as service:
        url = f"http://127.0.0.1:{port}/live"
        trace = tmp_path_factory.mktemp("trace") / "demo.jsonl"
        body = json.dumps({"prompt": 1, "max_new_tokens": 48}).encode()
        request = urllib.request.Request(f"{url}/api/demo", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            data = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        trace.write_text("\n".join(data) + "\n")
        yield Live(service, url, trace)


@pytest.fixture
def open_page(new_page, live) -> Iterator[Callable[..., Any]]:
    """Pages that must not complain, nor ask anybody else for anything."""
    pages = []

    def open_one(**options: Any) -> Any:
        pages.append(new_page(**options))
        pages[-1].open(live.url)
        return pages[-1]

    yield open_one
    origin = live.url.removesuffix("/live")
    for page in pages:
        assert page.complaints() == []
        assert {url for url in page.requested() if not url.startswith((f"{origin}/live", "blob:", "about:"))} == set()


def shown(page: Any, state: str) -> int:
    """The figure beside a colour."""
    return int(page.text(f"#legend [data-state={state}] b"))


def drawn(page: Any, state: str) -> int:
    """Pills of the tree that have this colour."""
    return page.count(f".pill[data-role=node][data-state={state}]")


def go_to(page: Any, place: int) -> None:
    page.run(f"(s => (s.value = {place}, s.dispatchEvent(new Event('input'))))(document.querySelector('#seek'))")
    settle(page, place)


def settle(page: Any, place: int) -> None:
    page.until(f"document.body.dataset.place === '{place}'")
    # What has left the tree fades first.
    page.until("[...document.querySelectorAll('.pill')].every(p => p.getAttribute('opacity') > 0.5)")


def upload(page: Any, live: Live) -> list[dict[str, Any]]:
    page.upload("#file", live.trace)
    page.until(WHOLE)
    page.click("#restart")
    return live.events[1:]


def test_a_demo_session_grows_is_judged_and_ends(open_page):
    page = open_page()
    page.click("#demo")
    # The tree appears while the page plays, long before the session's end at this speed.
    page.until("document.querySelectorAll('.pill[data-role=node]').length > 0")
    page.until(WHOLE)
    page.click("#live")
    page.until("document.body.dataset.place === document.body.dataset.events")
    assert shown(page, "accepted") + shown(page, "own") == 128
    assert shown(page, "abandoned") > 0
    assert "128 tokens" in page.text("#figures")
    assert f"{shown(page, 'accepted')} of " in page.text("#figures")
    assert page.text("#status").startswith("done")
    if os.environ.get("OUTRIDER_SCREENSHOT"):
        take_screenshot(page)


def take_screenshot(page: Any) -> None:
    """Take a screenshot of the round of this run whose verdict says most."""
    page.resize(1280, 862)
    best, most = 0, -1.0
    for place in page.run("[...Array(Number(document.body.dataset.events)).keys()]"):
        go_to(page, place + 1)
        if page.count(".pill[data-role=node][data-state=accepted]"):
            worth = min(drawn(page, "accepted"), 5) + min(drawn(page, "abandoned"), 8) / 2
            if worth > most:
                best, most = place + 1, worth
    go_to(page, best)
    page.screenshot(SCREENSHOT)
    assert SCREENSHOT.stat().st_size < MOST_SCREENSHOT_BYTES


def test_a_trace_replays_event_by_event_with_its_colours(open_page, live):
    page = open_page()
    events = upload(page, live)
    # Rows are limited: in a round of few nodes all that was judged is drawn.
    rounds = [place for place, event in enumerate(events, 1) if event["e"] == "verdict"]
    judged = {place: {state: len(events[place - 1][state]) for state in STATES} for place in rounds}
    place = min((p for p in rounds if all(judged[p].values())), key=lambda p: sum(judged[p].values()))
    grown = next(place for place, event in enumerate(events, 1) if event["e"] == "grow" and event["nodes"])
    go_to(page, grown)
    assert drawn(page, "guess") == len(events[grown - 1]["nodes"])
    go_to(page, place)
    assert drawn(page, "accepted") == judged[place]["accepted"]
    assert 0 < drawn(page, "abandoned") <= judged[place]["abandoned"]
    selected, accepted = events[place - 1]["selected"], judged[place]["accepted"]
    assert page.text("#status").startswith(f"{accepted} of {selected} accepted")
    assert f"verified {selected} " in page.text("#round")
    # Marks stand beside colours, for those who see none.
    assert "✓" in page.text(".pill[data-role=node][data-state=accepted]")
    assert page.count(".bar.round") == page.count(".bar.forward") > 0
    assert page.text("#text").strip()
    last = len(events)
    go_to(page, last)
    told = events[-1]["counts"]
    assert {state: shown(page, state) for state in STATES} == {state: told[state] for state in STATES}
    # Back again: what is shown depends on the place alone.
    go_to(page, place)
    assert drawn(page, "accepted") == judged[place]["accepted"]


def test_step_pause_and_keys(open_page, live):
    page = open_page()
    events = upload(page, live)
    settle(page, 0)
    page.click("#step")
    settle(page, 1)
    page.run("document.querySelector('#tree').focus()")
    page.press(".", "Period")
    settle(page, 2)
    rounds = [place for place, event in enumerate(events, 1) if event["e"] == "verdict"]
    page.press("ArrowRight")
    settle(page, rounds[0])
    page.press("ArrowRight")
    settle(page, rounds[1])
    page.press("ArrowLeft")
    settle(page, rounds[0])
    page.press("Home")
    settle(page, 0)
    page.press(" ", "Space")
    page.until("Number(document.body.dataset.place) > 0")
    page.run(f"{PLAYING} && document.dispatchEvent(new KeyboardEvent('keydown', {{key: ' '}}))")
    page.until(f"!{PLAYING}")
    page.press("End")
    settle(page, len(events))


def test_the_download_is_the_trace(open_page, live):
    page = open_page()
    upload(page, live)
    page.run("URL.createObjectURL = (blob) => ((window.saved = blob), 'blob:nowhere')")
    page.run("HTMLAnchorElement.prototype.click = () => {}")
    page.click("#download")
    assert page.run("window.saved.text()") == live.trace.read_text()


def test_a_session_of_somebody_is_chosen_and_followed(open_page, live):
    page = open_page()
    texts, is_chosen = [], threading.Event()

    def generate() -> None:
        with live.service.client() as client:
            while not is_chosen.is_set():
                # The same as above.
                with contextlib.suppress(WorkerUnavailable):
                    texts.append(client.generate(held_out_prompts()[2], max_new_tokens=300, ignore_eos=True).text)

    thread = threading.Thread(target=generate)
    thread.start()
    choose = """(select => {
        if (select.options.length < 2 || document.querySelector('#text .own, #text .accepted')) return;
        select.value = select.options[1].value;
        select.dispatchEvent(new Event('change'));
    })(document.querySelector('#sessions'))"""
    try:
        # The one that is chosen may just have ended: then the next one.
        page.until(f"({choose}, document.querySelector('#text .own, #text .accepted') !== null)")
    finally:
        is_chosen.set()
        thread.join()
    page.until(WHOLE)
    # Watching began somewhere in the middle, and from there the text is the client's.
    seen = page.run("[...document.querySelectorAll('#text > .own, #text > .accepted')].map(span => span.textContent)")
    assert any("".join(seen[-5:]).replace(" ", "") in "".join(text.split()) for text in texts)


def test_what_generate_records_is_replayed(open_page, live, tmp_path, capsys):
    file = tmp_path / "tree.jsonl"
    command = ["generate", held_out_prompts()[3], "--endpoint", live.service.endpoint, "--max-new-tokens", "24"]
    # A client takes a coordinator that it cannot reach at once for one that is not there: a machine may be too busy.
    for _ in range(MOST_TRIES):
        code, output = cli.run([*command, "--ignore-eos", "--record-tree", str(file)]), capsys.readouterr()
        if "cannot connect" not in output.err:
            break
    assert code == 0, output.err
    text = output.out
    page = open_page()
    page.upload("#file", file)
    page.until(WHOLE)
    page.click("#live")
    page.until("document.querySelector('#status').textContent.startsWith('done')")
    assert shown(page, "accepted") + shown(page, "own") == 24
    assert page.text("#text").rstrip().endswith(text.rstrip())


def test_gaps_and_files_of_another_kind_are_seen(open_page, live, tmp_path):
    page = open_page()
    lines = live.trace.read_text().splitlines()
    # A header in the middle: the request was resumed elsewhere.
    again = [*lines[:40], json.dumps({"e": "gap", "lost": 7}), lines[1], *lines[:20]]
    gaps = tmp_path / "gaps.jsonl"
    gaps.write_text("\n".join(again))
    page.upload("#file", gaps)
    page.until(f"document.body.dataset.events === '{len(again) - 1}'")
    go_to(page, 40)
    assert "7 events missed" in page.text("#status")
    assert page.count("#timeline .gap") == 1
    other = tmp_path / "other.jsonl"
    for content, reason in (
        ("{}", "no header"),
        ("{", "JSON"),
        (json.dumps({"format": "outrider-tree", "version": 99}), "99"),
    ):
        other.write_text(content)
        page.upload("#file", other)
        page.until(f"document.querySelector('#status').textContent.includes({json.dumps(reason)})")


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_it_is_one_column_without_a_horizontal_scroll(open_page, live, *, dark):
    page = open_page(width=390, height=844, dark=dark)
    assert page.run("document.documentElement.scrollWidth") == 390
    events = upload(page, live)
    biggest = max(range(len(events)), key=lambda place: len(events[place].get("abandoned", ())))
    go_to(page, biggest + 1)
    assert page.run("document.documentElement.scrollWidth") == 390
    boxes = page.run(
        "[...document.querySelectorAll('.panel')].map(p => p.getBoundingClientRect()).map(({left, width, top}) => "
        "[left, width, top])"
    )
    assert len({(left, width) for left, width, _ in boxes}) == 1
    assert boxes == sorted(boxes, key=lambda box: box[2])
    assert (
        page.run(
            "Math.min(...[...document.querySelectorAll('.buttons button')].map(b => b.getBoundingClientRect().height))"
        )
        >= 44
    )
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) is dark
