"""A round as the device runs it: every stage an operator, nothing waits for the host.

    take_records, graft     growth joins the pools, sessions open and close
    take_chunks             prompts whose next part is computed beside the verification
    select, pack            the best nodes over all sessions, as rows of the forward pass
    forward                 one pass of the target, tree attention over these rows
    choose                  the target's own choice at every verified row
    walk                    down each tree as far as the choices agree
    re_root                 committed tokens leave the trees, what hangs below them stays; a resident drafter follows
    report                  committed tokens to the host

On a GPU a bucket's stages are three CUDA graphs: up to packing, the forward pass, and from the choices on, the last in
two forms: with processors and without. They are launched together, one round ahead; where the host has a part in the
choices, it works while the forward pass runs and launches what follows.

Rounds that are not captured (on a CPU, with `enforce_eager`, with attention that waits for the host as FlashInfer's
does) run one operator after the other, in one bucket: the host reads how many rows were packed, and the forward pass
computes no padding. None is launched ahead, and each has ended when its launch returns.

Shapes: S rows of the pool, R verified rows of a bucket, N sessions, M rows of a session at most, V vocabulary.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.bucket_times import time_buckets
from outrider.engine.graph_memory import GraphMemory
from outrider.engine.model_runner import ModelRunner
from outrider.engine.node_processors import describe_processors
from outrider.engine.packed_forward import PackedForward
from outrider.engine.round_rings import RingMemory
from outrider.engine.step_memory import StepMemory
from outrider.kernels.compiling_threads import compiling_threads
from outrider.kernels.coupled_sampling import coupled_choice
from outrider.kernels.pool.columns import MAX_STOPS, Pool
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import Packed, pack
from outrider.kernels.pool.prefill import Chunks, pack_chunks, take_chunks
from outrider.kernels.pool.re_root import re_root
from outrider.kernels.pool.records import WORDS
from outrider.kernels.pool.rings import publish_early, publish_report, take_records
from outrider.kernels.pool.select import Selection, select
from outrider.kernels.sampling.processors import count_tokens, process_logits
from outrider.kernels.sampling.rows import PARAMETERS, SampledRows, sample_rows
from outrider.kernels.verification.report import RoundTime, mark_time, report_round, round_words
from outrider.kernels.verification.token_logprobs import Logprobs, rank_logits, report_logprobs
from outrider.kernels.verification.walk import WalkRules, Walks, coin_rates, walk
from outrider.roles.start_progress import report_stage
from outrider.target_worker.drafters.model import DraftModel, ResidentModel
from outrider.target_worker.rounds import host_part
from outrider.target_worker.rounds.buckets import MAX_CHUNKS, round_buckets
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.host_part import HostRows, Masks
from outrider.target_worker.rounds.report import ReportShape
from outrider.target_worker.rounds.session import Level, Session

logger = logging.getLogger(__name__)

# Records of the ring, at least, and for each session. It holds what comes in two rounds: 64 sessions' drafts make five
# thousand nodes in one of 6 ms, and may be three times as fast. What has no room waits, and is soon stale.
_LEAST_RECORDS, _SESSION_RECORDS = 32_768, 64


class _Graphs(NamedTuple):
    """Graphs of a bucket: the stages before the forward pass, the pass, and by level the stages behind it."""

    pack: torch.cuda.CUDAGraph
    forward: torch.cuda.CUDAGraph
    ends: dict[Level, torch.cuda.CUDAGraph]


class RoundProgram:
    """The pool of a target's sessions, and the rounds that verify it.

    Args:
        model: the forward pass.
        config: sizes.
        num_slots: KV slots of the model.
        row_len: most slots of a session.
        vocab_size: V.
        device: of the model.
        captures: whether rounds are captured in CUDA graphs.
        draft: a draft model or a head that grows the trees here; None without one.

    Attributes:
        pool: the trees.
        buckets: shapes of rounds, by number.
        captured_ns: what an empty round of each bucket took when it was captured; none without graphs.
        memory: shared with the host.
        shape: sizes of a report.
        runs_ahead: whether a round may be launched before the one before has ended.
        drafter: grows the trees between rounds; None without one.
    """

    def __init__(
        self,
        model: PackedForward,
        config: RoundConfig,
        *,
        num_slots: int,
        row_len: int,
        vocab_size: int,
        device: torch.device,
        captures: bool,
        draft: DraftModel | None = None,
    ) -> None:
        on_gpu, sessions = device.type == "cuda", config.max_sessions
        self._captures, self._is_capturing = captures and on_gpu, False
        self._memory_before = _device_memory(device) if on_gpu else None
        self._model, self.device, self.runs_ahead = model, device, self._captures
        self.pool = Pool.allocate(
            sessions=sessions,
            max_len=row_len,
            capacity=config.capacity,
            # A power of two; the first of those behind the draft workers' is the drafter's.
            places=config.places * (1 if draft is None else 2),
            device=device,
        )
        self.buckets = round_buckets(config, on_gpu=self._captures)
        self.captured_ns: list[float] = []
        # What the host needs early is one piece of memory: gains, then rows, sessions and needed rows.
        count = len(self.buckets)
        self._early_words = self._column(count + 2, dtype=torch.int64)
        totals = self._early_words[count:].view(torch.int32)
        self._least_value = 0.0
        self._selection = replace(
            Selection.allocate(self.pool, [bucket.selected for bucket in self.buckets]),
            gains=self._early_words[:count],
            totals=totals[:2],
            needed=totals[2:3],
        )
        self._packed = [
            Packed.allocate(self.pool, bucket.selected, scrap_slot=num_slots, extra_rows=bucket.prefill)
            for bucket in self.buckets
        ]
        self._chunks = [
            Chunks.allocate(self.pool, chunks=MAX_CHUNKS, rows=bucket.prefill) if bucket.prefill else None
            for bucket in self.buckets
        ]
        self._no_chunks = self._column(1)
        self._sampled = [SampledRows.allocate(bucket.rows, device) for bucket in self.buckets]
        self._parameters = self._column(sessions, PARAMETERS)
        self._rules = WalkRules.allocate(sessions, device)
        self._asked = torch.full((sessions,), -1, dtype=torch.int32, device=device)
        largest, lines = max(bucket.sessions for bucket in self.buckets), max(bucket.rows for bucket in self.buckets)
        most = max(bucket.most for bucket in self.buckets)
        self.shape = ReportShape(sessions=largest, most=most, logprobs=min(config.logprobs, vocab_size))
        self._walks = Walks.allocate(self.pool, sessions=largest, most=most)
        self._ranked = Logprobs.allocate(lines, self.shape.logprobs, device)
        # Of captured rounds.
        self._raw_logits = self._column(lines if self._captures else 0, vocab_size, dtype=model.dtype)
        # Growth steps run between rounds, and have no more lines than this.
        growth_lines = 0 if draft is None else draft.growth.max_step_nodes + sessions
        self._shared = StepMemory.allocate(
            sessions=sessions, lines=max(lines, growth_lines), vocab_size=vocab_size, device=device
        )
        self._decided = self._column(lines)
        # Verified rows are the first ones of a step.
        self._lines = torch.arange(lines, device=device)
        records = 1 << (max(_LEAST_RECORDS, _SESSION_RECORDS * sessions) - 1).bit_length()
        self._records = self._column(records, WORDS)
        self._verdicts, self._count = self._column(records), self._column(1)
        self.drafter = None
        if draft is not None:
            self.drafter = ResidentModel(
                draft,
                self.pool,
                place=config.places,
                records=records,
                round_rows=config.max_step_rows,
                shared=self._shared,
            )
        # A target's tokens are its own: no records commit any.
        self._commits, self._num_commits = self._column(sessions, 1), self._column(sessions)
        self._tail, self._rounds = (self._column(1, dtype=torch.int64) for _ in range(2))
        self._times = self._column(len(RoundTime), dtype=torch.int64)
        self._nothing = self._column(0, dtype=torch.int64)
        self.memory = RingMemory.allocate(
            records=records, early_words=count + 2, report_words=round_words(largest, most), pinned=on_gpu
        )
        self._reported_logprobs = torch.zeros(
            (2, largest, most, 1 + 2 * self.shape.logprobs), dtype=torch.int32, pin_memory=on_gpu
        )
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._graphs: dict[int, _Graphs] = {}  # by bucket

    @classmethod
    def of_runner(cls, runner: ModelRunner, config: RoundConfig, *, draft: DraftModel | None = None) -> Self:
        """Return the program of a loaded target, perhaps with a drafter beside it."""
        return cls(
            runner.packed_forward(
                sessions=config.max_sessions + MAX_CHUNKS, features=None if draft is None else draft.features
            ),
            config,
            num_slots=runner.slots.num_slots,
            row_len=runner.slots.max_row_len,
            vocab_size=runner.vocab_size,
            device=runner.device,
            captures=runner.config.captures,
            draft=draft,
        )

    def _column(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def describe_row(self, session: Session, slots: npt.NDArray[np.int32]) -> None:
        """Write the columns of a session's row, which no launched round uses; they are in place on return.

        Args:
            session: whose row.
            slots: [n] int32, those of its KV.
        """
        sampling, row, pool, rules = session.sampling, session.row, self.pool, self._rules
        stops = host_part.device_stops(sampling)
        rates = coin_rates(sampling.synthetic_rates) if sampling.is_synthetic else []
        columns: list[tuple[torch.Tensor, npt.NDArray[np.generic]]] = [
            (pool.history[row], session.history[: session.length]),
            (pool.table[row], slots),
            (pool.stops[row], np.array(stops + [-1] * (MAX_STOPS - len(stops)), np.int32)),
            (pool.max_nodes[row : row + 1], np.array([session.max_nodes], np.int32)),
            (pool.max_depth[row : row + 1], np.array([session.max_depth + 1], np.int32)),
            (pool.min_end[row : row + 1], np.array([session.prompt_len + sampling.min_new_tokens], np.int32)),
            (self._parameters[row], np.frombuffer(sampling.record, np.int32)),
            (rules.level[row : row + 1], np.array([session.level], np.int32)),
            (rules.num_rates[row : row + 1], np.array([len(rates)], np.int32)),
            (rules.rates[row], np.array(rates, np.float32)),
            (self._asked[row : row + 1], np.array([-1 if sampling.logprobs is None else sampling.logprobs], np.int32)),
        ]
        with torch.cuda.stream(self._side):
            for column, values in columns:
                column[: len(values)].copy_(torch.from_numpy(values.copy()))
            prompt, output = np.split(session.history[: session.length], [session.prompt_len])
            describe_processors(self._shared.processors, row, sampling, prompt, output)
        if self._side is not None:
            self._side.synchronize()
        if self.drafter is not None:
            self.drafter.describe_row(session)

    def read_early(self, words: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
        """Return each bucket's gain and the verified rows of a round, from its early words, [buckets + 2] int64."""
        return words[:-2], int(words[-2:].view(np.int32)[0])

    def logprobs(self, round_: int) -> npt.NDArray[np.int32]:
        """Return the log probabilities of a round whose report has just been read: [N, M, 1 + 2 K]."""
        return self._reported_logprobs.numpy()[round_ % 2]

    def launch(self, bucket: int, level: Level, by_row: Sequence[Session | None], *, least_value: float = 0.0) -> None:
        """Run a round; with graphs nothing is waited for, unless the host has a part in it.

        Args:
            bucket: its number.
            level: of the sessions that take part.
            by_row: sessions by row of the pool.
            least_value: nodes of a lower value are left out.
        """
        self._set_least_value(least_value)
        graphs = self._graphs.get(bucket)
        if graphs is None:
            self._pack(bucket)
        else:
            graphs.pack.replay()
        if self._side is not None and level is Level.HOSTED:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        if graphs is None:
            logits = self._forward(bucket)
        else:
            logits = self._raw_logits[: self.buckets[bucket].rows]
            with self._lead(bucket, graph=bucket):
                graphs.forward.replay()
        if level is Level.HOSTED:
            with torch.cuda.stream(self._side):
                rows = host_part.host_rows(self._packed[bucket], self.pool, by_row)
            self._end(bucket, level, logits, rows, host_part.grammar_masks(rows))
        elif graphs is None:
            self._end(bucket, level, logits)
        else:
            graphs.ends[level].replay()

    def _set_least_value(self, least_value: float) -> None:
        """Have the rounds launched from now on leave out nodes of a lower value."""
        if least_value != self._least_value:
            self._least_value = least_value
            self._selection.least_value.fill_(least_value)

    def wait(self) -> None:
        """Let the device get on with a round that the host waits for.

        Raises:
            RuntimeError: something has gone wrong on the device.
            WorkerUnavailable: another rank was lost.
        """
        if self._side is not None:
            torch.cuda.current_stream(self.device).query()
        with self._model.ranks.guard():
            time.sleep(0)

    @torch.inference_mode()
    def _pack(self, bucket: int) -> None:
        """Run a round's stages before the forward pass."""
        pool, memory, selection = self.pool, self.memory, self._selection
        packed, rows, chunks = self._packed[bucket], self._sampled[bucket], self._chunks[bucket]
        began = self._times[: RoundTime.BEGAN + 1]
        take_records(memory.ring, memory.head, self._records, self._count, self._tail, began)
        graft(pool, self._records, self._count, self._verdicts, self._commits, self._num_commits)
        if chunks is not None:
            take_chunks(pool, self._records, self._count, chunks, selection.reserved_sessions)
        select(pool, selection, bucket)
        publish_early(memory.early, self._early_words, self._rounds)
        pack(pool, selection, packed)
        if chunks is not None:
            pack_chunks(pool, selection, chunks, packed)
        sample_rows(pool, packed, self._parameters, rows)
        mark_time(self._times, RoundTime.PACKED)

    @torch.inference_mode()
    def _forward(self, bucket: int) -> torch.Tensor:
        """Logits [R, V]; without graphs those of the rows that there are."""
        packed, lines, count = self._packed[bucket], self._lines[: self.buckets[bucket].rows], None
        if not self._captures:
            count = int(packed.query_start[-1])
            if not count:
                return self._shared.processed[:0]
            lines = lines[: int(self._sampled[bucket].count[0])]
        with nullcontext() if self._is_capturing else self._lead(bucket, lines=len(lines), count=count):
            logits = self._model.logits(packed, self.pool, lines, most=self._most(bucket), count=count)
        mark_time(self._times, RoundTime.FORWARDED)
        return logits

    def _most(self, bucket: int) -> int:
        return max(self.buckets[bucket].most, self.buckets[bucket].prefill)

    def _lead(
        self, bucket: int, *, lines: int | None = None, graph: int | None = None, count: int | None = None
    ) -> AbstractContextManager[None]:
        lines = self.buckets[bucket].rows if lines is None else lines
        return self._model.lead(self._packed[bucket], lines=lines, most=self._most(bucket), graph=graph, count=count)

    @torch.inference_mode()
    def _end(
        self,
        bucket: int,
        level: Level,
        logits: torch.Tensor,
        hosted: Sequence[HostRows] = (),
        masks: Masks | None = None,
    ) -> None:
        """Run a round's stages behind the forward pass."""
        pool, packed, chunks = self.pool, self._packed[bucket], self._chunks[bucket]
        choices, decided = self._choose(bucket, level, logits, hosted, masks)
        walk(pool, packed, choices, decided, self._rules, self._parameters, self._walks, level=level)
        mark_time(self._times, RoundTime.WALKED)
        re_root(pool, self._walks.tokens, self._walks.num_tokens, self._walks.tree_ends)
        if self.drafter is not None:
            self.drafter.follow(self._records, self._count, self._walks.tokens, self._walks.num_tokens)
        reports, rounds = self.memory.reports, self._rounds
        if level >= Level.PROCESSED:
            count_tokens(self._shared.processors, self._walks.tokens, self._walks.num_tokens)
            report_logprobs(logits, self._ranked, packed, self._walks, self._asked, self._reported_logprobs, rounds)
        num_chunks = self._no_chunks if chunks is None else chunks.count
        report_round(pool, self._selection, packed, self._walks, num_chunks, self._times, reports, rounds)
        publish_report(reports, self._nothing, self._tail, rounds)
        if self.device.type == "cuda" and not self._captures:
            torch.cuda.current_stream(self.device).synchronize()

    def _choose(
        self, bucket: int, level: Level, logits: torch.Tensor, hosted: Sequence[HostRows], masks: Masks | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The choice at every verified row, and where the host has decided a path, its children."""
        if not len(logits):
            return self._column(0, dtype=torch.int64), None
        packed, rows = self._packed[bucket], self._sampled[bucket].first(len(logits))
        if level >= Level.PROCESSED:
            rank_logits(logits, rows.pool_rows, self._asked, self._ranked)
            processed = self._shared.processed[: len(logits)]
            process_logits(logits, rows, packed, self.pool, self._shared.processors, processed)
            logits = processed
        if masks is not None:
            host_part.apply_masks(masks, logits, packed)
        host_part.ban_stops(hosted, logits)
        choices = coupled_choice(
            logits,
            rows.seeds,
            rows.positions,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            choice_index=rows.choice_index,
        )
        best = logits.gather(1, choices.clamp(min=0)[:, None])[:, 0]
        choices = torch.where(best.isfinite(), choices, -1)
        if level is not Level.HOSTED:
            return choices, None
        host_part.force_choices(hosted, choices)
        decided = self._decided[: len(logits)]
        host_part.judge(hosted, packed, rows, logits, choices, decided)
        return choices, decided

    def warm_up(self) -> None:
        """Compile what rounds run, capture their graphs and time them; called before any session is opened."""
        if self.drafter is not None:
            self.drafter.warm_up()
        if not self._captures:
            self.launch(0, Level.PLAIN, ())
            self._forget_rounds()
            return
        began = time.perf_counter()
        report_stage("compiling kernels")
        self._compile()
        compiled = time.perf_counter()
        graphs = self._shared.graphs
        assert graphs is not None and self._memory_before is not None, "graphs are a GPU's"
        for done, bucket in enumerate(reversed(range(len(self.buckets)))):
            report_stage(f"CUDA graphs: {done + 1} of {len(self.buckets)}")
            self._capture(bucket, graphs)
        self.captured_ns += time_buckets(
            len(self.buckets), lambda bucket: self.launch(bucket, Level.PLAIN, ()), graphs.stream
        )
        self._forget_rounds()
        captured = time.perf_counter()
        used = [
            (now - before) / 1e9 for now, before in zip(_device_memory(self.device), self._memory_before, strict=True)
        ]
        logger.info(
            "%d CUDA graphs: compiled in %.1f s, captured in %.1f s; with what rounds read and write, %.2f GB "
            "(%.2f in tensors, %.2f kept by PyTorch for graphs and reuse, the rest the driver's)",
            4 * len(self._graphs), compiled - began, captured - compiled,
            used[0], used[1], used[2] - used[1],
        )  # fmt: skip

    def _compile(self) -> None:
        """Compile what rounds need, several kernels at a time: rounds without sessions may run in any order."""

        def run(bucket: int) -> None:
            with torch.cuda.device(self.device):
                self.launch(bucket, Level.PLAIN, ())
                self.launch(bucket, Level.PROCESSED, ())

        buckets = range(len(self.buckets))
        if self._model.ranks.world_size == 1:
            with compiling_threads() as threads:
                list(threads.map(run, buckets))
        else:
            for bucket in buckets:
                run(bucket)
        torch.cuda.synchronize(self.device)
        # Memory that only compiling in several threads has needed.
        torch.cuda.empty_cache()

    def _capture(self, bucket: int, graphs: GraphMemory) -> None:
        def end(level: Level) -> torch.cuda.CUDAGraph:
            return graphs.capture(lambda: self._end(bucket, level, logits))

        logits = self._raw_logits[: self.buckets[bucket].rows]
        with torch.cuda.stream(graphs.stream):
            self.launch(bucket, Level.PLAIN, ())
        torch.cuda.synchronize(self.device)
        self._is_capturing = True
        pack = graphs.capture(lambda: self._pack(bucket))
        with self._lead(bucket, graph=bucket):
            forward = graphs.capture(lambda: logits.copy_(self._forward(bucket)))
        self._model.ranks.note_graph(forward)
        ends = {level: end(level) for level in (Level.PLAIN, Level.PROCESSED)}
        self._graphs[bucket] = _Graphs(pack, forward, ends)
        self._is_capturing = False

    def _forget_rounds(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for words in (self._rounds, self._tail, self.memory.early, self.memory.reports):
            words.zero_()


def _device_memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes in use on the device, by whomever; of these, in this process's tensors; and what PyTorch has reserved."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
