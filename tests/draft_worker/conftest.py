"""A model as a table: its logits are a function of the tokens that a row attends to, so wrong KV gives wrong logits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.session import DraftSession, GrowthLimits, SessionStart
from outrider.engine.batch import ForwardBatch
from outrider.engine.draft_staging import GrowthRows
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_trees import RECORD
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.noise import gumbel_noise
from outrider.sampling import SamplingSpec

VOCAB = 24
SHARPNESS = 2.5


def table_logits(context: Sequence[int]) -> np.ndarray:
    """[V] logits after `context`; any change of any token changes them."""
    words = np.random.SeedSequence([len(context), *context]).generate_state(VOCAB)
    return (SHARPNESS * (words.astype(np.float64) / 2**32 * 3.46 - 1.73)).astype(np.float32)


class TableRunner:
    """Keeps each slot's token and position as its KV and checks what rows attend to."""

    def __init__(self, *, num_slots: int = 600, max_rows: int = 8, max_row_len: int = 300) -> None:
        self.slots = SlotTable(num_slots=num_slots, max_rows=max_rows, max_row_len=max_row_len)
        self.vocab_size = VOCAB
        self.batches: list[ForwardBatch] = []
        self.on_forward: Callable[[], None] | None = None
        self._stored = np.full((num_slots, 2), -1, dtype=np.int64)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        contexts = []
        for session, row in enumerate(batch.rows):
            keys = self.slots.table[row]
            span = range(batch.query_start[session], batch.query_start[session + 1])
            for query in span:
                slot = keys[batch.write_index[query]]
                assert slot >= 0, "a row writes to no slot"
                self._stored[slot] = batch.token_ids[query], batch.positions[query]
            contexts += [self._context(batch, session, keys, query) for query in span]
        if self.on_forward is not None:
            self.on_forward()
        wanted = [table_logits(contexts[row]) for row in batch.logit_rows]
        return torch.from_numpy(np.array(wanted, dtype=np.float32).reshape(len(wanted), VOCAB))

    def _context(self, batch: ForwardBatch, session: int, keys: np.ndarray, query: int) -> list[int]:
        visible = list(range(batch.prefix_len[query]))
        start = batch.tree_start[session]
        for word, bits in enumerate(batch.tree_mask[query].view(np.uint64).tolist()):
            visible += [start + 64 * word + bit for bit in range(64) if bits >> bit & 1]
        assert max(visible) < batch.key_len[session]
        seen = sorted((self._stored[keys[index]].tolist() for index in visible), key=lambda stored: stored[1])
        assert [position for _, position in seen] == list(range(batch.positions[query] + 1)), "not one path"
        return [token for token, _ in seen]


class TableStep:
    """A staged step: computed when it is launched, as what follows on a device's stream would find it."""

    is_done, logits, features = True, None, None

    def __init__(self, rows: GrowthRows, children: int) -> None:
        self.rows, self.count = rows, children
        self.bucket = SimpleNamespace(tokens=rows.num_rows)
        self.found: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def wait(self) -> None:
        """Nothing to wait for."""

    def device_ns(self) -> int:
        return 0

    def children(self) -> SimpleNamespace:
        assert self.found is not None
        return SimpleNamespace(**dict(zip(("tokens", "log_q", "scores"), self.found, strict=True)))


class TableSteps:
    """Staged steps of a table; tokens that are promised come from the step before.

    Attributes:
        promised: rows so far whose token was.
        due: what is to be captured before the next step.
    """

    takes_trees = True

    def __init__(self, forward: Callable[[ForwardBatch], torch.Tensor]) -> None:
        self._forward = forward
        self._best_children: list[int] = []
        self.promised = 0
        self.due: str | None = None

    def capture(self, bucket: str) -> None:
        """Runs the program, which leaves other children in the place of the last step's."""
        assert bucket == self.due
        self.due, self._best_children = None, []

    def stage_growth(self, growth: GrowthRows, *, children: int, words: int) -> TableStep:
        del words
        return TableStep(growth, children)

    def launch(self, step: TableStep) -> TableStep:
        rows = step.rows
        rows.unpack()
        self.promised += sum(token < 0 for token in rows.tokens)
        rows.tokens = [token if token >= 0 else max(self._best_children[-1 - token], 0) for token in rows.tokens]
        logits = self._forward(rows.batch())
        if rows.wanted:
            columns = np.frombuffer(b"".join(rows.records), dtype=RECORD)
            positions = torch.tensor(rows.positions)[torch.tensor(rows.wanted)] + 1
            sampling = {name: torch.from_numpy(columns[name].copy()) for name in RECORD.names or ()}
            seeds = sampling["seeds"].view(torch.int64)
            found = coupled_topk_scored(
                logits, seeds, positions, sampling["temperature"], sampling["top_k"], sampling["top_p"],
                sampling["min_p"], choice_index=sampling["choice_index"], k=step.count,
            )  # fmt: skip
            step.found = found[0].numpy(), found[1].numpy(), found[2].numpy()
            self._best_children = found[0][:, 0].tolist()
        return step


