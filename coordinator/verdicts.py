"""A step's verdicts in columns, as the answer has them: one session's is made only for who asks for it."""

from collections.abc import Sequence
from typing import overload

from outrider.coordinator.messages import SessionFault, SessionVerdict, TokenLogprobs
from outrider.coordinator.parts import Parts


class Verdicts(Sequence[SessionVerdict]):
    """What the target says of S trees, as of `SessionVerdict`.

    Attributes:
        session_ids: [S]
        epochs: [S]
        accepted: [S] numbers of accepted nodes of each.
        token_ids: [S] emitted tokens of each.
        deferred: [S], or empty: none is.
        faults: [S], or empty: none has one.
        logprobs: [S], or empty: nobody asked.
        cached_tokens: [S], or empty: none had any.

    Raises:
        ValueError: they are not of one length.
    """

    def __init__(
        self,
        *,
        session_ids: list[int],
        epochs: list[int],
        accepted: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        deferred: Sequence[bool] = (),
        faults: Sequence[SessionFault | None] = (),
        logprobs: Sequence[TokenLogprobs | None] = (),
        cached_tokens: Sequence[int] = (),
    ) -> None:
        self.session_ids, self.epochs = session_ids, epochs
        self.deferred, self.faults, self.logprobs = deferred, faults, logprobs
        self.cached_tokens = cached_tokens
        given = [epochs, accepted, token_ids, *filter(None, (deferred, faults, logprobs, cached_tokens))]
        if any(len(column) != len(session_ids) for column in given):
            lengths = ", ".join(str(len(column)) for column in given)
            raise ValueError(f"columns of {lengths} entries given for {len(session_ids)} sessions")
        self.accepted, self.token_ids = Parts.of(accepted), Parts.of(token_ids)

    @classmethod
    def of(cls, verdicts: Sequence[SessionVerdict]) -> "Verdicts":
        """These in columns; themselves where they are."""
        if isinstance(verdicts, Verdicts):
            return verdicts
        deferred, faults = [own.deferred for own in verdicts], [own.fault for own in verdicts]
        logprobs, cached_tokens = [own.logprobs for own in verdicts], [own.cached_tokens for own in verdicts]
        return cls(
            session_ids=[own.session_id for own in verdicts],
            epochs=[own.epoch for own in verdicts],
            accepted=[own.accepted_nodes for own in verdicts],
            token_ids=[own.token_ids for own in verdicts],
            deferred=deferred if any(deferred) else (),
            faults=faults if any(faults) else (),
            logprobs=logprobs if any(logprobs) else (),
            cached_tokens=cached_tokens if any(cached_tokens) else (),
        )

    @property
    def have_tokens(self) -> bool:
        """Whether each has some."""
        return not self.deferred and not self.faults

    def __len__(self) -> int:
        return len(self.session_ids)

    @overload
    def __getitem__(self, place: int) -> SessionVerdict: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[SessionVerdict]: ...
    def __getitem__(self, place: int | slice) -> "SessionVerdict | Sequence[SessionVerdict]":
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return SessionVerdict(
            self.session_ids[place],
            self.epochs[place],
            bool(self.deferred) and self.deferred[place],
            self.faults[place] if self.faults else None,
            self.accepted[place],
            self.token_ids[place],
            self.logprobs[place] if self.logprobs else None,
            self.cached_tokens[place] if self.cached_tokens else 0,
        )
