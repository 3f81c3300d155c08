"""The side-by-side benchmark without a GPU: what its contenders generate, and how they are summed up."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from benchmarks.target_bench import against_transformers
from benchmarks.target_bench.against_transformers import (
    BASELINE,
    Contender,
    Generation,
    OutriderContender,
    measure,
    parse,
    print_table,
    transformers_contenders,
)

from outrider.client import Client
from outrider.models import embedded_draft_path, embedded_target_path

PROMPT = list(range(100, 116))


def generation(tokens: list[int], seconds: float, steps: int = 1) -> Generation:
    return Generation(token_ids=tokens, seconds=seconds, tpot_ms=1e3 * seconds, ttft_ms=1.0, steps=steps)


def test_summaries_are_of_turns_and_ratios_within_them(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def contender(name: str, answers: list[Generation]) -> Contender:
        def one(_prompt: list[int]) -> Generation:
            calls.append(name)
            return answers.pop(0)

        return one

    warm = generation([1, 2], 9.0)
    base = [warm, generation([1, 2], 1.0), generation([1, 2], 2.0), generation([1, 2], 4.0)]
    fast = [warm, generation([1, 2], 0.5), generation([1, 3], 0.5), generation([1, 2], 1.0, steps=2)]
    rows = measure(
        {BASELINE: contender("base", base), "fast": contender("fast", fast)}, [PROMPT], repeats=3, say=lambda _: None
    )
    assert calls == ["base", "fast"] * 4
    assert [row.contender for row in rows] == [BASELINE, "fast"]
    assert (rows[0].tokens_per_second, rows[0].ratio, rows[0].same_tokens) == (1.0, 1.0, 1.0)
    assert (rows[1].tokens_per_second, rows[1].ratio) == (4.0, 4.0)
    assert rows[1].same_tokens == pytest.approx(2 / 3) and rows[1].tokens_per_step == pytest.approx(6 / 4)
    print_table(rows, "title")
    assert "4.00" in capsys.readouterr().err


def test_contenders_generate_the_same_tokens() -> None:
    arguments = parse(["--device", "cpu", "--dtype", "float32", "--max-new-tokens", "12"])
    contenders = transformers_contenders(embedded_target_path(), embedded_draft_path(), arguments)
    plain, assisted = (contenders[name](PROMPT) for name in (BASELINE, "transformers assisted"))
    assert len(plain.token_ids) == 12 and plain.token_ids == assisted.token_ids
    assert plain.steps == 12 and assisted.steps < 12
    for one in (plain, assisted):
        assert 0 < one.tpot_ms < 1e3 * one.seconds and 0 < one.ttft_ms < 1e3 * one.seconds


def test_outrider_is_asked_for_the_same() -> None:
    asked: list[dict[str, object]] = []

    class Service:
        def generate(self, prompt: list[int], **options: object) -> object:
            asked.append({"prompt": prompt, **options})
            timings = SimpleNamespace(ttft_ms=3.0, tpot_ms=2.0)
            return SimpleNamespace(token_ids=(5, 6), timings=timings, speculation=SimpleNamespace(verify_steps=1))

    one = OutriderContender(cast(Client, Service()), "sync", max_new_tokens=12)(PROMPT)
    assert (one.token_ids, one.ttft_ms, one.tpot_ms, one.steps) == ([5, 6], 3.0, 2.0, 1)
    assert asked == [
        {"prompt": PROMPT, "max_new_tokens": 12, "temperature": 0, "ignore_eos": True, "speculation": "sync"}
    ]


def test_models_never_stop_by_themselves() -> None:
    model = against_transformers.load(embedded_draft_path(), parse(["--device", "cpu", "--dtype", "float32"]))
    assert model.generation_config.eos_token_id is None
    assert next(model.parameters()).dtype == torch.float32


def test_both_folders_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--target", str(Path("somewhere"))])
    assert "give both folders or none" in capsys.readouterr().err
