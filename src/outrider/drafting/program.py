"""A growth step as the device runs it: every stage an operator, nothing waits for the host.

    take_records, graft     what coordinators have asked for since the last step
    re_root, count_tokens   committed tokens leave the trees (`_take`; a drafter inside a target does it in the round)
    select, pack            what to expand: the best entries over all sessions
    forward                 one pass of the draft model
    process_logits          in steps of sessions that change logits
    rank                    children of every expanded node, and how likely each is accepted
    append                  they join the trees
    report                  the host turns them into growth

On a GPU a bucket's stages are one CUDA graph, launched ahead; in a second one penalties, bias and bans change the
logits before children are ranked. A block drafter's pass answers for several levels of a tree: of a round's steps only
the first has one, and in the others the rows that it has left without a block rest. Sessions whose children depend on
more than ranked logits (a grammar, another rule) have the host choose children between forward and append: `begin` and
`end` are launched apart then.

Shapes: S sessions, R rows and L rows with children of a bucket, K children of a node, V vocabulary.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.drafting.config import GrowthConfig
from outrider.engine.bucket_times import time_buckets
from outrider.engine.graph_memory import GraphMemory
from outrider.engine.node_processors import describe_processors
from outrider.engine.packed_forward import ForwardPass
from outrider.engine.round_rings import RingMemory
from outrider.engine.step_memory import StepMemory
from outrider.kernels.compiling_threads import compiling_threads
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.drafting.children import estimate_children, report_children, report_words
from outrider.kernels.pool.append import append
from outrider.kernels.pool.columns import MAX_STOPS, Pool, RowState
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import Packed, pack
from outrider.kernels.pool.re_root import re_root
from outrider.kernels.pool.records import WORDS
from outrider.kernels.pool.rings import publish_early, publish_report, take_records
from outrider.kernels.pool.select import GAIN_SCALE, SHORT_GAP, Selection, select
from outrider.kernels.sampling.processors import count_tokens, process_logits
from outrider.kernels.sampling.rows import PARAMETERS, SampledRows, sample_rows
from outrider.roles.start_progress import report_stage
from outrider.sampling import SamplingSpec

logger = logging.getLogger(__name__)

MAX_STEP_COMMITS = 256
"""Most tokens of a session that one step commits."""

# Records of the ring, at least, and for each session.
_LEAST_RECORDS, _SESSION_RECORDS = 4096, 16
_CPU = torch.device("cpu")
# Rows and sessions of the buckets on a GPU: in between a step takes as long as in the next larger one.
_RUNGS, _SESSIONS = (8, 32, 64, 128, 256, 512, 1024), (1, 16, 64)
# Rows of the smaller buckets for prompts; most prompts are short.
_PROMPT_RUNGS = (256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Shape of a step."""

    rows: int  # R
    sessions: int  # sessions that fit
    most: int  # most rows of one session
    entries: int  # most entries that are expanded
    holds_prompts: bool = False  # whether a session may take more than SHORT_GAP committed tokens

    @property
    def lines(self) -> int:
        """L, the lines of the bucket: rows at which children are ranked."""
        return min(self.rows, self.entries + self.sessions)


@dataclass(frozen=True, kw_only=True)
class CommittedRows:
    """Most committed tokens without KV behind a round.

    Attributes:
        each: of a session.
        total: of all sessions together; None: as many of each.
    """

    each: int = 2
    total: int | None = None

    def of(self, sessions: int) -> int:
        """Return those of so many sessions."""
        rows = self.each * sessions
        return rows if self.total is None else min(rows, self.total)


