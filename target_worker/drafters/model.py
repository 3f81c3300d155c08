"""A drafter in the target worker: it grows the pools of the rounds on the device that verifies them.

It is a draft model, or an EAGLE head or block drafter that reads the target's hidden states. The growth step is a draft
worker's, with a pool and KV slots of its own. What passes between the two sides over the network elsewhere passes in
device memory here, in the order of one stream:

    follow    in each round, behind re-root: rows open and close as the target's, committed tokens leave the trees
    grow      before a round: steps, each of which ends with its new nodes in the target's pool

Rows have the same numbers in both pools. The host puts no records to the drafter and waits for nothing. It decides how
many steps run, and reads their reports with that of the round that followed them, for the calibration.

A block drafter is a head whose first step of a round answers for the further ones: these grow the tree's next levels
from it, and no path is longer than its block.

A head computes committed tokens once more from the target's hidden states, and grows what hangs below them anew. It
begins with a session once the target has computed its prompt: its rows have the target's states.

A session that finds no room for the KV of all its tokens is not drafted, nor are sessions that ask for another rule
than the coupled one or for a grammar. In sync mode all steps run before a round, whether they pay or not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from outrider.drafting import acceptance_calibration, expansions
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.drafting.config import GrowthConfig
from outrider.drafting.expansions import Expansions
from outrider.drafting.growth_source import GrowthSource
from outrider.drafting.program import CommittedRows, GrowthProgram
from outrider.engine.eagle import BlockHead
from outrider.engine.head_forward import BlockForward
from outrider.engine.model_runner import ModelRunner
from outrider.engine.packed_forward import Features, ForwardPass
from outrider.engine.step_memory import StepMemory
from outrider.kernels.drafting.children import REPORT_COUNTS
from outrider.kernels.drafting.records import follow_records, growth_records
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.re_root import TreeEnd, re_root
from outrider.kernels.pool.records import WORDS
from outrider.kernels.pool.rings import EARLY_HEADER, REPORT_HEADER
from outrider.kernels.pool.select import GAIN_SCALE, SHORT_GAP
from outrider.kernels.sampling.rows import SampledRows
from outrider.kernels.verification.report import ReportColumn, RoundTime, mark_time
from outrider.kernels.verification.walk import COUNTED_KINDS
from outrider.target_worker.drafters.step_times import StepTimes
from outrider.target_worker.rounds.draft_steps import MOST_STEPS, DraftSteps, PromptRatio, RoundRates
from outrider.target_worker.rounds.session import Session

# Rounds whose steps are launched, and not read: the one under way and the next.
_ROUNDS_AHEAD = 2
# Rows of committed tokens beyond the usual by which a step is one that catches up.
_CATCH_UP_ROWS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
    """A draft model or a head, loaded.

    Attributes:
        make_forward: its forward pass, given the KV slots of the target's rows.
        growth: how it grows trees.
        most_steps: most growth steps before a round.
        num_slots: tokens whose KV fits.
        vocab_size: columns of its logits.
        captures: whether its steps are CUDA graphs.
        features: hidden rows of the target that a head reads; None for a model.
        block: the block drafter that it is; None for a model or a head.
    """

    make_forward: Callable[[torch.Tensor], ForwardPass]
    growth: GrowthConfig
    most_steps: int = MOST_STEPS
    num_slots: int
    vocab_size: int
    captures: bool
    features: Features | None = None
    block: BlockHead | None = None

    @classmethod
    def of_runner(cls, runner: ModelRunner, growth: GrowthConfig, *, most_steps: int = MOST_STEPS) -> Self:
        """Return a loaded checkpoint's."""
        forward = runner.packed_forward(sessions=runner.config.max_num_seqs)
        return cls(
            make_forward=lambda _target_table: forward,
            growth=growth,
            most_steps=most_steps,
            num_slots=runner.slots.num_slots,
            vocab_size=runner.vocab_size,
            captures=runner.config.captures,
        )

    @property
    def max_depth(self) -> int | None:
        """Most nodes of a path; None where its trees may be as deep as they are large."""
        return None if self.block is None else self.block.block_size

    @property
    def session_rows(self) -> int:
        """Most rows of a session in the first step after a round: its last node and the token behind it, of a head all
        that was committed.
        """
        return 2 if self.features is None else MOST_STEPS + 1

    @property
    def source(self) -> GrowthSource:
        """Source that its nodes are reported under."""
        return GrowthSource.MODEL if self.features is None else GrowthSource.EAGLE


