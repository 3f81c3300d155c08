"""How a planned step is run: with its children ranked on the device, or as a forward whose logits are looked at.

The first where every row's children are found by rank under log q + G, of logits as they are, and the model has staged
steps (`outrider.engine.step_runner`). The second where a session's processors or its rule need the logits themselves,
and for models that only have `forward`. Both give the same children but for rounding.

Shapes: R rows whose children are wanted, k children.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.draft_distribution import DraftDistribution
from outrider.draft_worker import child_kernels
from outrider.draft_worker.choice import ChildChooser, Children
from outrider.draft_worker.step_plan import StepPlan
from outrider.engine import growth_kernels
from outrider.engine.batch import ForwardBatch
from outrider.engine.buckets import Bucket
from outrider.engine.draft_buckets import growth_buckets, words_per_mask
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_runner import LaunchedStep, StepRunner


class Runner(Protocol):
    """What growth needs of a model; `outrider.engine.model_runner.ModelRunner` is one.

    One that has `steps`, a `StepRunner`, is driven through it where possible.
    """

    slots: SlotTable

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] float32."""
        ...


@dataclass(frozen=True, slots=True)
class FoundChildren:
    """The children of R nodes, by column.

    Attributes:
        tokens: [R, k] int64, best first; -1 past the last that may be chosen.
        acceptance: [R, k] float64 estimates given the parent.
        buckets: [R, k] int64 calibration buckets of each.
        learned: [R] int64: 0 where the calibration learns nothing from them.
        distributions: [R] the q that the one token was drawn from, under rejection; empty where there is none.
    """

    tokens: npt.NDArray[np.int64]
    acceptance: npt.NDArray[np.float64]
    buckets: npt.NDArray[np.int64]
    learned: npt.NDArray[np.int64]
    distributions: Sequence[DraftDistribution | None] = ()

    @staticmethod
    def of(children: Sequence[Children]) -> "FoundChildren":
        """Those of nodes that were looked at one by one."""
        shape = len(children), max([len(found.tokens) for found in children], default=0)
        columns = FoundChildren(
            np.full(shape, -1),
            np.zeros(shape),
            np.zeros(shape, dtype=np.int64),
            np.array([found.buckets is not None for found in children], dtype=np.int64),
            [found.distribution for found in children],
        )
        for row, found in enumerate(children):
            count = len(found.tokens)
            columns.tokens[row, :count] = found.tokens
            columns.acceptance[row, :count] = found.acceptance[:count]
            if found.buckets is not None:
                columns.buckets[row, :count] = found.buckets[:count]
        return columns


@dataclass(frozen=True, slots=True)
class GrowthFlight:
    """A step under way.

    Attributes:
        plan: what it computes.
        is_done: whether the device has come to its end.
        collect: waits for that end; the children.
        begun_ns: when its launch began.
        expected_end_ns: when the device should come to its end if nothing ran before it; 0 where nothing is known of
            that.
        device_ns: how long the device should take.
    """

    plan: StepPlan
    is_done: Callable[[], bool]
    collect: Callable[[], FoundChildren]
    begun_ns: int
    expected_end_ns: int = 0
    device_ns: int = 0


_NOTHING = FoundChildren.of([])
# Steps of which one asks the device for its time.
_TIMED_EVERY = 8