def growth_buckets(
    config: GrowthConfig, sessions: int, *, on_gpu: bool, committed: CommittedRows, least_rows: int = 1
) -> list[Bucket]:
    """Return the buckets of steps of so many sessions, smallest first; those for prompts come last.

    A CPU computes no padding, so one bucket serves all steps there.

    Args:
        sessions: of the largest buckets.
        committed: rows of committed tokens.
        least_rows: of a bucket, as far as steps have as many.
    """
    chunk, entries = config.max_step_tokens, config.max_step_nodes
    most = max(config.max_session_nodes, SHORT_GAP)
    if not on_gpu:
        rows = chunk + entries + SHORT_GAP * sessions
        return [Bucket(rows=rows, sessions=sessions, most=chunk + SHORT_GAP, entries=entries, holds_prompts=True)]
    found: set[Bucket] = set()
    for fitting in (*(count for count in _SESSIONS if count < sessions), sessions):
        # What all of them have committed fits into the widest, beside the nodes that are expanded.
        widest = min(entries, most * fitting) + max(committed.of(fitting), SHORT_GAP)
        for rows in (*(max(rung, least_rows) for rung in _RUNGS if max(rung, least_rows) < widest), widest):
            if fitting <= rows:
                found.add(Bucket(rows=rows, sessions=fitting, most=min(most, rows), entries=min(entries, rows)))
    buckets = sorted(found, key=lambda bucket: (bucket.rows, bucket.sessions))
    widest = chunk + max(bucket.rows for bucket in buckets)
    for rows in (*(rung for rung in _PROMPT_RUNGS if sessions <= rung < widest), widest):
        longest = min(chunk + SHORT_GAP, rows)
        buckets.append(
            Bucket(rows=rows, sessions=sessions, most=longest, entries=min(entries, rows), holds_prompts=True)
        )
    return buckets


