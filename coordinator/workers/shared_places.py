"""A coordinator's share of a worker's session slots where several coordinators use it.

A worker takes so many sessions, whosever they are, and refuses more. Of P places at a worker that N coordinators use,
each may count on its share, P / N. Beyond it a coordinator borrows what nobody uses:

    free   = P - sessions that the worker has, all coordinators' together
    kept   = 1 for each other coordinator, as long as the others have not used up their own shares
    places = own sessions + (free - kept)    while more are free than are kept
             own sessions                    while just as many are
             share                           while fewer are: somebody needs what was borrowed

and never less than its share. So one that is alone with all the load has all places but those kept, a first request
that comes to another finds one at once, and what was borrowed is given back as its sessions end. All of it is read
from the worker's heartbeats, so promises may be late by one of them: the worker's refusal is what makes them good.
Pure: no clock, nothing of gRPC.
"""

from outrider.v1 import common_pb2


def places(most: int, load: common_pb2.WorkerLoad, own: int) -> int:
    """Return how many sessions this coordinator may have at a worker.

    Args:
        most: that the worker takes.
        own: sessions that this coordinator has there now.
    """
    others = load.coordinators - 1
    if others < 1:
        return most
    share = max(1, most // load.coordinators)
    free, used_by_others = most - load.sessions, load.sessions - own
    kept = min(others, max(0, others * share - used_by_others))
    if free < kept or (not kept and not free):
        return share
    return min(most, max(share, own + free - kept))


class SharedPlaces:
    """The places of one worker.

    Args:
        max_sessions: that the worker takes.

    Attributes:
        most_sessions: that this coordinator may have there now.
        is_shared: whether other coordinators use the worker, too.
        has_others: whether others' sessions are there, as far as is known.
    """

    def __init__(self, max_sessions: int) -> None:
        self._most = self._share = self.most_sessions = max_sessions
        self.is_shared = self.has_others = False

    def hear(self, load: common_pb2.WorkerLoad, own: int) -> bool:
        """Note a heartbeat, with `own` sessions there; return whether there are more places than before."""
        before = self.most_sessions
        self.is_shared = load.coordinators > 1
        self._share = self._most // max(1, load.coordinators)
        self.has_others = self.is_shared and load.sessions > own
        self.most_sessions = places(self._most, load, own)
        return self.most_sessions > before

    def note_refusal(self, own: int) -> bool:
        """Note that a worker has no room for more than `own` sessions: no more go there before its next heartbeat.

        Returns:
            Whether that one's place was borrowed, so that it had better wait elsewhere.
        """
        self.most_sessions = min(self.most_sessions, own)
        return own >= self._share
