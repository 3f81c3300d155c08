"""Drafters of measured rounds: recorded outputs, or a draft model on a thread of its own."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.model.drafter import ModelDrafter
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.engine.model_runner import ModelRunner
from outrider.sampling import SamplingSpec

_INCARNATION = 1
_OF_SIBLINGS = 0.3
"""Estimated chance of a child beside the best one."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Nodes of one session; columns as `RoundLoop.grow` takes them.

    Attributes:
        number: of the session.
        epoch: of the session at its drafter.
        as_of: committed tokens that the drafter had.
        node_ids, parents, tokens, acceptances: [n]
    """

    number: int
    epoch: int
    as_of: int
    node_ids: Sequence[int]
    parents: Sequence[int]
    tokens: Sequence[int]
    acceptances: Sequence[float]


class Drafter(Protocol):
    """Grows the trees of sessions, which are known by their numbers. For one thread."""

    def open(self, number: int, prompt: Sequence[int], sampling: SamplingSpec) -> None:
        """Begin to grow a session."""
        ...

    def commit(self, number: int, tokens: Sequence[int], now_ns: int) -> None:
        """The target has committed these."""
        ...

    def close(self, number: int) -> None:
        """The session is over."""
        ...

    def take(self, now_ns: int) -> Grown | None:
        """Return growth that has come by now; None if there is no more."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Trees that `ReplayDrafter` grows.

    Attributes:
        chance: that a level has the right token, if all levels above have.
        depth: levels.
        width: children of a node on the path.
        delay_ms: from a commit to the tree below it.
    """

    chance: float = 0.8
    depth: int = 6
    width: int = 1
    delay_ms: float = 1.0


class ReplayDrafter:
    """Grows trees from recorded outputs: a tree of one size below every commit.

    Args:
        records: output by number of the session, as recorded.
        options: what trees look like.
        vocab_size: bound of wrong tokens.
    """

    def __init__(self, records: Mapping[int, Sequence[int]], options: ReplayOptions, *, vocab_size: int) -> None:
        self._records, self._options, self._vocab_size = records, options, vocab_size
        self._prompts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._ids: defaultdict[int, int] = defaultdict(int)
        self._chances: dict[int, random.Random] = {}
        # Delays are equal, so growth comes in the order of commits.
        self._due: deque[tuple[int, int, int]] = deque()

    def open(self, number: int, prompt: Sequence[int], sampling: SamplingSpec) -> None:
        """See `Drafter`."""
        self._prompts[number] = self._lengths[number] = len(prompt)
        self._ids[number] = 0
        self._chances[number] = random.Random(sampling.seed)

    def commit(self, number: int, tokens: Sequence[int], now_ns: int) -> None:
        """See `Drafter`."""
        self._lengths[number] += len(tokens)
        self._due.append((now_ns + round(1e6 * self._options.delay_ms), number, self._lengths[number]))

    def close(self, number: int) -> None:
        """See `Drafter`."""
        self._lengths.pop(number, None)

    def take(self, now_ns: int) -> Grown | None:
        """See `Drafter`."""
        while self._due and self._due[0][0] <= now_ns:
            _, number, length = self._due.popleft()
            if number in self._lengths and (grown := self._tree(number, length)).tokens:
                return grown
        return None

    def _tree(self, number: int, length: int) -> Grown:
        options, chance = self._options, self._chances[number]
        begin = length - self._prompts[number]
        tokens, parents, acceptances = list[int](), list[int](), list[float]()
        node_ids, first, parent, is_right = list[int](), self._ids[number] + 1, 0, True
        for right in self._records[number][begin : begin + options.depth]:
            is_right = is_right and chance.random() < options.chance
            best = right if is_right else (right + 1) % self._vocab_size
            for child in range(options.width):
                tokens.append(best if not child else (right + 1 + child) % self._vocab_size)
                parents.append(parent)
                node_ids.append(first + len(node_ids))
                acceptances.append(options.chance if not child else _OF_SIBLINGS * (1 - options.chance))
            parent = node_ids[-options.width]
        self._ids[number] += len(node_ids)
        return Grown(
            number=number,
            epoch=1,
            as_of=length,
            node_ids=node_ids,
            parents=parents,
            tokens=tokens,
            acceptances=acceptances,
        )


Command = Callable[[ModelDrafter], object]


class DraftThread:
    """A draft model's drafter on a thread and, on a GPU, a stream of its own.

    Args:
        config: of the draft worker that it stands for.

    Attributes:
        ready: done when the model is loaded.
    """

    def __init__(self, config: DraftWorkerConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._grown: queue.SimpleQueue[Grown] = queue.SimpleQueue()
        self._starts: dict[int, SessionStart] = {}
        self._epochs: defaultdict[int, int] = defaultdict(int)
        self._limits = GrowthLimits(max_live_nodes=min(config.max_live_nodes, 64))
        self._failure: BaseException | None = None
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._thread.start()

    def open(self, number: int, prompt: Sequence[int], sampling: SamplingSpec) -> None:
        """See `Drafter`."""
        self._epochs[number] += 1
        start = SessionStart(
            key=(_INCARNATION, number),
            owner=None,
            epoch=self._epochs[number],
            prompt=prompt,
            output=(),
            sampling=sampling,
            limits=self._limits,
        )
        self._starts[number] = start
        self._commands.put(lambda drafter: drafter.open(start))

    def reopen(self, number: int, output: Sequence[int]) -> None:
        """Begin a session's tree anew, below what is committed by now."""
        self.close(number)
        self._epochs[number] += 1
        start = self._starts[number] = replace(self._starts[number], epoch=self._epochs[number], output=[*output])
        self._commands.put(lambda drafter: drafter.open(start))

    def commit(self, number: int, tokens: Sequence[int], now_ns: int) -> None:
        """See `Drafter`."""
        del now_ns
        self._commands.put(lambda drafter: drafter.commit((_INCARNATION, number), tokens))

    def close(self, number: int) -> None:
        """See `Drafter`."""
        self._commands.put(lambda drafter: drafter.close((_INCARNATION, number)))

    def take(self, now_ns: int) -> Grown | None:
        """See `Drafter`.

        Raises:
            RuntimeError: the thread has failed.
        """
        del now_ns
        if self._failure is not None:
            raise RuntimeError("the drafter has failed") from self._failure
        try:
            while (grown := self._grown.get_nowait()).epoch != self._epochs[grown.number]:
                pass
        except queue.Empty:
            return None
        return grown

    def stop(self) -> None:
        """End the thread."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                drafter = self._load(stack)
                self.ready.set_result(None)
                self._grow(drafter)
        except BaseException as failure:  # noqa: BLE001 - raised by `take`, or by who waits for `ready`
            self._failure = failure
            if not self.ready.done():
                self.ready.set_exception(failure)

    def _load(self, stack: ExitStack) -> ModelDrafter:
        config = self._config
        runner = ModelRunner(config.engine())
        stack.callback(runner.close)
        if runner.device.type == "cuda":
            # The target's rounds have the default stream.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(runner.device)))
        drafter = ModelDrafter(
            runner.packed_forward(sessions=config.max_num_seqs),
            config.growth(max_model_len=runner.info.max_model_len),
            max_sessions=config.max_num_seqs,
            num_slots=runner.slots.num_slots,
            vocab_size=runner.vocab_size,
            device=runner.device,
            captures=runner.config.captures,
        )
        drafter.warm_up()
        return drafter

    def _grow(self, drafter: ModelDrafter) -> None:
        rests = True
        while True:
            try:
                while True:
                    command = self._commands.get() if rests else self._commands.get_nowait()
                    if command is None:
                        return
                    command(drafter)
                    rests = False
            except queue.Empty:
                pass
            growths = drafter.advance()
            for growth in growths:
                for grown in split(growth):
                    self._grown.put(grown)
            rests = not growths and not drafter.is_busy
            if not growths and not rests:
                # The other threads may have the interpreter while the device works.
                time.sleep(0)


def split(growth: Growth) -> list[Grown]:
    """Return the growth of each session of a draft step."""
    parts, begin = list[Grown](), 0
    columns = zip(growth.session_ids, growth.epochs, growth.as_of, growth.counts, strict=True)
    for number, epoch, as_of, count in columns:
        own = slice(begin, begin + count)
        begin += count
        if count:
            grown = Grown(
                number=number,
                epoch=epoch,
                as_of=as_of,
                node_ids=growth.node_ids[own],
                parents=growth.parents[own],
                tokens=growth.tokens[own],
                acceptances=growth.acceptance[own],
            )
            parts.append(grown)
    return parts


def draft_config(
    folder: Path | None, device: str, *, sessions: int, max_model_len: int, kv_bytes: int | None
) -> DraftWorkerConfig:
    """Return the configuration of a draft worker for so many sessions."""
    return DraftWorkerConfig(
        model_path=folder, device=device, max_num_seqs=sessions, max_model_len=max_model_len, kv_bytes=kv_bytes
    )
