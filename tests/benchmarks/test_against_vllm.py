"""The benchmark of vLLM's engine, with an engine that only counts."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks.against_vllm import Bench, main
from benchmarks.end_bench.prompts import Prompts
from tests.chat_llama import write_chat_llama

from outrider.coordinator.bench.prompts import DEFAULT_FILE, read_prompts
from outrider.models import embedded_target_path

_STEP_S = 0.25


@dataclass
class FakeEngine:
    """Emits a token of every request in its first steps, then two, of which a draft has guessed one.

    Attributes:
        slow_steps: steps before it speculates.
        now_s: its clock.
        most, seen: requests under way at a time, and all of them with their sampling parameters.
    """

    slow_steps: int = 0
    now_s: float = 0.0
    most: int = 0
    seen: dict[str, Any] = field(default_factory=dict)
    running: dict[str, list[int]] = field(default_factory=dict)
    drafts: int = 0

    def add_request(self, request_id: str, prompt: Any, sampling: Any) -> None:
        assert request_id not in self.seen
        self.seen[request_id] = sampling
        self.running[request_id] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.running[request_id]

    def step(self) -> list[Any]:
        self.now_s += _STEP_S
        self.most = max(self.most, len(self.running))
        self.slow_steps -= 1
        emitted = 1 if self.slow_steps >= 0 else 2
        outputs = []
        for request_id, tokens in list(self.running.items()):
            self.drafts += emitted - 1
            tokens.extend([7] * min(emitted, self.seen[request_id].max_tokens - len(tokens)))
            finished = len(tokens) == self.seen[request_id].max_tokens
            if finished:
                del self.running[request_id]
            output = SimpleNamespace(token_ids=list(tokens))
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[output], finished=finished))
        return outputs

    def get_metrics(self) -> list[Any]:
        names = ("num_drafts", "num_accepted_tokens")
        counters = [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=self.drafts) for name in names]
        return [*counters, SimpleNamespace(name="vllm:time_to_first_token_seconds", buckets={})]


def fake_vllm(engine: FakeEngine) -> Any:
    vllm: Any = ModuleType("vllm")
    vllm.__version__ = "0.0"
    vllm.SamplingParams = vllm.TokensPrompt = vllm.EngineArgs = SimpleNamespace
    vllm.LLMEngine = SimpleNamespace(from_engine_args=lambda given: engine)
    return vllm


def test_a_window_counts_its_own_steps_of_a_closed_loop():
    engine = FakeEngine(slow_steps=4)
    bench = Bench(
        vllm=fake_vllm(engine),
        engine=engine,
        prompts=Prompts(token_ids=[[1], [2]], categories=["chat", "code"]),
        max_new_tokens=8,
        warm_up_s=1.0,
        measure_s=2.0,
        clock=lambda: engine.now_s,
    )
    assert bench.measure(1.0, 3) == {
        "temperature": 1.0,
        "sessions": 3,
        "seconds": 2.0,
        "tokens_per_s": 3 * 2 / _STEP_S,
        "acceptance_length": 2.0,
        "step_ms": 1e3 * _STEP_S,
    }
    assert engine.most == 3
    # Of 20 tokens a session, 8 each: two requests have ended and a third was aborted.
    assert len(engine.seen) == 9
    assert engine.running == {}
    assert {sampling.seed for sampling in engine.seen.values()} == set(range(9))
    assert {sampling.ignore_eos for sampling in engine.seen.values()} == {True}
    # Requests in turn: three that began before it, with four tokens of the warm-up, and three that began in it.
    slow, fast = 8 / 1.5, 8 / 1.0
    assert bench.categories == [
        {
            "temperature": 1.0,
            "sessions": 3,
            "category": category,
            "requests": 3,
            "tokens_per_verification": 3 * 8 / steps,
            "request_tokens_per_s": pytest.approx(tokens_per_s),
        }
        for category, steps, tokens_per_s in (
            ("chat", 6 + 6 + 4, (slow + slow + fast) / 3),
            ("code", 6 + 4 + 4, (slow + fast + fast) / 3),
        )
    ]


def test_figures_are_written_with_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    engine, path = FakeEngine(), tmp_path / "vllm.json"
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm(engine))
    arguments = ["--target", str(embedded_target_path()), "--sessions", "1", "2", "--temperatures", "0"]
    assert main([*arguments, "--warm-up", "0", "--measure", "0.001", "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [cell["sessions"] for cell in found["cells"]] == [1, 2]
    assert (found["versions"]["vllm"], found["draft_tokens"]) == ("0.0", 0)
    assert found["command"].startswith("python benchmarks/against_vllm.py --target")


def test_conversations_end_where_the_model_ends_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    engine, path, target = FakeEngine(), tmp_path / "vllm.json", write_chat_llama(tmp_path / "target")
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm(engine))
    arguments = ["--target", str(target), "--prompts", str(DEFAULT_FILE), "--sessions", "9", "--temperatures", "0"]
    assert (
        main([*arguments, "--warm-up", "0", "--measure", "1", "--max-new-tokens", "4", "--output-json", str(path)]) == 0
    )
    assert all((one.ignore_eos, one.stop_token_ids) == (False, [1]) for one in engine.seen.values())
    # A prompt of each category after the other: nine sessions begin with one of each.
    categories = {row["category"] for row in json.loads(path.read_text())["categories"]}
    assert categories == {prompt.category for prompt in read_prompts(DEFAULT_FILE)}


def test_vllm_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["--target", "nowhere"]) == 1
    assert "pip install vllm" in capsys.readouterr().err
