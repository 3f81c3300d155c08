"""Reports of a load test: JSON, tables, a report that stands alone, comparisons."""

import dataclasses
import json
import math
import re

import pytest
from rich.console import Console

from outrider.coordinator.loadtest import compare, metrics, plots, report_html, report_json, tables
from outrider.coordinator.loadtest.lag import ClientLoad, client_figures
from outrider.coordinator.loadtest.options import Mode, Point
from outrider.coordinator.loadtest.records import RequestRecord, RoundTime
from outrider.coordinator.loadtest.running import Run
from outrider.errors import InvalidRequest, MissingPackage

ROUND = RoundTime(forward_ns=5_000_000, host_ns=1_000_000, between_ns=0)


def run(*, rate: float = 2.0, speculation: Mode = "async", scale: float = 1.0, cap: int | None = None) -> Run:
    records = [
        RequestRecord(
            index=number,
            intended_s=number / rate,
            started_s=number / rate,
            sent_s=number / rate,
            chunk_s=[number / rate + scale * each for each in (0.1, 0.2, 0.4)],
            chunk_tokens=[1, 2, 1],
            prompt_tokens=5,
            output_tokens=4,
            verify_steps=3,
            drafted_tokens=9,
            accepted_tokens=2,
            accepted_per_position=[1, 1],
            position_steps=3,
            rounds=[ROUND],
        )
        for number in range(6)
    ]
    records.append(RequestRecord(index=6, intended_s=3.0, started_s=3.0, sent_s=3.0, error="<b>Overloaded</b>: full"))
    point = Point(request_rate=rate, max_concurrency=cap, speculation=speculation)
    head = {
        "date": "20260101-000000",
        "endpoint_type": "grpc",
        "label": point.label,
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": cap,
        "speculation": speculation,
        "temperature": 0.0,
        "seed": 0,
        "dataset_name": "python",
        "latency_from": "intended arrival",
        "goodput_slos_ms": {"ttft": 150.0},
    }
    figures = metrics.summarise(records, slos={"ttft": 150.0}, duration_s=4.0)
    client = client_figures([ClientLoad(loop_lag_s=[0.0], cpu_share=0.1)], [0.0], 100.0)
    return Run(point=point, figures=head | figures | client, records=records)


def shown(*parts) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    with console.file:
        for part in parts:
            console.print(part)
        return console.export_text()


def test_one_run_is_one_object_and_a_sweep_holds_several(tmp_path):
    one = report_json.document([run()], is_detailed=False)
    assert one["completed"] == 6
    assert "ttfts" not in one
    sweep = report_json.document([run(), run(rate=math.inf)], is_detailed=True)
    assert [each["request_rate"] for each in sweep["runs"]] == [2.0, "inf"]
    assert sweep["runs"][0]["ttfts"][-1] is None
    path = tmp_path / "deep" / "figures.json"
    report_json.write(path, [run(), run(rate=math.inf)], is_detailed=True)
    # No NaN or Infinity, which other readers of JSON refuse.
    json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert report_json.read(path) == sweep["runs"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"runs": []}', '{"runs": [3]}', '{"other": 1}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=re.escape(str(path))):
        report_json.read(path)


def test_the_table_shows_both_latencies_where_a_cap_holds_requests_back():
    plain, capped = shown(*tables.run_tables(run().figures)), shown(*tables.run_tables(run(cap=2).figures))
    assert "counted from the intended arrival" in plain
    assert "TTFT from the sending" not in plain
    assert "TTFT from the sending" in capped
    assert "Requests waited at the client" in capped
    for text in (plain, capped):
        assert "6 completed, 1 failed" in text
        assert "acceptance length" in text
        assert "5.00 ms forward" in text


def test_a_sweep_has_a_line_a_run():
    text = shown(tables.runs_table([run().figures, run(rate=math.inf, speculation="off").figures]))
    # The first comes in at a rate, 100 ms to the first token of each.
    assert re.search(r"async +2 +6 +1 .* 100 / 100 ", text)
    assert re.search(r"off +inf +6 +1 ", text)
    # Nobody was held back.
    assert "at most" not in text


