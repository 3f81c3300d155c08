"""What `outrider demo` draws."""

import io

from rich.console import Console

from outrider.client import ChoiceOutput, GenerationOutput
from outrider.client_outputs import Speculation, Timings, Usage
from outrider.deploy.demo import Progress, summary


def drawn(renderable: object) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_last_lines_and_the_counters_stay_on_screen():
    progress = Progress(prompt="one\ntwo", visible_lines=2, verify_steps=3, acceptance_length=2.5)
    progress.add(text=" and\nthr", tokens=4)
    progress.add(text="ee\n", tokens=2)
    *text, empty, counters = drawn(progress)
    assert (text, empty) == (["three", ""], "")
    assert counters.startswith("6 tokens")
    assert counters.endswith("2.50 tokens a round   3 rounds")


def test_at_the_end_everything_is_shown():
    progress = Progress(prompt="one\ntwo", text=" and\nthree")
    assert drawn(progress)[:3] == ["one", "two and", "three"]


def test_the_summary_says_what_it_cost():
    result = GenerationOutput(
        request_id="r",
        seed=1,
        choices=[ChoiceOutput(index=0, text="t", token_ids=[1])],
        usage=Usage(prompt_tokens=7, completion_tokens=40),
        speculation=Speculation(verify_steps=16, drafted_tokens=90, accepted_tokens=24, acceptance_length=2.5),
        timings=Timings(queue_ms=0.0, ttft_ms=20.4, tpot_ms=4.87, total_ms=200.0),
    )
    lines = [" ".join(line.split()) for line in drawn(summary(result))]
    assert lines == [
        "tokens 40 (prompt 7)",
        "rounds 16",
        "acceptance length 2.50 tokens a round",
        "drafted 90 nodes verified, 24 accepted",
        "time to first token 20 ms",
        "time per token after it 4.87 ms",
        "tokens per second 200.0",
    ]
