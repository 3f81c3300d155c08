"""A draft model that is a table, a worker's sessions on it, and their trees as coordinators know them.

The table's logits are a function of the tokens that a row attends to, so wrong KV gives wrong logits.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tests.draft_worker.session_growth import SessionGrowth, sessions_of

from outrider.draft_worker.drafters.model.drafter import ModelDrafter
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.drafting.config import GrowthConfig
from outrider.drafting.draft_distribution import WEIGHT_SUM, DraftDistribution
from outrider.grammar.compiler import GrammarCompiler
from outrider.kernels.noise import STREAM_DRAFT, gumbel_noise, philox_uint32
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule

VOCAB, BRANCHING = 24, 4
_SHARPNESS = 2.5

Context = tuple[int, ...]


def table_logits(context: Sequence[int]) -> np.ndarray:
    """Return [V] logits after `context`; any change of any token changes them."""
    words = np.random.SeedSequence([len(context), *context]).generate_state(VOCAB)
    return (_SHARPNESS * (words.astype(np.float64) / 2**32 * 3.46 - 1.73)).astype(np.float32)


class TableModel:
    """Keep each slot's token and position as its KV, and check that every row attends to exactly one path.

    Attributes:
        steps: of each step, the tokens that its rows attend to, themselves included.
        on_step: called in every step.
    """

    def __init__(self, num_slots: int) -> None:
        self.steps: list[list[Context]] = []
        self.on_step: Callable[[], None] = lambda: None
        # One more for padding.
        self._stored = np.full((num_slots + 1, 2), -1)

    @property
    def computed(self) -> list[Context]:
        """Rows of all steps."""
        return [context for step in self.steps for context in step]

    def logits(self, packed: Packed, pool: Pool, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """See `PackedForward.logits`."""
        count, sessions = int(packed.query_start[-1]), packed.sessions.tolist()
        assert max(Counter(sessions[:count]).values()) <= most
        columns = torch.stack([packed.tokens[:count], packed.positions[:count]], 1)
        self._stored[packed.slots[:count].numpy()] = columns.numpy()
        keys = [pool.table[row].numpy() if row >= 0 else None for row in packed.pool_rows.tolist()]
        contexts = [self._context(packed, row, keys[sessions[row]]) for row in range(count)]
        self.steps.append(contexts)
        self.on_step()
        found = [table_logits(contexts[row]) for row in rows.tolist()]
        return torch.from_numpy(np.array(found, dtype=np.float32).reshape(len(found), VOCAB))

    def _context(self, packed: Packed, row: int, keys: Any) -> Context:
        session, words = int(packed.sessions[row]), packed.tree_mask[row].tolist()
        bits = [64 * word + bit for word, number in enumerate(words) for bit in range(64) if number >> bit & 1]
        visible = [*range(int(packed.prefix_len[row])), *(int(packed.tree_start[session]) + bit for bit in bits)]
        assert max(visible) < int(packed.key_len[session])
        seen = sorted(self._stored[keys[visible]].tolist(), key=lambda stored: stored[1])
        assert [position for _, position in seen] == list(range(int(packed.positions[row]) + 1)), "not one path"
        return tuple(token for token, _ in seen)


def processed(logits: np.ndarray, context: Sequence[int], prompt_len: int, spec: SamplingSpec) -> np.ndarray:
    """Return [V] logits of the next token after penalties, bias, allowed tokens and the ban of stops, in float64."""
    values, output = logits.astype(np.float64), [*context[prompt_len:]]
    for token in set(context) if spec.has_penalties else ():
        values[token] *= spec.repetition_penalty ** (-1 if values[token] > 0 else 1)
        values[token] -= spec.frequency_penalty * output.count(token) + spec.presence_penalty * (token in output)
    for token, bias in spec.logit_bias.items():
        values[token] += bias
    if spec.allowed_token_ids:
        values[[token for token in range(len(values)) if token not in spec.allowed_token_ids]] = -np.inf
    if len(output) < spec.min_new_tokens:
        values[[token for token in spec.stop_token_ids if token < len(values)]] = -np.inf
    return values


def law_after(context: Sequence[int], prompt_len: int, spec: SamplingSpec) -> torch.Tensor:
    """Return [V] log probabilities of the next token, after every processor and top-k, in float64."""
    values = processed(table_logits(context), context, prompt_len, spec)
    if spec.top_k:
        values[values < np.sort(values)[-spec.top_k]] = -np.inf
    return torch.log_softmax(torch.from_numpy(values) / (spec.temperature or 1), dim=0)


def best_children(context: Sequence[int], law: torch.Tensor, spec: SamplingSpec) -> list[int]:
    """Return the children of a node by its law, best first, under every rule but rejection."""
    scores, allowed = law, int(torch.isfinite(law).sum())
    if spec.temperature > 0 and spec.rule is VerificationRule.COUPLED:
        noise = gumbel_noise(_seed(spec), torch.tensor([len(context)]), VOCAB, 0, spec.choice_index)
        scores = law + noise[0]
    return scores.topk(min(BRANCHING, allowed)).indices.tolist()


def check_draw(q: DraftDistribution | None, token: int, context: Sequence[int], law: torch.Tensor, spec: SamplingSpec):
    """Check a node of a chain: q is the law, cut to its best tokens, and the token is what q and the position give."""
    assert q is not None
    assert q.fault(token, VOCAB) is None
    best = np.sort(law.topk(len(q.token_ids)).indices.numpy())
    assert q.token_ids.tolist() == best.tolist()
    mass = law.exp().numpy()[best]
    np.testing.assert_allclose(q.weights / WEIGHT_SUM, mass / mass.sum(), atol=1e-6)
    word = philox_uint32(
        _seed(spec), torch.tensor([len(context)]), torch.tensor([[0]]), STREAM_DRAFT, spec.choice_index
    )
    assert token == q.draw(int(word))


def _seed(spec: SamplingSpec) -> torch.Tensor:
    return torch.from_numpy(np.array([spec.seed], dtype=np.uint64).view(np.int64))


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as a coordinator knows it; `context` is every token from the prompt's first to the node's own."""

    node_id: int
    context: Context
    acceptance: float
    distribution: DraftDistribution | None


