"""A draft model that grows the trees of its sessions, one step after the other.

The trees are a pool on the model's device. The host says what is opened, committed and closed by records, launches
steps, one ahead of the report it reads, and turns reports into growth. One thread calls everything here.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.draft_worker.drafters.model.choices import HostChoices, SessionNodes
from outrider.draft_worker.drafters.model.session import ModelSession
from outrider.draft_worker.drafters.model.sync_tree import SyncTree
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, Key, SessionStart
from outrider.drafting import acceptance_calibration, expansions
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.drafting.config import GrowthConfig
from outrider.drafting.draft_distribution import DraftDistribution
from outrider.drafting.expansions import Expansions
from outrider.drafting.growth_source import GrowthSource
from outrider.drafting.program import MAX_STEP_COMMITS, GrowthProgram
from outrider.engine.packed_forward import ForwardPass
from outrider.engine.round_rings import Early, Inbox, Report, Rounds
from outrider.errors import FieldViolation, InvalidRequest, OutOfSlots
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar
from outrider.kernels.drafting.children import REPORT_COUNTS
from outrider.kernels.pool.pack import Packed
from outrider.kernels.pool.records import Records
from outrider.kernels.sampling.rows import SampledRows
from outrider.roles.log_output import about
from outrider.roles.start_progress import report_stage
from outrider.sampling import SamplingSpec

logger = logging.getLogger(__name__)

_WITHOUT_LIMIT = (1 << 31) - 1
# A session that lost its slots starts again when this many are free beyond what it needs; with fewer it would lose
# them to the next tokens of an older one.
_RESTART_MARGIN = 64
# Share of a step's time in the average by which buckets are chosen.
_TIME_SHARE = 0.02


class ModelDrafter:
    """All sessions of a draft model.

    Args:
        model: the forward pass.
        config: see there.
        max_sessions: sessions at a time.
        num_slots: tokens whose KV fits.
        vocab_size: of the model.
        device: of the model.
        captures: whether steps are CUDA graphs.
        grammars: compiles grammars; None where none is followed.
        calibration: of all sessions; by default one that begins at its prior.

    Attributes:
        config: as given.
        calibration: of all sessions.
        launches: steps launched so far.
        steps: forward passes so far; a launched step with nothing to expand is none.
        wake: called, on any thread, when there may be something to do that no command tells of.
        num_slots: as given.
        slots_used: slots in use after the last step that was read.
        vocab_size: as given.
    """

    source = GrowthSource.MODEL

    def __init__(
        self,
        model: ForwardPass,
        config: GrowthConfig,
        *,
        max_sessions: int,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        captures: bool = False,
        grammars: GrammarCompiler | None = None,
        calibration: AcceptanceCalibration | None = None,
    ) -> None:
        self.config, self.num_slots = config, num_slots
        self.vocab_size, self.max_model_len = vocab_size, config.max_model_len
        self.calibration = calibration or AcceptanceCalibration(branching=max(config.branching, 2))
        self.launches = self.steps = self.slots_used = 0
        self.wake: Callable[[], None] = lambda: None
        self._program = GrowthProgram(
            model,
            config,
            self.calibration,
            sessions=max_sessions,
            num_slots=num_slots,
            vocab_size=vocab_size,
            device=torch.device(device),
            captures=captures,
        )
        self._inbox = Inbox(self._program.memory, rows=max_sessions)
        self._rounds = Rounds(self._program.memory, self._inbox)
        self._choices = HostChoices(self.calibration, config, vocab_size=vocab_size)
        self._grammars = grammars
        # In the order they were opened.
        self._sessions: dict[Key, ModelSession] = {}
        self._by_row: list[ModelSession | None] = [None] * max_sessions
        # Rows whose growth is sent as it comes: open, and in async mode.
        self._is_async = np.zeros(max_sessions, np.bool_)
        # Committed lengths up to which the calibration has learned.
        self._observed = np.zeros(max_sessions, np.int32)
        # Of each row's session, ids that nodes of its earlier rows had.
        self._ids_used = np.zeros(max_sessions, np.int32)
        # Rows whose prompt has been computed.
        self._has_root = np.zeros(max_sessions, np.bool_)
        self._expansions = Expansions(max_sessions, self._program.lines, self._program.branching)
        # Sessions whose children the host chooses, sessions with processors; keys whose grammar is being compiled.
        self._hosted, self._with_processors, self._has_chosen = 0, 0, False
        self._unready: set[Key] = set()
        # Whether sessions wait for slots; preempted rows whose slots are still on their way back.
        self._has_starved, self._preempting = False, 0
        self._ready: list[Growth] = []
        # Commits that are put together, before the next look at the device.
        self._edits = Records()
        self._can_run, self._bucket, self._ended = False, len(self._program.buckets) - 1, 0
        # By launched steps, oldest first: bucket, and the q that each line's child was drawn from.
        self._under_way: deque[tuple[int, list[DraftDistribution | None]]] = deque()

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def is_preparing(self) -> bool:
        """True if the host is about to choose children for the first time, with kernels that are compiled then."""
        return self._hosted > 0 and not self._has_chosen

    @property
    def is_busy(self) -> bool:
        """True while steps are under way."""
        return self._rounds.under_way > 0

    def warm_up(self) -> None:
        """Compile and capture what steps need; called before any session is opened."""
        report_stage("warming up (compiles the first time)")
        expansions.warm_up()
        acceptance_calibration.warm_up()
        if self._program.captures:
            self._program.warm_up()
        else:
            self._grow_once()

    def _grow_once(self) -> None:
        """Grow a session and close it: else the first one would wait until every stage is compiled."""
        sampling = SamplingSpec(max_new_tokens=2, repetition_penalty=1.1)
        start = SessionStart(
            key=(0, 0), owner=None, epoch=1, prompt=[0], output=(), sampling=sampling, limits=GrowthLimits()
        )
        self.open(start)
        while self.advance() or self.is_busy:
            pass
        self.close(start.key)
        while self.advance() or self.is_busy:
            pass
        self.launches = self.steps = 0

    def open(self, start: SessionStart) -> None:
        """Open a session, of a key that none is open under; `Drafters` has checked what it begins with.

        Raises:
            InvalidRequest: it is longer than can ever have KV here.
            OutOfSlots: there is no room for it now.
        """
        assert start.key not in self._sessions
        self._check_length(len(start.prompt) + len(start.output))
        if len(self._sessions) == len(self._by_row):
            raise OutOfSlots(f"{len(self._sessions)} sessions are open, as many as this worker takes")
        session = ModelSession(start, *self._take_row(), self.config.capacity)
        if start.sampling.grammar and self._grammars is not None:
            compiled = self._grammars.start(start.sampling.grammar, start.sampling.grammar_end_ids, self.wake)
            session.grammar = SessionGrammar(compiled, start.sampling.grammar_end_ids)
            if not session.grammar.is_ready:
                session.holds.add("grammar")
                self._unready.add(start.key)
        self._hosted += session.needs_host
        self._with_processors += session.has_processors
        while session.needs_host and self.is_busy:
            # A step that was launched without the host must not find it.
            self._read_and_launch()
        self._sessions[start.key] = session
        self._open_row(session)

    def commit(self, key: Key, tokens: Sequence[int]) -> bool:
        """Commit tokens that continue an open session, one at least; return whether its tree is dropped.

        Raises:
            InvalidRequest: it has become longer than can ever have KV here.
        """
        session = self._sessions[key]
        session.tokens += tokens
        self._check_length(len(session.tokens))
        if self._count_committed(session, len(tokens)) > MAX_STEP_COMMITS:
            # More than a step takes at once: its tree is dead in any case.
            session.ids_used += int(self._expansions.last_ids[session.row])
            session.holds.discard("tree")
            self._close_row(session)
            session.row, session.generation = self._take_row()
            self._open_row(session)
            return True
        if session.start.is_sync:
            self._edits.forget(session.row, session.generation, place=0)
        self._edits.commit(session.row, session.generation, tokens)
        if session.start.is_sync:
            self.hold(key, "tree", is_held=False)
            self._begin_tree(session)
        return session.start.is_sync

    def live_tree(self, key: Key) -> list[Growth]:
        """Return growth that has come, then all nodes of an open session's tree; in sync mode of one that is sent.

        Waits for steps under way.
        """
        session, ready, tree = self._sessions[key], self._ready, Growth()
        while self.is_busy:
            self._read()
        self._ready = []
        if session.sent_tree is not None:
            return [*ready, replace(session.sent_tree, forgot=[False])]
        pool, row = self._program.pool, session.row
        columns = pool.ids[row, :, 0], pool.parent[row], pool.token[row], pool.acceptance[row].view(torch.int32)
        # A row that no step has opened yet is empty: it is taken once it is closed.
        count, length = torch.stack((pool.count[row], pool.length[row])).tolist()
        ids, parents, tokens, bits = torch.stack(columns).cpu().numpy()[:, : 0 if session.start.is_sync else count]
        root = -1
        for token in session.tokens[length:]:
            # Committed since the last step.
            found = np.flatnonzero((parents == root) & (tokens == token))
            root = int(found[0]) if len(found) else -2
        names, drawn = {root: 0}, dict(session.distributions)
        for entry, parent in enumerate(parents.tolist()):
            if parent in names:
                names[entry] = int(ids[entry]) + session.ids_used
        (_, *live), (_, *node_ids) = names, names.values()
        tree.add(
            session.start, len(session.tokens), node_ids, [names[parent] for parent in parents[live].tolist()],
            tokens[live].tolist(), bits[live].view(np.float32).tolist(),
            distributions=[drawn[node] for node in node_ids] if drawn else (),
        )  # fmt: skip
        return [*ready, tree]

    def close(self, key: Key) -> None:
        """Close the session if it is open."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._hosted -= session.needs_host
            self._with_processors -= session.has_processors
            self._close_row(session)

    def hold(self, key: Key, reason: str, *, is_held: bool) -> None:
        """Let a session rest, or grow again once no reason is left."""
        session = self._sessions.get(key)
        if session is None or (reason in session.holds) == is_held:
            return
        was_held = bool(session.holds)
        (session.holds.add if is_held else session.holds.remove)(reason)
        if was_held != bool(session.holds):
            records = Records()
            allow = 0 if session.holds else _WITHOUT_LIMIT
            records.limits(session.row, session.generation, end=self._end(session), allow=allow)
            self._put(records)

    def has_prompt(self, key: Key) -> bool:
        """Return True if the session is open and its prompt has been computed."""
        session = self._sessions.get(key)
        return session is not None and bool(self._has_root[session.row])

    def advance(self) -> list[Growth]:
        """Read what steps have reported, and launch the next one as soon as that is possible.

        Returns:
            Growth that has come. `is_busy` tells whether more is to be expected without another command.
        """
        self._read_and_launch()
        # On a CPU a step is over when it is launched, and may have left records for the next one.
        while not self._ready and not self.is_busy and self._may_launch():
            self._read_and_launch()
        growths, self._ready = self._ready, []
        return growths

    def _read_and_launch(self) -> None:
        self._put_edits()
        self._read()
        if self._unready:
            self._look_at_grammars()
        if self._may_launch():
            self._launch()
            if self._program.device.type == "cpu":
                self._read()

    def _may_launch(self) -> bool:
        if self._hosted and self._rounds.under_way:
            return False
        return self._rounds.may_launch(self._can_run)

    def _launch(self) -> None:
        bucket, drawn = self._bucket, list[DraftDistribution | None]()
        if self._hosted:
            bucket, packed, padded, logits = self._program.begin_hosted(bucket)
            if len(logits):
                rows = padded.first(len(logits))
                children = self._choices.choose(self._nodes_of(packed, rows), rows, logits)
                self._program.put_children(rows, children.tokens, children.buckets, children.acceptances)
                drawn, self._has_chosen = children.distributions, True
            self._program.end(bucket, packed, padded)
        else:
            self._program.launch(bucket, processes=self._with_processors > 0)
        self._under_way.append((bucket, drawn))
        self._rounds.launched()
        self.launches += 1

    def _nodes_of(self, packed: Packed, rows: SampledRows) -> list[SessionNodes]:
        """The nodes whose children the host chooses, each with its path."""
        pool = self._program.pool
        tokens, parents, lengths = pool.token.cpu().numpy(), pool.parent.cpu().numpy(), pool.length.cpu().tolist()
        entries = packed.entries.cpu()[rows.rows.cpu()].tolist()
        found = dict[int, SessionNodes]()
        for row, entry in zip(rows.pool_rows.tolist(), entries, strict=True):
            path, above = list[int](), entry
            while above >= 0:
                path.append(int(tokens[row, above]))
                above = int(parents[row, above])
            session = self._by_row[row]
            assert session is not None
            found.setdefault(row, SessionNodes(session, lengths[row], [])).node_paths.append(path[::-1])
        return list(found.values())

    def _read(self) -> None:
        while (event := self._rounds.poll()) is not None:
            if isinstance(event, Early):
                self._note_early(event)
            else:
                self._note_report(event)

    def _note_early(self, early: Early) -> None:
        rows, sessions, needed = early.words[-2:].view(np.int32)[:3].tolist()
        self._can_run = rows > 0 or needed > 0
        self._bucket = self._program.choose(early.words[:-2], min(needed, sessions), len(self._sessions))

    def _note_report(self, report: Report) -> None:
        bucket, drawn = self._under_way.popleft()
        for released in report.released:
            self._preempting -= not released.closed
        rows, sessions, count, free, began, ended, needed = report.words[:REPORT_COUNTS].tolist()
        self.slots_used = self.num_slots - free
        self._can_run = rows > 0 or 0 < needed <= free
        # Each row of the step took a slot; `needed` was counted before.
        if needed > free + rows:
            self._preempt_youngest()
        elif self._has_starved:
            self._restart(free)
        if not rows:
            if not needed and not self.is_busy and not self._inbox.has_records:
                self._end_stuck_trees()
            return
        self.steps += 1
        device_ns = ended - began
        times = self._program.times_ns
        times[bucket] += _TIME_SHARE * (device_ns - times[bucket])
        growth = Growth(rows=rows, num_sessions=sessions, forward_ns=device_ns, step_ns=ended - max(began, self._ended))
        self._ended = ended
        if count:
            self._add_children(report.words[REPORT_COUNTS:].view(np.int32), count, drawn, growth)
        self._ready.append(growth)

    def _add_children(
        self, words: npt.NDArray[np.int32], count: int, drawn: list[DraftDistribution | None], growth: Growth
    ) -> None:
        lines = self._program.lines
        rows, lengths = words[:count], words[lines : lines + count]
        self._has_root[rows] = True
        is_new = self._observed[rows] != lengths
        if is_new.any():
            self._observe(rows[is_new], lengths[is_new])
        if not self._is_async[rows].all():
            self._grow_sync_trees(words, count, drawn)
        sessions, nodes, acceptances = self._expansions.read(words, count, self._is_async, self._ids_used)
        rows, growth.as_of, growth.counts = sessions.tolist()
        starts = [session.start for row in rows if (session := self._by_row[row]) is not None]
        growth.owners = [start.owner for start in starts]
        growth.session_ids = [start.key[1] for start in starts]
        growth.epochs = [start.epoch for start in starts]
        growth.complete, growth.forgot, growth.again = ([False] * len(starts) for _ in range(3))
        growth.node_ids, growth.parents = nodes[:2].tolist()
        growth.tokens, growth.acceptance = nodes[2].tolist(), acceptances.tolist()
        if any(q is not None for q in drawn):
            made = self._columns(words, count)[4]
            nodes = np.where(self._is_async[words[:count]], (made > 0).sum(1), 0)
            growth.distributions = [q for q, number in zip(drawn, nodes.tolist(), strict=True) for _ in range(number)]
            rows = np.repeat(rows, growth.counts).tolist()
            for row, node, q in zip(rows, growth.node_ids, growth.distributions, strict=True):
                if q is not None and (session := self._by_row[row]) is not None:
                    session.distributions.append((node, q))

    def _columns(self, words: npt.NDArray[np.int32], count: int) -> list[npt.NDArray[np.int32]]:
        """Pool rows, lengths and parents [L], tokens, ids of the nodes made and bits of the acceptances [L, K]."""
        lines, branching = self._program.lines, self._program.branching
        narrow = [words[place * lines : place * lines + count] for place in range(3)]
        wide = [words[(3 + place * branching) * lines :][: count * branching] for place in (0, 2, 3)]
        return narrow + [column.reshape(count, branching) for column in wide]

    def _observe(self, rows: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
        """Tell the calibration what has been committed between the steps."""
        for row, length in dict(zip(rows.tolist(), lengths.tolist(), strict=True)).items():
            session = self._by_row[row]
            if session is not None and self._observed[row] < length:
                tokens = np.array(session.tokens[self._observed[row] : length], np.int64)
                seen = self._expansions.commit(row, tokens)
                if len(seen):
                    self.calibration.observe_parents(seen)
                self._observed[row] = length
                if session.start.is_sync:
                    self._expansions.drop_tree(row)

    def _grow_sync_trees(self, words: npt.NDArray[np.int32], count: int, drawn: list[DraftDistribution | None]) -> None:
        rows, lengths, parents, tokens, made, bits = self._columns(words, count)
        acceptances = bits.view(np.float32)
        grown = dict[Key, ModelSession]()
        for line in np.flatnonzero(~self._is_async[rows]).tolist():
            session = self._by_row[rows[line]]
            tree = None if session is None else session.sync_tree
            if session is None or tree is None or tree.as_of != lengths[line]:
                continue
            new = made[line] > 0
            tree.expand(
                int(parents[line]),
                made[line][new].tolist(),
                tokens[line][new].tolist(),
                acceptances[line][new].tolist(),
                drawn[line] if drawn else None,
            )
            grown[session.start.key] = session
        for session in grown.values():
            if session.sync_tree is not None and session.sync_tree.is_complete:
                self._send_tree(session)

    def _begin_tree(self, session: ModelSession) -> None:
        """Sync mode: a round begins with the root."""
        length, end, session.sent_tree = len(session.tokens), self._end(session), None
        session.sync_tree = SyncTree(
            session.start,
            length,
            end,
            min_value=self.config.min_path_value,
            capacity=self.config.capacity - self._program.branching,
        )
        if length >= end or "slots" in session.holds:
            self._send_tree(session)

    def _end_stuck_trees(self) -> None:
        """End trees of sync mode that lack slots to grow further, as they are."""
        for session in list(self._sessions.values()):
            if session.sync_tree is not None and not session.holds:
                self._send_tree(session)

    def _send_tree(self, session: ModelSession) -> None:
        tree = session.sync_tree
        assert tree is not None
        best, session.sync_tree = tree.best(), None
        distributions = [node.distribution for node in best]
        growth = Growth()
        growth.add(
            session.start,
            tree.as_of,
            [node.node_id + session.ids_used for node in best],
            [node.parent + session.ids_used if node.parent else 0 for node in best],
            [node.token for node in best],
            [float(node.acceptance) for node in best],
            distributions=distributions if any(q is not None for q in distributions) else (),
            complete=True,
        )
        session.sent_tree = growth
        self._ready.append(growth)
        self.hold(session.start.key, "tree", is_held=True)

    def _put(self, records: Records) -> None:
        """Put a session's records behind those that wait."""
        self._put_edits()
        self._inbox.put(records.array())

    def _put_edits(self) -> None:
        if len(self._edits):
            self._inbox.put(self._edits.array())
            self._edits = Records()

    def _take_row(self) -> tuple[int, int]:
        """A free row; of one that was closed lately the device has to be told first."""
        while (taken := self._inbox.take_row()) is None:
            self._read_and_launch()
        return taken

    def _open_row(self, session: ModelSession) -> None:
        start, row, length = session.start, session.row, len(session.tokens)
        # A node's children come together, so credit is for those of one node at least.
        max_nodes = max(min(start.limits.max_live_nodes, self.config.max_live_nodes), self._program.branching)
        self._program.describe_row(
            row,
            start.sampling,
            session.tokens,
            prompt_len=session.prompt_len,
            stop_ids=start.stop_ids,
            max_nodes=self.config.capacity if start.is_sync else max_nodes,
            max_depth=min(start.limits.max_depth, self.config.capacity),
            is_fixed=start.is_sync,
        )
        self._by_row[row] = session
        self._is_async[row], self._has_root[row] = not start.is_sync, False
        self._observed[row] = length
        self._ids_used[row] = session.ids_used
        self._expansions.clear(row)
        records = Records()
        allow = 0 if session.holds else _WITHOUT_LIMIT
        records.open(row, session.generation, length=length, cached=0, end=self._end(session), allow=allow)
        self._put(records)
        session.committed_now = session.committed_before = 0
        if start.is_sync:
            self._begin_tree(session)

    def _end(self, session: ModelSession) -> int:
        return session.start.end(self.config.max_model_len)

    def _count_committed(self, session: ModelSession, tokens: int) -> int:
        """Count a commit; return the most that one step may find of the session.

        A step takes what was committed since the launch of the step before it, at most.
        """
        if session.counted_at != self.launches:
            is_next = session.counted_at == self.launches - 1
            session.committed_before = session.committed_now if is_next else 0
            session.committed_now, session.counted_at = 0, self.launches
        session.committed_now += tokens
        return session.committed_now + session.committed_before

    def _preempt_youngest(self) -> None:
        """Take the slots of the youngest session that has some, for pending tokens of older ones."""
        holders = [
            session
            for session in self._sessions.values()
            if "slots" not in session.holds and self._by_row[session.row] is session
        ]
        if self._preempting or not holders:
            return
        victim = holders[-1]
        ids = about(session_id=victim.start.key[1])
        logger.info("session %d waits for slots", victim.start.key[1], extra=ids)
        records = Records()
        records.preempt(victim.row, victim.generation)
        # In the place of a LIMITS that waits behind an older one.
        records.limits(victim.row, victim.generation, end=self._end(victim), allow=0)
        self._put(records)
        self._preempting += 1
        victim.holds.add("slots")
        self._has_starved = True
        if victim.sync_tree is not None:
            self._send_tree(victim)

    def _restart(self, free: int) -> None:
        """Let sessions that lost their slots grow again once there is room: with a margin, or all slots."""
        starved = [session for session in self._sessions.values() if "slots" in session.holds]
        self._has_starved = bool(starved)
        for session in starved:
            length = len(session.tokens)
            if not self._preempting and free >= min(length + _RESTART_MARGIN, self.num_slots):
                self.hold(session.start.key, "slots", is_held=False)
                if not session.holds:
                    return

    def _look_at_grammars(self) -> None:
        for key in list(self._unready):
            session = self._sessions.get(key)
            if session is None or session.grammar is None or session.grammar.is_ready:
                self._unready.discard(key)
                self.hold(key, "grammar", is_held=False)

    def _close_row(self, session: ModelSession) -> None:
        self._by_row[session.row], self._is_async[session.row] = None, False
        records = Records()
        records.close(session.row, session.generation)
        self._put(records)

    def _check_length(self, length: int) -> None:
        if length > self.num_slots:
            violation = FieldViolation("tokens", f"{length} given, {self.num_slots} fit the draft's KV cache")
            raise InvalidRequest([violation])
