import asyncio
import json

import pytest
from benchmarks.coordinator_cpu import Bench, Ngrams, run


def test_every_part_of_a_round_has_a_cost(capsys):
    options = ["--sessions", "1", "3", "--rounds", "4", "--draft-steps", "3", "--draft-width", "4", "--json"]
    assert run(options) == 0
    single, several = json.loads(capsys.readouterr().out)
    for figures in (single, several):
        assert min(figures[name] for name in ("batch_us", "growth_us", "delivery_us", "yardstick_us")) > 0
        assert figures["round_us"] > figures["batch_us"] + figures["growth_us"]
        assert figures["nodes"] > 1
        # Trees are grown, submitted and accepted, or every round would emit one token.
        assert figures["acceptance_length"] > 1.2
    assert (single["sessions"], several["sessions"]) == (1, 3)


def test_an_answer_of_ngrams_has_a_cost(capsys):
    options = ["--sessions", "3", "--rounds", "6", "--draft-steps", "3", "--draft-width", "4", "--ngram-depth", "5"]
    assert run([*options, "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert figures["ngrams_us"] > 0
    assert figures["round_us"] > figures["batch_us"] + figures["growth_us"] + figures["ngrams_us"]
    # Every session is answered after each of its commits.
    assert figures["ngrams_nodes"] == 15


@pytest.mark.parametrize(("rounds_late", "counts"), [(0, [6, 6, 6, 6]), (2, [0, 0, 6, 6])])
def test_answers_of_ngrams_come_late_by_rounds(rounds_late: int, counts: list[int]):
    async def answered() -> list[int]:
        bench = Bench(2, width=2, max_nodes=8, ngrams=Ngrams(depth=3, rounds_late=rounds_late))
        try:
            # The sessions are opened at both drafts.
            await bench.result()
            came = []
            for _ in counts:
                _, nodes = await bench.answer()
                came.append(nodes)
                await bench.result()
            return came
        finally:
            await bench.close()

    assert asyncio.run(answered()) == counts