class Mirror:
    """A session's tree as its coordinator knows it.

    Attributes:
        start: what opened the session.
        tokens: committed.
        nodes: that came, by id; in sync mode those of the round.
        growths: that came.
    """

    def __init__(self, start: SessionStart) -> None:
        self.start, self.tokens = start, [*start.prompt, *start.output]
        self.nodes: dict[int, Node] = {}
        self.growths: list[SessionGrowth] = []
        self._ids: set[int] = set()

    @property
    def live(self) -> list[Node]:
        """Nodes below the root."""
        root = tuple(self.tokens)
        return [n for n in self.nodes.values() if len(n.context) > len(root) and n.context[: len(root)] == root]

    @property
    def expanded(self) -> dict[Context, list[Node]]:
        """Children of the root and of live nodes, by their parents' contexts."""
        found: dict[Context, list[Node]] = {}
        for node in self.live:
            found.setdefault(node.context[:-1], []).append(node)
        return found

    def value(self, node: Node) -> float:
        """Estimate that verification reaches a live node."""
        value, by_context = 1.0, {other.context: other for other in self.nodes.values()}
        for length in range(len(self.tokens) + 1, len(node.context) + 1):
            value *= by_context[node.context[:length]].acceptance
        return value

    def receive(self, own: SessionGrowth) -> None:
        """Graft growth, or compare what is sent again; whatever it may not be fails."""
        assert own.owner is self.start.owner
        assert own.as_of <= len(self.tokens)
        if own.again:
            self._compare(own)
            self.growths.append(own)
            return
        contexts = {node.context for node in self.nodes.values()}
        for node_id, parent, token, acceptance, q in zip(
            own.node_ids, own.parents, own.tokens, own.acceptance, own.distributions, strict=True
        ):
            assert node_id not in self._ids
            # Ids rise; in sync mode the best node of a round comes first.
            assert node_id > max(self._ids, default=0) or self.start.is_sync
            above = self.nodes[parent].context if parent else tuple(self.tokens[: own.as_of])
            node = Node(node_id=node_id, context=(*above, token), acceptance=acceptance, distribution=q)
            assert node.context not in contexts, "a node came twice"
            assert 0 <= acceptance <= 1
            self.nodes[node_id] = node
            self._ids.add(node_id)
            contexts.add(node.context)
        self.growths.append(own)

    def _compare(self, own: SessionGrowth) -> None:
        """Check that a tree that is sent again is all that was alive when it was read."""
        if self.start.is_sync and own.as_of < len(self.tokens):
            return
        root = tuple(self.tokens[: own.as_of])
        contexts: dict[int, Context] = {0: root}
        columns = own.node_ids, own.parents, own.tokens, own.acceptance, own.distributions
        for node_id, parent, token, acceptance, q in zip(*columns, strict=True):
            contexts[node_id] = (*contexts[parent], token)
            # Whoever computes a node a second time may think better of it.
            assert acceptance >= self.nodes[node_id].acceptance
            assert q is self.nodes[node_id].distribution
        del contexts[0]
        known = {node.node_id: node.context for node in self.nodes.values()}
        below = {
            n: context for n, context in known.items() if context[: len(root)] == root and len(context) > len(root)
        }
        assert contexts == below
        assert own.complete == any(earlier.complete and earlier.as_of == own.as_of for earlier in self.growths)

    def commit(self, tokens: Sequence[int]) -> None:
        """Move the root; in sync mode the tree is gone."""
        self.tokens += tokens
        if self.start.is_sync:
            self.nodes.clear()

    def check_children(self, least: int = 1) -> None:
        """Check that every expanded node has the children that the model gives for exactly its own path."""
        spec, prompt_len = self.start.sampling, len(self.start.prompt)
        expanded = self.expanded
        assert len(expanded) >= least
        for context, children in expanded.items():
            law = law_after(context, prompt_len, spec)
            tokens = [node.context[-1] for node in sorted(children, key=lambda node: node.node_id)]
            if spec.rule is VerificationRule.REJECTION:
                (node,) = children
                check_draw(node.distribution, tokens[0], context, law, spec)
            else:
                assert tokens == best_children(context, law, spec)
                assert all(node.distribution is None for node in children)


