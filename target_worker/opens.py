"""Opens and closes sessions between steps, and remembers why an open was refused."""

from collections.abc import Iterable, Sequence

from outrider.target_worker.sessions import (
    Code,
    OpenRequest,
    Outcome,
    SessionFault,
    SessionKey,
    TreeRequest,
    TreeResult,
)
from outrider.target_worker.step_jobs import Faults
from outrider.target_worker.verifier import StepResult, Verifier


class Opens:
    """Of one target.

    Attributes:
        weights: version of the model's weights, where it is known; sessions that began with other ones are refused.
    """

    def __init__(self) -> None:
        self.weights = ""
        # Why a session's latest open failed, with its epoch, told with the session's first tree: an open without trees
        # is not answered.
        self._refused: dict[SessionKey, tuple[int, SessionFault]] = {}

    def open(self, verifier: Verifier, opens: Sequence[OpenRequest]) -> Faults:
        """Opens sessions; what was wrong."""
        faults: list[tuple[SessionKey, int, SessionFault]] = []
        for request in opens:
            try:
                if request.weights and self.weights and request.weights != self.weights:
                    message = (
                        f"weights were replaced: {self.weights} runs here, the session began with {request.weights}"
                    )
                    raise SessionFault(Code.ABORTED, message)
                verifier.open(request)
                self._refused.pop(request.key, None)
            except SessionFault as fault:
                self._refused[request.key] = (request.epoch, fault)
                faults.append((request.key, request.epoch, fault))
        return faults

    def close(self, verifier: Verifier, key: SessionKey, epoch: int) -> None:
        """Closes a session, whether it was opened or refused."""
        if key in self._refused and self._refused[key][0] <= epoch:
            del self._refused[key]
        verifier.close(key, epoch)

    def tell_refused(self, trees: Iterable[TreeRequest], step: StepResult) -> None:
        """Puts into a step's results why sessions are not open."""
        if not self._refused:
            return
        for place, tree in enumerate(trees):
            epoch, fault = self._refused.get(tree.key, (None, None))
            if epoch != tree.epoch:
                continue
            del self._refused[tree.key]
            if step.results[place].outcome is Outcome.ERROR:
                step.results[place] = TreeResult(outcome=Outcome.ERROR, fault=fault)
