"""Requests that crash workers: who is suspected, how suspects are told apart, and who is not tried a third time.

    a target crashes or hangs  ->  all that it was verifying are suspects: one strike each
    at the next target         ->  a suspect is verified alone, until a few results have come: then it is cleared
    it crashes again           ->  whoever was alone, and had a strike already, is refused: PoisonRequest

So the second crash says who it was, and the others, cleared or still waiting for their turn, are not touched by it.
Sessions that are under no suspicion take turns with the one on trial, and one of them may be poisonous, too: the crash
is held against those whose turn it was. Where that is not known (nobody has come through a round yet) it is held
against all of them, but not as the proof that an alone suspect's is; a third strike is one.
Nobody is suspected for a worker that merely fell silent, or whose link broke while its process lives on: a strike is
withdrawn when the same process registers again, and a request is refused only after a wait in which it could have. A
request that crashes workers at one place of its output does so again at once, for it goes on from there. What crashes
them only now and then is not found here: to blame whoever is there most often would hit those that run for long.

Strikes are kept by caller and request id, so a client that resumes here does not begin anew. Another coordinator does
not know of them: a poisonous request costs two workers at each coordinator that its client turns to.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.coordinator.sessions.session import Session
from outrider.errors import PoisonRequest
from outrider.roles.log_output import about

logger = logging.getLogger(__name__)

DOUBT_S = 3.0
# A suspect that has had so many results is cleared.
_RESULTS = 3
# Crashes that are held against one request among others.
_MOST_STRIKES = 2
_MOST_RECORDS = 4096
_Key = tuple[str, str, int]


class LossKind(Enum):
    """Way in which a target was lost, which decides about strikes."""

    SILENT = auto()
    """Nothing is heard of it, or it went by itself: nobody is suspected."""
    BROKEN = auto()
    """Its stream broke: it crashed, unless the same process comes back."""
    HUNG = auto()
    """Its step does not come back, and it says so itself."""


@dataclass
class _Record:
    """Strikes of one choice: workers that crashed with it, and whether it was alone at the last."""

    strikes: list[str] = field(default_factory=list)
    was_alone: bool = False


class Suspects:
    """Strikes of requests that were in flight when targets were lost."""

    def __init__(self) -> None:
        self._records: dict[_Key, _Record] = {}

    def note_loss(self, worker_id: str, sessions: Sequence[Session], kind: LossKind) -> None:
        """Note the loss of a target that was verifying these sessions."""
        if kind is LossKind.SILENT:
            return
        for session in sessions:
            record = self._records.setdefault(_key(session), _Record())
            # One that hangs has its process ended: that it registers once more before says nothing.
            record.strikes.append(worker_id if kind is LossKind.BROKEN else "")
            record.was_alone = len(sessions) == 1
            session.probation = _RESULTS
        while len(self._records) > _MOST_RECORDS:
            del self._records[next(iter(self._records))]

    def note_return(self, worker_id: str) -> None:
        """A worker registers: if it is known, it has not crashed."""
        for record in self._records.values():
            if worker_id in record.strikes:
                record.strikes.remove(worker_id)

    def note_result(self, session: Session) -> None:
        """Note that a suspect was verified alone, and nothing happened."""
        session.probation -= 1
        if session.probation == 0:
            self.forget(session)

    def check(self, request: GenerationRequest) -> None:
        """Check that a request may be admitted, before anything of it is stored.

        Raises:
            PoisonRequest: one of its choices has been refused before.
        """
        if any(self._is_condemned(_key_of(request, index)) for index in range(request.n)):
            raise self.refusal(request)

    def recall(self, session: Session) -> None:
        """A choice begins: what is known of it from before."""
        record = self._records.get(_key(session))
        if record is not None and record.strikes:
            session.probation = _RESULTS

    def condemns(self, session: Session) -> bool:
        """Return whether it is the one, alone at the last of two crashes or there at three without a result between."""
        return self._is_condemned(_key(session))

    def _is_condemned(self, key: _Key) -> bool:
        record = self._records.get(key)
        return record is not None and len(record.strikes) > (1 if record.was_alone else _MOST_STRIKES)

    def refusal(self, request: GenerationRequest) -> PoisonRequest:
        """Return the error for the client."""
        request_id = request.request_id
        logger.error("request %s is refused: targets crash of it", request_id, extra=about(request_id=request_id))
        return PoisonRequest(
            f"request {request_id} was being verified, alone or again and again, when two target workers crashed: it "
            "is not tried again"
        )

    def forget(self, session: Session) -> None:
        """Drop a session's strikes: it is cleared, or its request ended for another reason than a lost target."""
        self._records.pop(_key(session), None)


def _key(session: Session) -> _Key:
    return _key_of(session.request, session.index)


def _key_of(request: GenerationRequest, index: int) -> _Key:
    return request.caller, request.request_id, index
