"""Which weights a request's tokens are chosen with, and who has to wait while they are changed.

A request is of the weights that the service runs with when it is placed at a target; from then on, wherever it goes on,
it has to find the same. While the gate is held nothing is placed but what has begun: a request whose other choices run,
or one that has lost its target.
"""

from outrider.errors import WeightsReplaced


class WeightsGate:
    """Asked for every session before it is placed.

    Attributes:
        version: that the targets run with; empty while nobody knows.
        is_held: nothing new is to begin.
    """

    def __init__(self) -> None:
        self.version = ""
        self.is_held = False

    def fits(self, weights: str) -> bool:
        """Whether what began with these weights may go on."""
        return not weights or not self.version or weights == self.version

    def check(self, weights: str) -> None:
        """The same.

        Raises:
            WeightsReplaced: it may not.
        """
        if not self.fits(weights):
            raise self.refusal(weights)

    def refusal(self, weights: str) -> WeightsReplaced:
        """What whoever began with these weights is told."""
        return WeightsReplaced(
            f"weights were replaced: the service runs with {self.version}, and the request began with {weights}; the "
            "tokens delivered stay valid, ask anew for an answer of the new ones"
        )