@pytest.fixture
def logits_after() -> Callable[[Sequence[int]], np.ndarray]:
    return table_logits


@pytest.fixture
def make_runner() -> Callable[..., TableRunner]:
    return TableRunner


@pytest.fixture
def make_growth() -> Callable[..., tuple[TreeGrowth, TableRunner]]:
    def make(*, runner: dict[str, int] | None = None, **config: Any) -> tuple[TreeGrowth, TableRunner]:
        table = TableRunner(**(runner or {}))
        settings = {"max_model_len": 200, "min_path_value": 0.0, "min_acceptance": 0.0} | config
        return TreeGrowth(table, GrowthConfig(**settings)), table

    return make


@pytest.fixture
def make_queued_growth(make_growth: Callable[..., Any]) -> Callable[..., tuple[TreeGrowth, TableSteps]]:
    """Growth whose steps are staged, of which two may be under way."""

    def make(**options: Any) -> tuple[TreeGrowth, TableSteps]:
        plain, table = make_growth(**options)
        table.steps = TableSteps(table.forward)
        growth = TreeGrowth(table, plain.config)
        growth._launcher.overlaps = True
        return growth, table.steps

    return make


@pytest.fixture
def make_start() -> Callable[..., SessionStart]:
    def make(session_id: int = 1, *, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> SessionStart:
        limits = changes.pop("limits", GrowthLimits())
        sampling = changes.pop("sampling", SamplingSpec(max_new_tokens=100))
        fields = {"key": (7, session_id), "owner": "owner", "epoch": 1, "output": ()} | changes
        return SessionStart(prompt=prompt, sampling=sampling, limits=limits, **fields)

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class GrowthTools:
    """Runs growth to its end, and says what it should have given."""

    @staticmethod
    def finish(growth: TreeGrowth, steps: int = 200) -> list[GrowthStep]:
        """Steps until there is nothing to do."""
        done = []
        while (step := growth.step()) is not None:
            done.append(step)
            assert len(done) < steps, "does not come to rest"
        return done

    @staticmethod
    def growths_of(steps: list[GrowthStep], session_id: int = 1) -> list[SessionGrowth]:
        return [growth for step in steps for growth in step.growths if growth.session_id == session_id]

    @staticmethod
    def open_session(growth: TreeGrowth, key: tuple[int, int] = (7, 1)) -> DraftSession:
        session = growth.session(key)
        assert session is not None
        return session

    @staticmethod
    def check_children(
        session: DraftSession, logits_after: Callable[[Sequence[int]], np.ndarray], least: int = 1
    ) -> None:
        """Every expanded node has the children that the model gives for exactly its own path."""
        expanded = [node for node in (session.tree.root, *session.tree.nodes()) if node.child_tokens is not None]
        assert len(expanded) >= least
        for node in expanded:
            context = session.tokens + GrowthTools.path_tokens(node)
            assert node.position == len(context) - 1
            assert node.child_tokens == GrowthTools.expected_children(
                logits_after(context), session.sampling, len(context)
            )

    @staticmethod
    def path_tokens(node: DraftNode) -> list[int]:
        tokens: list[int] = []
        walk: Any = node
        while walk.parent is not None:
            tokens.insert(0, walk.token)
            walk = walk.parent
        return tokens

    @staticmethod
    def expected_children(logits: np.ndarray, spec: SamplingSpec, position: int, count: int = 4) -> list[int]:
        values = torch.from_numpy(logits)
        if spec.temperature > 0:
            values = torch.log_softmax(values / spec.temperature, dim=0)
            seeds = torch.from_numpy(np.array([spec.seed], dtype=np.uint64).view(np.int64))
            positions = torch.tensor([position])
            values = values + gumbel_noise(seeds, positions, len(values), 0, spec.choice_index)[0]
        return values.topk(count).indices.tolist()

    @staticmethod
    def ancestors(node: DraftNode) -> list[DraftNode]:
        return [] if node.parent is None else [node.parent, *GrowthTools.ancestors(node.parent)]


@pytest.fixture
def tools() -> GrowthTools:
    return GrowthTools()
