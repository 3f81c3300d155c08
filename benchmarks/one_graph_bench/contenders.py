"""The contenders over one loaded target: plain steps, trees of the resident head, one-graph rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.one_graph_bench.drive import Pace, Sessions
from benchmarks.target_bench.models import BenchModel
from tokenizers import Tokenizer

from outrider.engine.buckets import Bucket
from outrider.engine.model_runner import ModelRunner
from outrider.engine.one_graph_buckets import RoundNeeds
from outrider.engine.one_graph_shape import RoundShape
from outrider.models import held_out_prompts
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.one_graph import RoundDraft
from outrider.target_worker.one_graph_setup import make_rounds
from outrider.target_worker.resident import ResidentDraft
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.verifier import Verifier

# What trees are grown with: small batches have room for deep ones.
_DEEP = {"depth": 4, "top_k": 4, "nodes": 12}
_SHALLOW = {"depth": 2, "top_k": 3, "nodes": 3}
# Rows of the largest captured step: a coordinator's trees stay within them, too.
_MOST_ROWS = 512
_NEW_TOKENS = 1024
_FEW_SESSIONS, _MANY_SESSIONS = 8, 48


class Bench:
    """A target that is loaded once.

    Args:
        model: the target.
        head: folder of the head.
        device: of both.
        context: tokens of each prompt.
        most: sessions of the largest batch.
    """

    def __init__(self, model: BenchModel, head: Path, *, device: str, context: int, most: int) -> None:
        config = TargetWorkerConfig(
            model_path=model.folder,
            device=device,
            enable_prefix_caching=False,
            max_num_seqs=max(most, 2),
            max_model_len=context + _NEW_TOKENS,
            max_tree_nodes=64,
            max_step_tokens=max(_MOST_ROWS, most),
        )
        self._config = config
        self.runner = ModelRunner(config.engine(), decoder=True, source=model.source, draft_head=head)
        deep, shallow = (ResidentConfig(head=head, max_sessions=most, **sizes) for sizes in (_DEEP, _SHALLOW))
        self.resident = ResidentDraft.load(deep, self.runner)
        self._shallow = ResidentDraft(self.resident.head, self.runner, shallow)
        self._rounds: dict[RoundShape, RoundDraft] = {}
        self._prompts = self._tokenised(model, context)

    def measure(
        self, count: int, shapes: Sequence[RoundShape], *, rounds: int, contenders: Sequence[str], temperature: float
    ) -> dict[str, Pace]:
        """Every contender with so many sessions that sample at `temperature`, by name."""
        common: dict[str, Any] = {"rounds": rounds, "temperature": temperature}
        paces: dict[str, Pace] = {}
        if "off" in contenders:
            self._capture([count])
            paces["off"] = self._paced(self._verifier(), count, **common)
        if "tree" in contenders:
            found: list[tuple[str, Pace]] = []
            for nodes in self._tree_sizes(count):
                self._capture([count * (1 + nodes)], sessions=count, query_len=1 + nodes)
                draft = self.resident if nodes > _SHALLOW["nodes"] else self._shallow
                draft.grows = True
                pace = self._paced(self._verifier(resident=draft), count, nodes=nodes, draft=draft, **common)
                found.append((f"tree of {nodes}", pace))
            paces |= dict(sorted(found, key=lambda entry: -entry[1].tokens_per_second)[:1])
        if "one-graph" in contenders:
            for shape in shapes:
                if count * shape.rows <= _MOST_ROWS:
                    verifier = self._round_verifier(count, shape)
                    name = f"one-graph {shape.steps}x{shape.candidates}"
                    paces[name] = self._paced(verifier, count, resident=True, **common)
        return paces

    def warm_rounds(self, count: int, shape: RoundShape) -> tuple[Verifier, Sessions]:
        """Sessions of one-graph rounds that have run some."""
        verifier = self._round_verifier(count, shape)
        sessions = Sessions(verifier, self._prompts_of(count), resident=True)
        sessions.warm_up()
        return verifier, sessions

    def _paced(
        self,
        verifier: Verifier,
        count: int,
        *,
        rounds: int,
        temperature: float,
        nodes: int = 0,
        resident: bool = False,
        draft: ResidentDraft | None = None,
    ) -> Pace:
        sessions = Sessions(
            verifier,
            self._prompts_of(count),
            nodes=nodes,
            resident=resident,
            draft=draft,
            temperature=temperature,
        )
        sessions.warm_up()
        pace = sessions.run(rounds=rounds)
        sessions.close()
        return pace

    def _verifier(self, *, resident: ResidentDraft | None = None, rounds: RoundDraft | None = None) -> Verifier:
        config = self._config
        return Verifier(
            self.runner,
            max_step_tokens=config.max_step_tokens,
            max_prefill_tokens=config.prefill_tokens,
            resident=resident,
            rounds=rounds,
        )

    def _round_verifier(self, count: int, shape: RoundShape) -> Verifier:
        if shape not in self._rounds:
            self._rounds[shape] = make_rounds(
                self.runner, self.resident, shape, max_step_tokens=self._config.max_step_tokens
            )
        rounds = self._rounds[shape]
        self.resident.grows = False
        rounds.runner.warm_up([rounds.runner.ladder.bucket(count, RoundNeeds())])
        return self._verifier(resident=self.resident, rounds=rounds)

    def _capture(self, tokens: Sequence[int], *, sessions: int | None = None, query_len: int = 1) -> None:
        """The graphs of steps that verify so many rows."""
        steps = self.runner.steps
        assert steps is not None
        need = Bucket(tokens=1, sessions=1, keys=1, query_len=query_len, logit_rows=1, nodes=query_len, words=1)
        buckets = [
            steps.ladder.bucket(replace(need, tokens=count, sessions=sessions or count, logit_rows=count))
            for count in tokens
        ]
        steps.warm_up(buckets)

    def _tree_sizes(self, count: int) -> list[int]:
        """Nodes a session: as many as such a batch may have room for, and less."""
        sizes = (6, 12) if count <= _FEW_SESSIONS else (3, 6) if count < _MANY_SESSIONS else (1, 3)
        return [size for size in sizes if count * (1 + size) <= _MOST_ROWS] or [0]

    def _prompts_of(self, count: int) -> list[list[int]]:
        return [self._prompts[number % len(self._prompts)] for number in range(count)]

    def _tokenised(self, model: BenchModel, context: int) -> list[list[int]]:
        tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
        ids = [tokenizer.encode(text).ids[:context] for text in held_out_prompts()]
        return [prompt for prompt in ids if len(prompt) == context] or ids