class GrowthProgram:
    """The pool of a draft model's sessions, and the steps that grow it.

    Args:
        calibration: gives estimates; its learned table moves into memory that the device reads.
        captures: whether steps are captured in CUDA graphs.
        ahead: most steps that are launched, and not read.
        regrows: whether commits have the model grow a session's tree anew, as `re_root` takes it.
        committed: as `growth_buckets` takes it.
        read: logits [L, V] of a step's rows [L], from the pass of an earlier step; None where each step has its own.
        shared: memory of a target's rounds, which keep the processors in it; None where it has its own.
    """

    def __init__(
        self,
        model: ForwardPass,
        config: GrowthConfig,
        calibration: AcceptanceCalibration,
        *,
        sessions: int,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        captures: bool,
        ahead: int = 2,
        regrows: bool = False,
        committed: CommittedRows = CommittedRows(),
        read: Callable[[Packed, torch.Tensor], torch.Tensor] | None = None,
        shared: StepMemory | None = None,
    ) -> None:
        self._read_logits = read
        self._model, self._config, self.device = model, config, device
        self._vocab_size, self._regrows, self._committed = vocab_size, regrows, committed
        self.branching = min(config.branching, vocab_size)
        # The best child's estimate needs the second's score, whether or not that becomes a node.
        self._ranked = min(max(config.branching, 2), vocab_size)
        on_gpu = device.type == "cuda"
        self.pool = Pool.allocate(
            sessions=sessions,
            max_len=config.max_model_len,
            capacity=config.capacity,
            places=1,
            trail=2,
            node_slots=1 << (num_slots - 1).bit_length(),
            device=device,
        )
        nodes = self.pool.nodes
        assert nodes is not None
        nodes.free[:num_slots] = torch.arange(num_slots, dtype=torch.int32, device=device)
        nodes.free_tail.fill_(num_slots)
        # Where each commit makes a gap, the smallest bucket has room for a session's.
        least_rows = SHORT_GAP if regrows else 1
        self.buckets = growth_buckets(config, sessions, on_gpu=on_gpu, committed=committed, least_rows=least_rows)
        # Number of the first one with room for prompts.
        self.first_prompt_bucket = next(number for number, bucket in enumerate(self.buckets) if bucket.holds_prompts)
        # times_ns, reading_ns: time of a step of each bucket; of one that reads an earlier one's logits.
        self.times_ns = self.reading_ns = [float(bucket.rows) for bucket in self.buckets]
        shapes = [(bucket.rows, bucket.sessions, bucket.most, bucket.entries) for bucket in self.buckets]
        # L of the largest bucket: rows that a report has room for.
        self.lines = max(bucket.lines for bucket in self.buckets)
        count = len(shapes)
        # What the host needs early is one piece of memory: gains, then rows, sessions and needed rows.
        self._early_words = self._column(count + 2, dtype=torch.int64)
        totals = self._early_words[count:].view(torch.int32)
        self._selection = replace(
            Selection.allocate(self.pool, shapes),
            gains=self._early_words[:count],
            totals=totals[:2],
            needed=totals[2:3],
            least_value=torch.full((1,), config.min_path_value, dtype=torch.float32, device=device),
        )
        self._packed = [Packed.allocate(self.pool, shape, scrap_slot=num_slots) for shape in shapes]
        self._sampled = [SampledRows.allocate(bucket.lines, device) for bucket in self.buckets]
        self._parameters = self._column(sessions, PARAMETERS)
        if shared is None:
            shared = StepMemory.allocate(sessions=sessions, lines=self.lines, vocab_size=vocab_size, device=device)
        self._shared = shared.first_tokens(vocab_size)
        assert len(shared.processed) >= self.lines, "the widest step has more lines than there is room for"
        records = 1 << (max(_LEAST_RECORDS, _SESSION_RECORDS * sessions) - 1).bit_length()
        self._records = self._column(records, WORDS)
        self._verdicts, self._count = self._column(records), self._column(1)
        self._commits, self._num_commits = self._column(sessions, MAX_STEP_COMMITS), self._column(sessions)
        self._tail, self._rounds, self._began = (self._column(1, dtype=torch.int64) for _ in range(3))
        self._nothing = self._column(0, dtype=torch.int64)
        rows = max(bucket.rows for bucket in self.buckets)
        self._tokens, self._buckets = (self._column(self.lines, self.branching) for _ in range(2))
        self._nodes, self._made = (self._column(rows, self.branching) for _ in range(2))
        self._acceptances = self._column(rows, self.branching, dtype=torch.float32)
        self._parent_ids = self._column(rows)
        learned = torch.from_numpy(calibration.learned)
        self._learned = learned.pin_memory() if on_gpu else learned
        calibration.learned = self._learned.numpy()
        edges, prior = torch.from_numpy(calibration.edges), torch.from_numpy(calibration.prior)
        self._tables = edges.to(device), prior.to(device), self._learned
        # Shared with the host.
        self.memory = RingMemory.allocate(
            records=records,
            early_words=count + 2,
            report_words=report_words(self.lines, self.branching),
            pinned=on_gpu,
            ahead=ahead,
        )
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._staging = torch.zeros(
            PARAMETERS + MAX_STOPS + 3 + config.max_model_len, dtype=torch.int32, pin_memory=on_gpu
        )
        # By bucket: a step, without and with processors, with a forward pass and with logits of an earlier one; and for
        # some buckets a step's beginning and what it gives.
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self._hosted: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Packed, SampledRows, torch.Tensor]]] = {}
        self.captures = captures and on_gpu

    def _column(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def describe_row(
        self,
        row: int,
        sampling: SamplingSpec,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        prompt_len: int,
        stop_ids: Iterable[int],
        max_nodes: int,
        max_depth: int,
        is_fixed: bool = False,
    ) -> None:
        """Write the columns of a row that no launched step uses; they are in place on return.

        Args:
            row: of the pool.
            sampling: of the session.
            tokens: [n], committed, prompt and output.
            prompt_len: how many of them are the prompt.
            stop_ids: tokens whose nodes have no children.
            max_nodes, max_depth: bounds of its tree.
            is_fixed: whether its estimates come from the calibration's prior alone.
        """
        longest = self.pool.max_len
        parameters = np.frombuffer(sampling.record, np.int32).copy()
        parameters[-1] = is_fixed
        stops = sorted(token for token in stop_ids if token < self._vocab_size)[:MAX_STOPS]
        stops += [-1] * (MAX_STOPS - len(stops))
        min_end = min(prompt_len + sampling.min_new_tokens, longest)
        numbers = np.array([*stops, min_end, max_nodes, max_depth, *tokens[:longest]], np.int32)
        values = np.concatenate((parameters, numbers))
        self._staging[: len(values)] = torch.from_numpy(values)
        pool, begin = self.pool, 0
        columns = (self._parameters, pool.stops, pool.min_end, pool.max_nodes, pool.max_depth, pool.history)
        with torch.cuda.stream(self._side):
            for column in columns:
                place = column[row] if column.dim() > 1 else column[row : row + 1]
                size = min(place.shape[0], len(values) - begin)
                place[:size].copy_(self._staging[begin : begin + size], non_blocking=True)
                begin += size
            self._describe_processors(row, sampling, tokens, prompt_len)
        if self._side is not None:
            self._side.synchronize()

    def _describe_processors(
        self, row: int, sampling: SamplingSpec, tokens: Sequence[int] | npt.NDArray[np.int32], prompt_len: int
    ) -> None:
        describe_processors(self._shared.processors, row, sampling, tokens[:prompt_len], tokens[prompt_len:])

    def choose(
        self, gains: npt.NDArray[np.int64], roots: int, sessions: int, times_ns: Sequence[float] | None = None
    ) -> int:
        """Return the bucket of the next step: the one that expands the most value in its time.

        Args:
            gains: [B] int64, what each bucket would have expanded; -1 where sessions do not fit.
            roots: roots that are expanded in any case.
            sessions: open ones. Where nothing is left to expand, commits to all of them come next.
            times_ns: [B] of steps; default those of the buckets' graphs.
        """
        times_ns = times_ns or self.times_ns
        if not roots and not gains.any():
            return self.holding(self._committed.of(sessions), sessions)
        fitting = np.flatnonzero(gains >= 0).tolist()
        # One for prompts only where no other holds all sessions.
        ordinary = [bucket for bucket in fitting if bucket < self.first_prompt_bucket]
        rates = {bucket: (int(gains[bucket]) / GAIN_SCALE + roots) / times_ns[bucket] for bucket in ordinary or fitting}
        return max(rates, key=rates.__getitem__, default=len(gains) - 1)

    def holding(self, rows: int, sessions: int, *, first: int = 0) -> int:
        """Return a bucket, from `first` on, that holds so many rows and sessions; the last one if none does."""
        numbers, buckets = range(first, len(self.buckets)), self.buckets
        found = (number for number in numbers if buckets[number].rows >= rows and buckets[number].sessions >= sessions)
        return next(found, len(buckets) - 1)

    def launch(self, bucket: int, *, processes: bool, is_first: bool = True) -> None:
        """Run a step, perhaps with processors; on a GPU nothing is waited for.

        Args:
            processes: whether there are processors.
            is_first: of the steps between two commits.
        """
        reads = self._read_logits is not None and not is_first
        graph = self._graphs.get((bucket, processes, reads))
        if graph is None:
            self._step(bucket, processes=processes, reads=reads)
        else:
            graph.replay()

    @torch.inference_mode()
    def _step(self, bucket: int, *, processes: bool, reads: bool = False) -> None:
        packed, rows, logits = self._begin(bucket, processes=processes, reads=reads)
        if len(logits):
            self._rank(logits, rows)
        self.end(bucket, packed, rows)

    def _take(self) -> None:
        """Begin a step with what has come since the last one."""
        pool, memory = self.pool, self.memory
        take_records(memory.ring, memory.head, self._records, self._count, self._tail, self._began)
        graft(pool, self._records, self._count, self._verdicts, self._commits, self._num_commits)
        re_root(pool, self._commits, self._num_commits, regrows=self._regrows)
        count_tokens(self._shared.processors, self._commits, self._num_commits)

    def _hand_on(self, rows: SampledRows, size: int) -> None:
        """Pass on the nodes that a step of R = `size` rows has grown, on the device; a draft worker's host does it."""

    @torch.inference_mode()
    def _begin(self, bucket: int, *, processes: bool, reads: bool = False) -> tuple[Packed, SampledRows, torch.Tensor]:
        """Run a step's stages up to the forward pass, or what stands for it, perhaps with processors.

        Returns:
            The step, the rows that bring children and their logits [L, V]; on a CPU without padding.
        """
        self._take()
        pool, packed, rows = self.pool, self._packed[bucket], self._sampled[bucket]
        if reads:
            waits = (pool.state == RowState.RUNNING) & (pool.cached < pool.length)
            pool.state.masked_fill_(waits, RowState.PREFILL)
        select(pool, self._selection, bucket, children=self.branching, chunk=self._config.max_step_tokens)
        publish_early(self.memory.early, self._early_words, self._rounds)
        pack(pool, self._selection, packed)
        sample_rows(pool, packed, self._parameters, rows)
        if self.device == _CPU:
            rows = rows.first(int(rows.count[0]))
            if not self._selection.totals[0]:
                return packed, rows, torch.empty((0, 0))
        logits = self._logits(bucket, rows, reads=reads)
        return packed, rows, self._process(logits, rows, packed) if processes else logits

    def _logits(self, bucket: int, rows: SampledRows, *, reads: bool = False) -> torch.Tensor:
        packed, most = self._packed[bucket], self.buckets[bucket].most
        if reads and self._read_logits is not None:
            return self._read_logits(packed, rows.rows)
        return self._model.logits(packed, self.pool, rows.rows, most=most)

    def _process(self, logits: torch.Tensor, rows: SampledRows, packed: Packed) -> torch.Tensor:
        processed = self._shared.processed[: len(logits)]
        process_logits(logits, rows, packed, self.pool, self._shared.processors, processed)
        return processed

    def begin_hosted(self, bucket: int) -> tuple[int, Packed, SampledRows, torch.Tensor]:
        """Run a step's stages up to the forward pass, for a step in whose choices the host has a part; wait for them.

        Returns:
            The bucket that it ran in, the step, its rows with padding, and logits after the processors without.
        """
        bucket = self.bucket_among(self._hosted, bucket)
        if bucket in self._hosted:
            graph, found = self._hosted[bucket]
            graph.replay()
        else:
            found = self._begin(bucket, processes=True)
        if self._side is not None:
            torch.cuda.current_stream(self.device).synchronize()
        packed, rows, logits = found
        return bucket, packed, rows, logits[: int(rows.count[0])]

    def bucket_among(self, numbers: Collection[int], bucket: int) -> int:
        """Return the first of some buckets that holds whatever a bucket holds; that itself if none of them does."""
        wanted, buckets = self.buckets[bucket], self.buckets
        found = (
            number
            for number in sorted(numbers)
            if buckets[number].rows >= wanted.rows
            and buckets[number].sessions >= wanted.sessions
            and buckets[number].most >= wanted.most
        )
        return next(found, bucket)

    def _rank(self, logits: torch.Tensor, rows: SampledRows) -> None:
        tokens, log_q, scores = coupled_topk_scored(
            logits,
            rows.seeds,
            rows.positions,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            choice_index=rows.choice_index,
            k=self._ranked,
        )
        outputs = self._tokens, self._buckets, self._nodes, self._acceptances
        estimate_children(tokens, log_q, scores, rows, self._tables, self._config.min_acceptance, outputs)

    def put_children(
        self,
        rows: SampledRows,
        tokens: npt.NDArray[np.int32],
        buckets: npt.NDArray[np.int32],
        acceptances: npt.NDArray[np.float32],
    ) -> None:
        """Set the children [L, K] that the host has chosen; token -1 for none, bucket -1 where nothing is learned."""
        count, least = len(tokens), self._config.min_acceptance
        nodes = np.where(acceptances >= least, tokens, -1).astype(np.int32)
        for column, values in ((self._tokens, tokens), (self._buckets, buckets)):
            column[:count].copy_(torch.from_numpy(values))
        for column, values in ((self._nodes, nodes), (self._acceptances, acceptances)):
            column[rows.rows] = torch.from_numpy(values).to(self.device)

    @torch.inference_mode()
    def end(self, bucket: int, packed: Packed, rows: SampledRows) -> None:
        """Run a step's last stages: the children join the trees, and the host is told."""
        size, lines = packed.tokens.shape[0], self.buckets[bucket].lines
        nodes, made, parent_ids = self._nodes[:size], self._made[:size], self._parent_ids[:size]
        append(self.pool, packed, nodes, self._acceptances[:size], made, parent_ids)
        self._hand_on(rows, size)
        columns = self._tokens[:lines], self._buckets[:lines], self._acceptances, self._made, self._parent_ids
        counts = self._selection.needed, self._began
        reports = self.memory.reports
        report_children(self.pool, self._selection.totals, rows, columns, counts, reports, self._rounds, self.lines)
        publish_report(reports, self._nothing, self._tail, self._rounds)

    def warm_up(self) -> None:
        """Compile what steps run, capture their graphs and time them; called before any session is opened."""
        began = time.perf_counter()
        report_stage("compiling kernels")
        self._compile()
        compiled, graphs = time.perf_counter(), self._shared.graphs
        assert graphs is not None, "graphs are a GPU's"
        for done, bucket in enumerate(reversed(range(len(self.buckets)))):
            report_stage(f"CUDA graphs: {done + 1} of {len(self.buckets)}")
            self._capture(bucket, graphs)
        # Times are for steps without processors.
        self.times_ns = self._time_buckets(reads=False)
        self.reading_ns = self.times_ns if self._read_logits is None else self._time_buckets(reads=True)
        self._forget_rounds()
        captured = time.perf_counter()
        logger.info(
            "%d CUDA graphs: compiled in %.1f s, captured in %.1f s",
            len(self._graphs) + len(self._hosted), compiled - began, captured - compiled,
        )  # fmt: skip

    def _compile(self) -> None:
        """Compile what steps need, several kernels at a time."""

        def run(bucket: int) -> None:
            with torch.inference_mode(), torch.cuda.device(self.device):
                rows = self._sampled[bucket]
                logits = self._logits(bucket, rows)
                for found in (logits, self._process(logits, rows, self._packed[bucket])):
                    self._rank(found, rows)

        with compiling_threads() as threads:
            found = threads.map(run, range(len(self.buckets)))
            # What all buckets share, beside them.
            self._step(0, processes=True)
            list(found)
        torch.cuda.synchronize(self.device)
        # Memory that only compiling in several threads has needed.
        torch.cuda.empty_cache()

    def _capture(self, bucket: int, graphs: GraphMemory) -> None:
        kinds = (False,) if self._read_logits is None else (False, True)
        for processes, reads in product((True, False), kinds):
            step = partial(self._step, bucket, processes=processes, reads=reads)
            with torch.cuda.stream(graphs.stream):
                step()
            torch.cuda.synchronize(self.device)
            self._graphs[bucket, processes, reads] = graphs.capture(step)
        if self._is_hosted(bucket):
            found = list[tuple[Packed, SampledRows, torch.Tensor]]()
            beginning = graphs.capture(lambda: found.append(self._begin(bucket, processes=True)))
            self._hosted[bucket] = beginning, found[0]

    def _time_buckets(self, *, reads: bool) -> list[float]:
        stream = torch.cuda.Stream(self.device)
        return time_buckets(len(self.buckets), lambda bucket: self._graphs[bucket, False, reads].replay(), stream)

    def _is_hosted(self, bucket: int) -> bool:
        """True if hosted steps run in this bucket: the widest of each number of sessions, and those for prompts."""
        own, following = self.buckets[bucket], self.buckets[bucket + 1 :]
        return all(other.sessions != own.sessions or other.most > own.most for other in following)

    def _forget_rounds(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for words in (self._rounds, self._tail, self.memory.early, self.memory.reports):
            words.zero_()
