"""Sessions that begin alike go to one target, as long as that one has not much more to do than the others."""

from typing import Any

import pytest

from outrider.coordinator.workers.routing import BLOCK_TOKENS, MOST_BLOCKS, PrefixRouter, block_keys
from outrider.coordinator.workers.shared_places import SharedPlaces
from outrider.coordinator.workers.target_peer import TargetPeer

NOTHING: Any = None

SHARED = list(range(1000, 1000 + 4 * BLOCK_TOKENS))


def make_target(name: str, *, places: int = 16, sessions: int = 0) -> TargetPeer:
    target = TargetPeer(worker_id=name, link=NOTHING, places=SharedPlaces(places))
    take(target, sessions)
    return target


def take(target: TargetPeer, count: int = 1) -> None:
    for _ in range(count):
        target.sessions[len(target.sessions)] = NOTHING


def prompt(number: int, *, shared: int = len(SHARED), length: int = len(SHARED)) -> list[int]:
    """So many tokens as in every other prompt, then ones of its own."""
    return SHARED[:shared] + [100_000 * (number + 1) + place for place in range(length - shared)]


def send(router: PrefixRouter, token_ids: list[int], targets: list[TargetPeer]) -> str:
    with_room = [target for target in targets if target.room]
    chosen = router.choose(token_ids, with_room)
    take(chosen)
    return chosen.worker_id


def test_sessions_without_anything_in_common_are_spread_evenly():
    router, targets = PrefixRouter(), [make_target("a"), make_target("b"), make_target("c", places=32)]
    for number in range(32):
        send(router, prompt(number, shared=0), targets)
    assert [len(target.sessions) for target in targets] == [8, 8, 16]


def test_sessions_that_begin_alike_follow_each_other_until_the_target_has_much_more_to_do():
    router, targets = PrefixRouter(), [make_target("a"), make_target("b")]
    take(targets[0])
    assert send(router, prompt(0), targets) == "b"
    sent = [send(router, prompt(0), targets) for _ in range(12)]
    # 4 of 16 places more than the other are put up with; after that both have it, and load decides.
    assert sent[:5] == ["b"] * 5
    assert sent[5] == "a"
    assert abs(len(targets[0].sessions) - len(targets[1].sessions)) <= 1


def test_the_less_is_shared_the_less_load_is_put_up_with():
    def imbalance_of(shared: int) -> int:
        router, targets = PrefixRouter(), [make_target("a", places=64), make_target("b", places=64)]
        assert send(router, prompt(0, shared=shared), targets) == "a"
        number = 1
        while send(router, prompt(number, shared=shared), targets) == "a":
            number += 1
        return number

    assert imbalance_of(len(SHARED)) == 17
    assert imbalance_of(len(SHARED) // 2) == 9
    assert imbalance_of(0) == 1


def test_the_longest_beginning_counts():
    router, first, second = PrefixRouter(), make_target("a"), make_target("b")
    router.choose(prompt(0, shared=2 * BLOCK_TOKENS), [first])
    router.choose(prompt(1, shared=3 * BLOCK_TOKENS), [second])
    assert router.choose(prompt(1), [first, second]) is second
    assert router.choose(prompt(0, shared=2 * BLOCK_TOKENS), [first, second]) is first


def test_a_target_that_is_full_or_gone_is_no_reason_to_wait():
    router, old, new = PrefixRouter(), make_target("a"), make_target("b")
    router.choose(prompt(0), [old, new])
    assert router.choose(prompt(0), [new]) is new
    assert router.choose(prompt(0), [make_target("c", sessions=1), new]) is new
    for number in range(20):
        router.choose(prompt(0), [make_target(f"restarted-{number}")])
    assert len(router._holders[block_keys(prompt(0))[0]]) < 10, "who is gone makes way"


def test_a_target_that_was_full_is_still_known_when_it_has_room_again():
    router, full, other = PrefixRouter(), make_target("a"), make_target("b")
    router.choose(prompt(0), [full])
    router.choose(prompt(0, shared=BLOCK_TOKENS), [other])
    assert router.choose(prompt(0), [other, full]) is full


def test_what_is_remembered_is_bounded_and_beginnings_are_forgotten_last():
    router = PrefixRouter(most_remembered=10)
    for number in range(20):
        router.choose(prompt(number, shared=0), [make_target("a")])
    assert len(router._holders) == 10
    keys = block_keys(prompt(17, shared=0))
    assert [key in router._holders for key in keys] == [True, True, False, False]


@pytest.mark.parametrize("length", [0, 1, BLOCK_TOKENS - 1])
def test_short_prompts_go_by_load(length: int):
    router, busy, idle = PrefixRouter(), make_target("a", sessions=1), make_target("b")
    assert router.choose([7] * length, [busy, idle]) is idle
    assert router.choose([7] * length, [make_target("a"), make_target("b", sessions=1)]).worker_id == "a"


def test_blocks_stand_for_all_tokens_before_them():
    one, other = block_keys([1] * 70), block_keys([2] + [1] * 69)
    assert len(one) == 2
    assert not set(one) & set(other)
    assert block_keys([1] * 64 + [9] * 6) == one
    assert len(block_keys([3] * (BLOCK_TOKENS * (MOST_BLOCKS + 5)))) == MOST_BLOCKS