def session_start(number: int = 1, *, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> SessionStart:
    """Return what opens a session: fields of `SessionStart`, of `GrowthLimits`, or `sampling`."""
    names = {"mode", "max_live_nodes", "max_depth", "sync_nodes"} & set(changes)
    bounds: dict[str, Any] = {"max_live_nodes": 64}
    limits = GrowthLimits(**bounds | {name: changes.pop(name) for name in names})
    fields = {
        "key": (7, number), "owner": "owner", "epoch": 1, "output": (), "sampling": SamplingSpec(max_new_tokens=100),
    }  # fmt: skip
    return SessionStart(prompt=prompt, limits=limits, **fields | changes)


def sync_start(number: int = 1, **changes: Any) -> SessionStart:
    """Return what opens a session in sync mode."""
    fields = {"mode": SpeculationMode.SYNC, "max_depth": 5, "sampling": SamplingSpec(temperature=0.7, seed=3)}
    return session_start(number, **fields | changes)


def next_growth(drafter: ModelDrafter | Drafters, ready: deque[Growth]) -> Growth | None:
    """Run until growth is `ready`, and take it; None if there is nothing to do until the next command."""
    while not ready:
        ready.extend(drafter.advance())
        if not ready and not drafter.is_busy:
            return None
    return ready.popleft()


class Bench:
    """A drafter on a table, and the mirrors of its sessions.

    Attributes:
        model, drafter: see there.
        drafters: the same behind its front.
        mirrors: of the open sessions, by number.
    """

    def __init__(
        self, *, num_slots: int = 600, max_sessions: int = 8, grammars: GrammarCompiler | None = None, **config: Any
    ) -> None:
        settings = {"max_model_len": 200, "min_path_value": 0.0, "min_acceptance": 0.0} | config
        self.model = TableModel(num_slots)
        self.drafter = ModelDrafter(
            self.model, GrowthConfig(**settings), max_sessions=max_sessions, num_slots=num_slots, vocab_size=VOCAB,
            grammars=grammars,
        )  # fmt: skip
        self.drafters = Drafters(self.drafter, None)
        self.mirrors: dict[int, Mirror] = {}
        self._ready: deque[Growth] = deque()

    def open(self, number: int = 1, **fields: Any) -> Mirror:
        """Open a session; fields as of `session_start`."""
        return self.open_start(session_start(number, **fields))

    def open_start(self, start: SessionStart) -> Mirror:
        """Open a session."""
        self.drafters.open(start)
        mirror = self.mirrors[start.key[1]] = Mirror(start)
        return mirror

    def commit(self, number: int, tokens: Sequence[int]) -> None:
        """Commit tokens behind all that were committed."""
        mirror = self.mirrors[number]
        self.drafters.commit(mirror.start.key, mirror.start.epoch, len(mirror.tokens), tokens)
        mirror.commit(tokens)

    def resend(self, number: int) -> None:
        """Have a session's tree sent again."""
        start = self.mirrors[number].start
        self.drafters.resend(start.key, start.epoch)

    def close(self, number: int) -> None:
        """Close a session."""
        start = self.mirrors.pop(number).start
        self.drafters.close(start.key, start.epoch)

    def step(self) -> Growth | None:
        """Run a step, and graft what came."""
        growth = next_growth(self.drafters, self._ready)
        for own in sessions_of(growth):
            mirror = self.mirrors.get(own.session_id)
            if mirror is not None and mirror.start.epoch == own.epoch:
                mirror.receive(own)
        return growth

    def finish(self, most: int = 300) -> list[Growth]:
        """Run steps until there is nothing to do."""
        done = []
        while (growth := self.step()) is not None:
            done.append(growth)
            assert len(done) < most, "does not come to rest"
        return done

    def check_all_given_back(self) -> None:
        """Close what is open; then every slot and every row is free."""
        for number in list(self.mirrors):
            self.close(number)
        self.finish()
        assert (self.drafter.num_sessions, self.drafter.slots_used) == (0, 0)
        assert self.step() is None