class ResidentProgram(GrowthProgram):
    """Growth steps beside the rounds of a target; see `GrowthProgram`.

    Args:
        draft: the model.
        calibration: gives estimates.
        pool: the target's.
        place: of the drafter in that pool.
        records: G, most records of a round.
        committed: rows of what a round commits.
        shared: memory of the rounds.
    """

    def __init__(
        self,
        draft: DraftModel,
        calibration: AcceptanceCalibration,
        pool: Pool,
        *,
        place: int,
        records: int,
        committed: CommittedRows,
        shared: StepMemory,
    ) -> None:
        forward = draft.make_forward(pool.table)
        super().__init__(
            forward,
            draft.growth,
            calibration,
            sessions=pool.sessions,
            num_slots=draft.num_slots,
            vocab_size=draft.vocab_size,
            device=pool.device,
            captures=draft.captures,
            # One more than is ever unread: of early words there is a buffer less.
            ahead=_ROUNDS_AHEAD * MOST_STEPS + 1,
            regrows=draft.features is not None,
            committed=committed,
            read=forward.read if isinstance(forward, BlockForward) else None,
            shared=shared,
        )
        self._target, self._place, self._source = pool, place, draft.source
        self._followed, self._follow_verdicts = self._column(records, WORDS), self._column(records)
        most = self.lines * self.branching
        self._growth, self._growth_verdicts, self._growth_count = (
            self._column(most, WORDS), self._column(most), self._column(1),
        )  # fmt: skip
        # Neither pool's records commit tokens.
        self._no_commits, self._num_none = self._column(pool.sessions, 1), self._column(pool.sessions)

    def follow(
        self, records: torch.Tensor, count: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """Do in the drafter's pool what a round has done in the target's: its records, then its commits.

        Args:
            records: [n, 8] int32 of the round.
            count: [1] int32, how many of them there are.
            tokens: [S, M] int32 that the round has committed, by row of the pool.
            num_tokens: [S] int32, how many of each row's.
        """
        # The target's vocabulary may be wider: padding, which is as good as never chosen.
        tokens = tokens.clamp(max=self._vocab_size - 1)
        # A session that may have no nodes is not drafted.
        is_drafted, longest = self.pool.max_nodes, self.pool.max_len
        follow_records(records, count, is_drafted, self._followed, place=self._place, longest=longest)
        graft(self.pool, self._followed, count, self._follow_verdicts, self._no_commits, self._num_none)
        re_root(self.pool, tokens, num_tokens, regrows=self._regrows)
        state = self.pool.state
        if self._regrows:
            # While the target computes a prompt, the drafter's row rests.
            state.copy_(torch.where(state == RowState.EMPTY, state, self._target.state))
        # A session that is held may wait for a tree.
        state.masked_fill_(state == RowState.HELD, int(RowState.RUNNING))

    def _take(self) -> None:
        """See `GrowthProgram`: rounds have done it, in `follow`."""
        mark_time(self._began, RoundTime.BEGAN)

    def _describe_processors(self, *_described: object) -> None:
        """See `GrowthProgram`: the target has done it, and its rounds count what they commit."""

    def _hand_on(self, rows: SampledRows, size: int) -> None:
        """See `GrowthProgram`: into the target's pool."""
        columns = self._nodes[:size], self._acceptances[:size], self._made[:size], self._parent_ids[:size]
        growth_records(
            self.pool, rows, columns, self._growth, self._growth_count, place=self._place, drafter=self._source
        )
        graft(
            self._target, self._growth, self._growth_count, self._growth_verdicts, self._no_commits, self._num_none
        )  # fmt: skip

    def _is_hosted(self, bucket: int) -> bool:
        """See `GrowthProgram`: the host has no part."""
        return False

    def warm_up(self) -> None:
        """See `GrowthProgram`."""
        if self.captures:
            super().warm_up()
            return
        self.launch(0, processes=True)
        self._forget_rounds()


class _Step(NamedTuple):
    """A launched step.

    Attributes:
        number: in its round.
        bucket: that it runs in.
        sessions: that it was launched for.
        verified: drafted sessions that the round verifies.
        trial_ns: of a step that is one more than pays, the time to expect.
    """

    number: int
    bucket: int
    sessions: int
    verified: int
    trial_ns: float | None


class ResidentModel:
    """A draft model or a head beside the rounds of a target.

    Args:
        draft: the model.
        pool: the target's.
        place: of the drafter in that pool.
        records: most records of a round.
        round_rows: most verified rows of a round, so that it commits no more tokens.
        shared: memory of the rounds.

    Attributes:
        place: as given.
        source: what its nodes are reported as.
        pool: its own trees.
        calibration: of all sessions.
        pace: how many steps pay.
        steps: growth steps with rows so far.
    """

    def __init__(
        self, draft: DraftModel, pool: Pool, *, place: int, records: int, round_rows: int, shared: StepMemory
    ) -> None:
        growth = draft.growth
        self.place, self.source, self._growth, self._capacity = place, draft.source, growth, pool.capacity
        self._regrows, self._max_depth = draft.features is not None, draft.max_depth or growth.capacity
        self._block = draft.block
        self.calibration = AcceptanceCalibration(branching=max(growth.branching, 2))
        # Further steps would only widen a block's tree.
        self.pace = DraftSteps(min(draft.most_steps, draft.max_depth or draft.most_steps))
        self.steps, self._vocab_size = 0, draft.vocab_size
        self._committed = CommittedRows(each=draft.session_rows, total=round_rows)
        self._program = ResidentProgram(
            draft, self.calibration, pool, place=place, records=records, committed=self._committed, shared=shared
        )
        self.pool = self._program.pool
        self._expansions = Expansions(pool.sessions, self._program.lines, self._program.branching)
        # Nodes are handed on by the device, and only counted here.
        self._is_counted, self._ids_used = np.ones(pool.sessions, np.bool_), np.zeros(pool.sessions, np.int32)
        self._grown = np.zeros(pool.sessions, np.int64)
        # By number of the step in its round, what its buckets would have gained, the roots that it had to expand, and
        # how many sessions it was launched for; 0 before there was one.
        no_gains = np.zeros(len(self._program.buckets), np.int64)
        self._early = [(no_gains, 0, 0) for _ in range(MOST_STEPS)]
        # Rows of committed tokens that a round's first step had to compute, and how many sessions it was launched for.
        self._first_rows = 0, 0
        self._times = StepTimes()
        # Steps that are not read, oldest first.
        self._under_way: deque[_Step] = deque()
        # Rounds since the last one with steps, and whether steps of the round that is read had anything to do.
        self._rested, self._has_begun = 0, False
        # Rows of committed tokens that a step would have needed room for, until one that holds prompts is launched.
        self._unfit_rows = 0
        self._read = 0
        self._prompts = PromptRatio()
        # Whether slots sufficed for all sessions at the last first step.
        self._has_room = True
        # By row: tokens of the opening that no launched step computes, and rows that the device may not know yet.
        self._opening, self._is_new = np.zeros(pool.sessions, np.int64), np.zeros(pool.sessions, np.bool_)
        # By row: whether its session may be grown, and whether its tokens tell which nodes are right: not under the
        # synthetic rule.
        self._is_drafted, self._counts_hits = np.zeros(pool.sessions, np.bool_), np.zeros(pool.sessions, np.bool_)
        # Tokens of drafted sessions, and how many these are.
        self._tokens, self._num_slots = 0, draft.num_slots
        self._num_drafted = 0

    def warm_up(self) -> None:
        """Compile and capture what steps need; called before any session is opened."""
        expansions.warm_up()
        acceptance_calibration.warm_up()
        self._program.warm_up()
        if self._program.captures:
            self._times = StepTimes(self._program.times_ns, self._program.reading_ns)

    def refill(self) -> None:
        """Make anew what was made of the target's weights, once it has others. No step may be in flight."""
        if self._block is not None:
            self._block.refill()

    def describe_row(self, session: Session) -> None:
        """Write the columns of a session's row, which no launched round uses; they are in place on return."""
        row, program = session.row, self._program
        self._expansions.clear(row)
        # Sessions share prompts in the target's cache, but not here. What finds no room for all of it would keep the
        # slots that others need to go on.
        needed = self._tokens + session.length + self._growth.max_live_nodes * (self._num_drafted + 1)
        has_room = session.length < self.pool.max_len and needed <= self._num_slots
        self._is_drafted[row] = is_drafted = session.is_drafted_by(self.source) and has_room
        self._tokens, self._num_drafted = self._tokens + is_drafted * session.length, self._num_drafted + is_drafted
        self._grown[row], self._opening[row], self._is_new[row] = 0, session.length, True
        self._prompts.note_prompt(is_drafted * session.length)
        self._counts_hits[row] = is_drafted and not session.sampling.is_synthetic
        program.describe_row(
            row,
            session.sampling,
            np.minimum(session.history[: session.length], self._vocab_size - 1),
            prompt_len=session.prompt_len,
            stop_ids=session.stop_token_ids,
            # Half a pool: draft workers have the rest.
            max_nodes=max(min(self._growth.max_live_nodes, self._capacity // 2), program.branching) * is_drafted,
            max_depth=min(session.max_depth, self._max_depth),
            is_fixed=session.is_sync,
        )

    def follow(
        self, records: torch.Tensor, count: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        """Run the part of a round that is the drafter's, behind the target's `re_root`.

        Args:
            records: [G, 8] int32, of the round.
            count: [1] int32: how many.
            tokens: [S, M] int32, committed by the round.
            num_tokens: [S] int32: how many of each row.
        """
        self._program.follow(records, count, tokens, num_tokens)

    def grow(self, sessions: Sequence[Session], rates: RoundRates) -> int:
        """Launch as many steps as pay before the next round.

        Args:
            sessions: that the target has rows for.
            rates: of the next round.

        Returns:
            How many.
        """
        # On the device all of them take part, also those that rest.
        drafted = [
            session
            for session in sessions
            if self._is_drafted[session.row] and session.length < min(session.limit, self.pool.max_len)
        ]
        self._tokens, self._num_drafted = sum(session.length for session in drafted), len(drafted)
        if self._regrows:
            drafted = [session for session in drafted if session.is_prefilled]
        growing = [session for session in drafted if session.may_grow(self.source)]
        program = self._program
        verified = sum(session.is_running or session.is_entering for session in growing)
        expected_ns = self._expected_ns(verified)
        # Beside prompts alone the drafter computes its own.
        count, is_trial, is_sync = min(len(growing), 1), False, any(session.is_sync for session in growing)
        if is_sync:
            count = self.pace.most
        elif verified:
            prompt_ns = self._prompts.close_round(verified) * self._prompt_row_ns()
            count = self.pace.choose(verified, expected_ns, rates, prompt_ns=prompt_ns)
            is_trial = self.pace.is_trial
        count = min(count, _ROUNDS_AHEAD * MOST_STEPS - len(self._under_way))
        processes = any(session.sampling.has_processors for session in drafted)
        rows = np.array(sorted(session.row for session in drafted), np.int64)
        for number in range(count):
            if not number:
                bucket = self._first_bucket(rows[~self._is_new[rows]], len(rows), is_sync=is_sync)
            elif is_sync:
                # The widest of those that hold no prompts.
                bucket = max(program.first_prompt_bucket - 1, 0)
            else:
                bucket = self._bucket_as_before(number, len(rows))
            program.launch(bucket, processes=processes, is_first=number == 0)
            trial_ns = expected_ns[number] if is_trial and number == count - 1 else None
            self._under_way.append(_Step(number, bucket, len(rows), verified, trial_ns))
        self._rested = self._rested + 1 if len(rows) and not count else 0
        # Their records are in the round that comes next.
        self._is_new[rows] = False
        return count

    def _first_bucket(self, rows: npt.NDArray[np.int64], sessions: int, *, is_sync: bool) -> int:
        """Return the bucket of a round's first step, and note what it computes.

        Args:
            rows: in order, of sessions that the device knows.
            sessions: that are drafted.
            is_sync: whether the bucket may depend on nothing that was measured.
        """
        opening, program = self._opening[rows], self._program
        committed = self._committed_rows(sessions, is_sync=is_sync)
        has_long = (opening > SHORT_GAP).any() or self._committed.each + self._rested > SHORT_GAP
        if has_long or self._unfit_rows:
            # As `select` shares a chunk.
            is_long, left = opening > SHORT_GAP, self._growth.max_step_tokens
            taken = np.minimum(opening, np.maximum(left - (np.cumsum(is_long * opening) - is_long * opening), 0))
            taken = np.where(is_long, taken, opening)
            self._opening[rows] -= taken
            needed, self._unfit_rows = self._unfit_rows + committed + int(taken.sum()), 0
            return program.holding(needed, sessions, first=program.first_prompt_bucket)
        self._opening[rows] = 0
        if self._rested or opening.any() or is_sync:
            return program.holding(committed + int(opening.sum()), sessions)
        return self._bucket_as_before(0, sessions)

    def _committed_rows(self, sessions: int, *, is_sync: bool = False) -> int:
        """Return how many rows of committed tokens a round's first step may have to compute."""
        (rows, before), most = self._first_rows, self._committed.of(sessions)
        if self._rested or is_sync:
            return most + self._rested * sessions
        # As many as last time and a quarter more, if the load was about the same.
        if 0 < before <= 2 * sessions <= 4 * before:
            most = min(most, 5 * rows * sessions // (4 * before) + 1)
        return most

    def _bucket_as_before(self, number: int, sessions: int) -> int:
        """Return the bucket of a step without prompts, by the last one like it if the load was about the same."""
        program, (gains, roots, before) = self._program, self._early[number]
        if before <= 2 * sessions <= 4 * before:
            found = program.choose(gains, roots, sessions, self._times.of_buckets(reads=self._reads(number)))
            if program.buckets[found].sessions >= sessions:
                # What a round commits varies, and a session without room waits a round.
                return found if number else max(found, program.holding(self._committed_rows(sessions), sessions))
        return self._usual_bucket(number, sessions)

    def _reads(self, number: int) -> bool:
        """True if a step of this number reads the logits of the round's first one."""
        return self._block is not None and number > 0

    def _usual_bucket(self, number: int, sessions: int) -> int:
        """Return a bucket that holds what so many sessions have committed in a round, or a node of each."""
        return self._program.holding(sessions if number else self._committed.of(sessions), sessions)

    def _expected_ns(self, sessions: int) -> list[float]:
        """Return the times of a round's steps to expect; none before anything is known."""
        found: list[float] = []
        for number in range(MOST_STEPS):
            usual = self._usual_bucket(number, sessions)
            bucket = usual if self._rested else self._bucket_as_before(number, sessions)
            step_ns = self._times.expected_ns(bucket, sessions, reads=self._reads(number))
            if step_ns is None:
                return []
            found.append(step_ns)
        return found

    def _prompt_row_ns(self) -> float:
        """Return what a prompt's token takes in the widest step; 0 without graphs, whose steps are not told apart."""
        times_ns = self._times.of_buckets(reads=False)
        return times_ns[-1] / self._growth.max_step_tokens if times_ns else 0.0

    def read(self, count: int) -> int:
        """Read the oldest steps, after the report of the round that they were launched before.

        Returns:
            The nanoseconds that they took.
        """
        return sum(self._read_step() for _ in range(count))

    def _read_step(self) -> int:
        step = self._under_way.popleft()
        memory, program = self._program.memory, self._program
        report = memory.reports[self._read % len(memory.reports)].numpy()
        early = memory.early[self._read % len(memory.early)].numpy()[EARLY_HEADER:].copy()
        self._read += 1
        assert report[0] == self._read, f"step {self._read} was to be read, {report[0]} has been written"
        counts, words = report[REPORT_HEADER:][:REPORT_COUNTS].tolist(), report[REPORT_HEADER + REPORT_COUNTS :]
        rows, _, lines, _, began, ended, _ = counts
        gains, (_, in_step, needed) = early[:-2], early[-2:].view(np.int32)[:3].tolist()
        if gains[step.bucket] >= 0:
            if step.bucket < program.first_prompt_bucket:
                self._early[step.number] = gains, min(needed, in_step), step.sessions
                if not step.number:
                    self._first_rows = needed, step.sessions
        elif gains[-1] >= 0 and all(gains[each.bucket] < 0 or self._reads(each.number) for each in self._under_way):
            # Otherwise it waits for slots, or a step under way has room.
            self._unfit_rows, self._first_rows = max(self._unfit_rows, needed), (0, 0)
        step_ns, roots, expanded = ended - began, 0, 0.0
        if rows:
            self.steps += 1
            columns = words.view(np.int32).copy()
            (grown_rows, _, grown), _, _ = self._expansions.read(columns, lines, self._is_counted, self._ids_used)
            np.add.at(self._grown, grown_rows, grown)
            roots = int(np.count_nonzero(columns[2 * program.lines :][:lines] == 0))
            expanded = roots + max(int(gains[step.bucket]), 0) / GAIN_SCALE
        if not step.number:
            # Else its sessions are not open yet.
            self._has_begun, self._has_room = step.verified > 0 and (rows or needed) > 0, gains[-1] >= 0
        usual_rows = min(self._committed.of(step.verified) + _CATCH_UP_ROWS, SHORT_GAP * step.verified)
        if self._has_begun and min(needed, rows) <= usual_rows:
            # The gain of a bucket that was too small is not known; where no bucket is large enough, slots are wanting.
            if gains[step.bucket] >= 0 or gains[-1] < 0:
                # Sessions that are held, or wait to run alone, are grown too: roots may outnumber the verified ones.
                self.pace.note_step(step.number, expanded=expanded, sessions=max(step.verified, roots))
            if rows:
                self._times.note(step.bucket, step.verified, step_ns, reads=self._reads(step.number))
        if step.trial_ns is not None:
            self.pace.note_trial(step_ns - step.trial_ns)
        return step_ns

    def note_round(self, columns: npt.NDArray[np.int32], *, time_ns: int) -> None:
        """Learn from a round with verified rows, once the steps before it have been read.

        Args:
            columns: [R, N], of its report, by `ReportColumn` and session.
            time_ns: of the round and the steps before it.
        """
        rows = columns[ReportColumn.POOL_ROW]
        own = columns[:, self._is_drafted[rows] & (columns[ReportColumn.LENGTH] < self.pool.max_len)]
        ends, counts = own[ReportColumn.TREE_END], self._counts_hits[own[ReportColumn.POOL_ROW]]
        covered, missed = ends == TreeEnd.COVERED, ends == TreeEnd.MISSED
        bare = (missed | (ends == TreeEnd.STARVED)) & self._has_room
        self.pace.note_round(
            # Sessions that begin next have no tree.
            bare=float(bare.mean()) if bare.size else 1.0,
            hits=int(own[ReportColumn.ACCEPTED].sum() + np.count_nonzero(covered & counts)),
            misses=int(np.count_nonzero(missed | (covered & ~counts))),
            time_ns=time_ns,
        )

    def take_grown(self, row: int) -> list[int]:
        """Return how many nodes a session has been grown since this was called last, by kind of drafter: [3]."""
        grown, self._grown[row] = int(self._grown[row]), 0
        return [grown * (kind == self.source) for kind in range(1, COUNTED_KINDS + 1)]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Tell the calibration what a round has committed, once the steps before it have been read."""
        self._prompts.note_committed(len(tokens) * bool(self._is_drafted[row]))
        seen = self._expansions.commit(row, np.array(tokens, np.int64))
        if self._regrows:
            # The new root is expanded as a root, whatever it was before.
            self._expansions.drop_tree(row)
        if len(seen):
            self.calibration.observe_parents(seen)
            committed = seen[:, 0]
            self.pace.note_hits(best=int((committed == 0).sum()), hits=int((committed >= 0).sum()))

    def forget(self, row: int) -> None:
        """Tell the calibration that a session's tree is dropped by a record."""
        self._expansions.drop_tree(row)