class GrowthLauncher:
    """Launches steps of one model.

    Args:
        runner: the model.
        chooser: makes children of logits and ranks.
        max_nodes: most nodes of a tree that have KV.

    Attributes:
        overlaps: whether the device works on its own between `launch` and `collect`.
    """

    def __init__(self, runner: Runner, chooser: ChildChooser, *, max_nodes: int) -> None:
        self._runner, self._chooser = runner, chooser
        self._words = words_per_mask(max_nodes)
        steps: Any = getattr(runner, "steps", None)
        self._steps: StepRunner | None = steps if steps is not None and steps.takes_trees else None
        device: Any = getattr(runner, "device", None)
        self.overlaps = device is not None and device.type == "cuda"
        # By rows of the bucket: how long the device takes, averaged over the last steps.
        self._device_ns: dict[int, float] = {}
        self._seen: Counter[int] = Counter()

    @property
    def queues(self) -> bool:
        """Whether a step may be launched before the one before it was collected, and then have best children of its
        nodes in flight; where `due` is None, and of ranked steps alone.
        """
        return self.overlaps and self._steps is not None

    @property
    def due(self) -> Bucket | None:
        """What is captured before the next step: that runs the program, so no other step may be under way."""
        return None if self._steps is None else self._steps.due

    def warm_up(
        self, *, step_nodes: int, step_tokens: int, level_nodes: int, sessions: int, cuts: Collection[int]
    ) -> None:
        """Compiles and captures what growth begins with."""
        child_kernels.warm_up()
        if self._steps is not None:
            growth_kernels.warm_up()
            self._steps.cut(cuts)
            buckets = growth_buckets(
                self._steps.ladder,
                step_nodes=step_nodes,
                step_tokens=step_tokens,
                level_nodes=level_nodes,
                sessions=sessions,
                children=self._chooser.scored,
                words=self._words,
            )
            self._steps.warm_up(buckets, words=[self._words])

    def launch(self, plan: StepPlan) -> GrowthFlight:
        """Starts a step; on a device with staged steps nothing is waited for."""
        begun = time.perf_counter_ns()
        if self._steps is None or not plan.is_ranked:
            return self._forward(plan, begun)
        if (due := self._steps.due) is not None:
            self._steps.capture(due)
        staged = self._steps.stage_growth(plan.rows, children=self._chooser.scored, words=self._words)
        rows = staged.bucket.tokens
        # The device begins while the launch goes on.
        device_ns = int(self._device_ns.get(rows, 0))
        end = time.perf_counter_ns() + device_ns
        launched = self._steps.launch(staged)
        return GrowthFlight(
            plan, lambda: launched.is_done, lambda: self._ranked(plan, launched, rows), begun, end, device_ns
        )

    def _ranked(self, plan: StepPlan, launched: LaunchedStep, rows: int) -> FoundChildren:
        if not len(plan.nodes):
            launched.wait()
            return _NOTHING
        found = launched.children()
        self._note_time(rows, launched)
        temperature = plan.rows.temperatures()
        learned: npt.NDArray[np.bool_] | bool = True
        if any(session.is_sync for session, _ in plan.spans):
            learned = np.repeat([not session.is_sync for session, _ in plan.spans], [count for _, count in plan.spans])
        tokens, acceptance, buckets = self._chooser.ranked(
            found.tokens, found.log_q, found.scores, temperature, learned
        )
        return FoundChildren(tokens, acceptance, buckets, np.ones(len(tokens), dtype=np.int64))

    def _note_time(self, rows: int, launched: LaunchedStep) -> None:
        """Averages the device's times, of the first two steps of a size and of some later ones."""
        self._seen[rows] += 1
        if self._seen[rows] > 2 and self._seen[rows] % _TIMED_EVERY:
            return
        taken = launched.device_ns()
        known = self._device_ns.get(rows, taken)
        # The first may have compiled something between its launches, and is soon forgotten.
        self._device_ns[rows] = min(taken + 0.75 * (known - taken), 2 * taken)

    def _forward(self, plan: StepPlan, begun: int) -> GrowthFlight:
        logits = self._runner.forward(plan.rows.batch(1 if self._steps is None else self._words))

        def collect() -> FoundChildren:
            return FoundChildren.of(self._chooser.choose(plan.parents(), logits)) if len(plan.nodes) else _NOTHING

        return GrowthFlight(plan, _when_computed(logits), collect, begun)


def _when_computed(found: torch.Tensor) -> Callable[[], bool]:
    """What tells whether a tensor whose computation was launched last is there."""
    if not found.is_cuda:
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query