def test_a_bottleneck_at_the_client_is_told():
    figures = run().figures
    assert tables.client_warning(figures) == ""
    assert "--client-processes" in tables.client_warning(figures | {"client_is_bottleneck": True})


def test_ratios_are_second_over_first():
    slow, quick = run(scale=2.0).figures, run(scale=1.0).figures
    found = compare.ratios(slow, quick)
    assert found["mean_ttft_ms"] == pytest.approx(0.5)
    assert found["output_throughput"] == pytest.approx(1.0)
    # What is 0 in the first has no ratio.
    assert "failed" not in compare.ratios(slow | {"failed": 0}, quick)


def test_runs_are_paired_by_their_labels():
    first = [{"label": "a", "duration": 1}, {"label": "b", "duration": 2}]
    second = [{"label": "b", "duration": 4}, {"label": "c", "duration": 5}]
    assert [(one["duration"], other["duration"]) for one, other in compare.pairs(first, second)] == [(2, 4)]
    # Another tool's files have none.
    assert len(compare.pairs([{"duration": 1}], [{"duration": 2}])) == 1


def test_a_comparison_reads_the_files_that_were_written(tmp_path):
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, scale in zip(paths, (2.0, 1.0), strict=True):
        report_json.write(path, [run(scale=scale)], is_detailed=False)
    text = shown(*compare.compare(*paths))
    assert re.search(r"mean_ttft_ms\W+200\W+100\W+0\.500", text)


@pytest.fixture(scope="module")
def drawn() -> dict[str, bytes]:
    """All pictures of a sweep, drawn once: that takes seconds."""
    pytest.importorskip("matplotlib")
    return plots.pictures([run(), run(rate=4.0, speculation="off")])


def test_the_report_stands_alone(drawn, monkeypatch):
    monkeypatch.setattr(report_html, "pictures", lambda runs: drawn)
    page = report_html.page([run(), run(speculation="off")], command="outrider loadtest --seed 1")
    assert "http://" not in page
    assert "https://" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert page.count("<img") == page.count('src="data:image/png;base64,') == len(drawn)
    assert "&lt;b&gt;Overloaded" in page
    assert "<b>Overloaded" not in page
    assert "outrider loadtest --seed 1" in page
    assert "coordinated omission" in page


def test_without_matplotlib_the_report_has_tables_and_says_so(monkeypatch):
    def missing(runs):
        raise MissingPackage("pictures need matplotlib")

    monkeypatch.setattr(report_html, "pictures", missing)
    page = report_html.page([run()], command="outrider loadtest")
    assert "<img" not in page
    assert "pictures need matplotlib" in page
    assert "acceptance length" in page
    assert "TTFT from the sending" in page


def test_pictures_are_png_files(drawn):
    assert {"latency_against_load", "acceptance", "round_time", "time_line"} <= drawn.keys()
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())


def test_what_lies_along_the_bottom_is_what_was_swept():
    assert plots.load_axis([run(), run(rate=4.0)])[1](run(rate=4.0)) == 4.0
    assert plots.load_axis([run(cap=1), run(cap=8)])[1](run(cap=8)) == 8
    assert plots.load_axis([run()])[1](run()) == 6 / 4


def test_what_a_server_says_is_printed_as_it_is(tmp_path):
    message = "HTTPError: no route [/v1/completions] of [bold] at [::1]:80"
    shown = run()
    shown.figures["error_counts"] = {message: 3}
    console = Console(width=200, record=True)
    for table in tables.run_tables(shown.figures):
        console.print(table)
    assert message in console.export_text()
    labelled = dataclasses.replace(shown, figures=shown.figures | {"label": "[/a]"})
    first, second = tmp_path / "[a].json", tmp_path / "[b].json"
    for path in (first, second):
        report_json.write(path, [labelled], is_detailed=False)
    for table in compare.compare(first, second):
        console.print(table)
    text = console.export_text()
    assert all(each in text for each in ("[a].json", "[b].json", "[/a]"))
