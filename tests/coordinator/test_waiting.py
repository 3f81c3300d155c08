"""The queue: who is next, and what counts as one entry."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.coordinator.sessions.waiting import WaitingSessions


class Waiting:
    """A session, as far as the queue sees it."""

    def __init__(self, number: int, client: str = "", entry: str = "", *, tokens: int = 3, begun: bool = False) -> None:
        self.session_id, self.begun = number, begun
        self.request: Any = self
        self.generation: Any = self
        self.client, self.entry, self.prompt_token_ids = client, entry or str(number), range(tokens)
        self.has_begun = begun


def order(queue: WaitingSessions) -> list[int]:
    found = []
    while (session := queue.next()) is not None:
        found.append(session.session_id)
    return found


def filled(*sessions: Any) -> WaitingSessions:
    queue = WaitingSessions()
    for session in sessions:
        queue.append(session)
    return queue


def test_clients_take_turns_and_each_keeps_its_order():
    many = [Waiting(number, "a", "all") for number in range(5)]
    queue = filled(*many, Waiting(10, "b"), Waiting(11, "c"), Waiting(12, "b"))
    assert (len(queue), queue.entries, queue.tokens) == (8, 4, 24)
    assert order(queue) == [0, 10, 11, 1, 12, 2, 3, 4]
    assert (len(queue), queue.entries, queue.tokens) == (0, 0, 0)


def test_a_client_that_comes_back_does_not_pass_those_who_wait():
    queue: Any = filled(Waiting(1, "a"), Waiting(2, "b"), Waiting(3, "b"))
    assert queue.next().session_id == 1
    queue.append(Waiting(4, "a"))
    assert order(queue) == [2, 4, 3]


def test_those_that_have_lost_their_place_come_first_as_old_as_they_are():
    queue: Any = filled(Waiting(1), Waiting(2))
    for number in (9, 8, 7):
        queue.put_first(Waiting(number))
    assert order(queue) == [7, 8, 9, 1, 2]


def test_while_weights_are_changed_only_what_has_begun_goes_on():
    queue: Any = filled(Waiting(1, "a"), Waiting(2, "b"), Waiting(3, "b", begun=True))
    assert queue.next(has_begun=True).session_id == 3
    assert queue.next(has_begun=True) is None
    assert order(queue) == [1, 2]


def test_prompts_of_one_request_are_one_entry_until_the_last_has_left():
    queue = filled(Waiting(1, entry="batch"), Waiting(2, entry="batch"))
    assert queue.has_entry("batch")
    queue.next()
    assert (queue.entries, queue.has_entry("batch")) == (1, True)
    queue.next()
    assert (queue.entries, queue.has_entry("batch")) == (0, False)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.sampled_from(["append", "first", "remove", "next"]))
    )
)
def test_whatever_happens_it_counts_right(steps):
    queue, known = WaitingSessions(), {}
    for number, client, step in steps:
        if step == "next":
            found = queue.next()
            assert (found is None) == (not known)
            if found is not None:
                del known[found.session_id]
        elif step == "remove" and number in known:
            queue.remove(known.pop(number))
        elif step in {"append", "first"} and number not in known:
            known[number] = Waiting(number, client)
            (queue.append if step == "append" else queue.put_first)(known[number])
        assert {session.session_id for session in queue} == known.keys()
        assert (len(queue), queue.entries, queue.tokens) == (len(known), len(known), 3 * len(known))
        assert all(session in queue for session in known.values())
