import random

import pytest

from outrider.coordinator.trials import Trials

NOTHING: frozenset[int] = frozenset()


def play(
    trials: Trials,
    rates: list[float],
    rounds: int,
    *,
    sessions: int = 8,
    hopeless=NOTHING,
    sampled: int = 0,
    seed: int = 0,
):
    """Plays rounds in which every way emits at its rate, as unevenly as sessions do; how often each was used."""
    chance, used = random.Random(seed), [0] * len(rates)
    for _ in range(rounds):
        way = trials.current
        used[way] += 1
        tokens = sum(chance.choice((0.3, 1.0, 1.7)) for _ in range(sessions)) * rates[way]
        trials.observe(
            placed=sessions,
            sampled=sampled,
            sessions=sessions,
            verified=sessions,
            tokens=tokens,
            round_ns=1.0,
            hopeless=hopeless,
        )
    return used


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_better_way_is_used_most(best):
    rates = [1.0, 1.0, 1.0]
    rates[best] = 1.15
    used = play(Trials(range(3)), rates, 4000)
    assert used[best] > 0.85 * 4000
    # The others are never forgotten for good.
    assert min(used) > 20


def first_ways(rates, rounds: int, *, of: Trials) -> list[int]:
    """The way of each round."""
    return [next(way for way, times in enumerate(play(of, rates, 1, seed=number)) if times) for number in range(rounds)]


@pytest.mark.parametrize("best", [0, 1, 2])
def test_every_way_is_played_twice_before_ways_are_compared(best):
    """However clear the first blocks are: one may have met a cold start, or bad luck."""
    rates = [0.6, 0.6, 0.6]
    rates[best] = 1.0
    ways = first_ways(rates, 24 + 6 * 12 + 5 * 2 + 1, of=Trials(range(3)))
    # The first block settles longer; the others have two rounds for it.
    assert ways == [0] * 36 + ([1] * 14 + [2] * 14 + [0] * 14 + [1] * 14 + [2] * 14) + [best]


def test_the_first_rounds_of_a_load_are_no_way_s_doing():
    """What steps cost is learned in them: were they counted, the way to begin with would look bad for long."""
    trials = Trials(range(2))
    ways = first_ways([1e-3, 1.0], 24, of=trials)
    assert set(ways) == {0}
    # A block of 12 rounds is behind these; so long the way goes on.
    assert set(first_ways([1.2, 1.0], 12, of=trials)) == {0}
    assert first_ways([1.2, 1.0], 1, of=trials) == [1]
    later = first_ways([1.2, 1.0], 200, of=trials)
    assert later.count(0) > 0.7 * 200


def test_each_load_has_first_rounds_of_its_own():
    trials = Trials(range(2))
    play(trials, [1.2, 1.0], 600)
    play(trials, [1e-3, 1.0], 24, sessions=1)
    assert play(trials, [1.0, 1.0], 12, sessions=1)[0] == 12
    used = play(trials, [1.3, 1.0], 1000, sessions=1)
    assert used[0] > 0.6 * 1000


def test_a_way_that_has_become_better_is_found():
    trials = Trials(range(2))
    play(trials, [1.2, 1.0], 2000)
    used = play(trials, [1.0, 1.2], 3000)
    assert used[1] > 0.7 * 3000


def test_other_requests_are_no_merit_of_the_way_that_has_not_seen_them():
    """All ways emit a quarter of what they did: the one that is better now is found at once, not when all have sunk."""
    trials = Trials(range(3))
    play(trials, [4.0, 4.4, 4.8], 2000)
    assert trials.current == 2
    used = play(trials, [1.2, 1.0, 0.9], 500)
    assert used[0] > 0.75 * 500


def test_requests_of_other_rates_keep_the_ranking():
    """One session, whose requests emit at thrice the rate of others: a new one says nothing of the ways."""
    used = 0
    for seed in range(20):
        trials, chance = Trials(range(4)), random.Random(seed)
        for number in range(60):
            level = chance.choice((1.0, 3.0))
            rates = [level * factor for factor in (1.0, 1.1, 0.95, 0.8)]
            used += play(trials, rates, 250, sessions=1, seed=100 * seed + number)[1]
    assert used > 0.5 * 20 * 60 * 250


@pytest.mark.parametrize("seed", range(4))
def test_a_way_does_not_stay_for_what_other_requests_have_brought(seed):
    """All become faster while little is known, the way that is played less than the others."""
    trials = Trials(range(3))
    play(trials, [1.0, 1.25, 1.1], 300, sessions=16, seed=seed)
    assert play(trials, [3.0, 2.4, 2.6], 600, sessions=16, seed=10 + seed)[0] > 0.6 * 600


def test_sampled_requests_do_not_inherit_the_ranking_of_greedy_ones():
    """One session: what is far behind with greedy requests is best with sampled ones, and the other way round."""
    greedy, sampled, used = [1.3, 2.2, 2.0], [0.57, 0.5, 0.48], 0
    for seed in range(10):
        trials = Trials(range(3))
        play(trials, greedy, 1000, sessions=1, seed=seed)
        used += play(trials, sampled, 1000, sessions=1, sampled=1, seed=100 + seed)[0]
    assert used > 0.6 * 10 * 1000


def test_what_was_known_of_greedy_requests_is_known_when_they_come_again():
    trials = Trials(range(3))
    play(trials, [1.3, 2.2, 1.5], 3000, sessions=1)
    play(trials, [0.7, 0.5, 0.5], 1000, sessions=1, sampled=1)
    assert play(trials, [1.3, 2.2, 1.5], 200, sessions=1)[1] > 0.9 * 200


def test_most_sessions_say_whether_requests_are_sampled():
    trials = Trials(range(2))
    play(trials, [1.0, 1.3], 1000, sampled=4)
    play(trials, [1.3, 1.0], 1000, sampled=5)
    assert play(trials, [1.0, 1.3], 100, sampled=0)[1] > 90
    assert play(trials, [1.3, 1.0], 100, sampled=8)[0] > 90


def test_loads_that_take_turns_every_few_rounds_are_compared_all_the_same():
    """Six sessions and sixteen: no block would ever end if a change began it anew."""
    trials, used = Trials(range(2)), 0
    for number in range(300):
        used += play(trials, [1.0, 1.5], 6, sessions=6 if number % 2 else 16, seed=number)[1]
    assert used > 0.7 * 300 * 6


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_loads_that_take_turns_within_a_few_rounds_are_compared_all_the_same(rounds):
    """Eleven sessions and twelve, of which records are kept apart: none has a round left after two to settle."""
    trials, used = Trials(range(2)), 0
    for number in range(900 // rounds):
        used += play(trials, [1.0, 1.5], rounds, sessions=12 - number % 2, seed=number)[1]
    assert used > 0.7 * 900


def test_a_load_that_never_lasts_longer_than_two_rounds_is_compared_all_the_same():
    """Three clients, one of whom is now and then between two requests."""
    trials, used = Trials(range(2)), 0
    for number in range(400):
        play(trials, [1.0, 1.5], 12, sessions=3, seed=number)
        used += play(trials, [1.0, 1.5], 2, sessions=2, seed=number)[1]
    assert used > 0.6 * 400 * 2


def test_a_session_that_comes_and_goes_is_no_other_load():
    """Sixteen clients, one of whom is between two requests: what is known of sixteen is known of fifteen."""
    trials = Trials(range(2))
    play(trials, [1.0, 1.5], 600, sessions=16)
    assert play(trials, [1.0, 1.5], 100, sessions=15)[1] > 90


def test_a_block_that_goes_on_settles_where_another_way_was_played():
    """Each load has a best way of its own; what a way leaves slows down the next one's first round."""
    trials, used, before = Trials(range(2)), 0, 0
    for number in range(6000):
        is_many, way = number // 6 % 2 == 1, trials.current
        slowdown, before = (0.1 if way != before else 1.0), way
        rates = [rate * slowdown for rate in ([1.0, 0.85] if is_many else [0.5, 1.0])]
        first, _ = play(trials, rates, 1, sessions=16 if is_many else 8, seed=number)
        used += first if is_many and number >= 3000 else 0
    assert used > 0.6 * 1500


def test_the_further_off_a_block_is_the_more_doubtful_is_the_ranking():
    """One session, all requests greedy: other ones emit a quarter, and the way that was far behind is best."""
    used = 0
    for seed in range(10):
        trials = Trials(range(3))
        play(trials, [2.6, 4.4, 4.0], 1200, sessions=1, seed=seed)
        used += play(trials, [1.15, 1.0, 0.95], 1000, sessions=1, seed=100 + seed)[0]
    assert used > 0.5 * 10 * 1000


def test_a_way_that_was_hardly_of_any_use_is_tried_again():
    """Twenty times slower, with workers that had only begun, say."""
    trials = Trials(range(2))
    play(trials, [1.0, 0.05], 300)
    play(trials, [1.0, 1.5], 5000)
    assert play(trials, [1.0, 1.5], 1000)[1] > 0.8 * 1000


@pytest.mark.parametrize("seed", range(6))
def test_the_level_is_found_before_other_ways_are_looked_at(seed):
    """Half of the block in which requests change is played before: the same way plays the next one, too."""
    trials = Trials(range(3))
    play(trials, [1.0, 3.0, 1.0], 1000 + 2 * seed, seed=seed)
    assert trials.current == 1
    assert play(trials, [0.125, 0.375, 0.125], 13, seed=seed)[1] == 13


@pytest.mark.parametrize("rounds", [8, 14, 20, 26])
def test_a_way_without_hope_does_not_play_to_find_the_level(rounds):
    trials = Trials(range(3))
    play(trials, [1.0, 3.0, 1.0], 1000)
    play(trials, [0.125, 0.375, 0.125], rounds)
    hopeless = trials.current
    play(trials, [0.125, 0.375, 0.125], 1, hopeless=frozenset({hopeless}))
    assert trials.current != hopeless


@pytest.mark.parametrize("seed", range(4))
def test_the_best_way_is_left_when_it_alone_has_become_slower(seed):
    trials = Trials(range(3))
    play(trials, [1.0, 1.25, 1.1], 3000, sessions=16, seed=seed)
    assert play(trials, [1.0, 0.75, 1.1], 1000, sessions=16, seed=10 + seed)[1] < 0.25 * 1000


def test_pauses_of_the_machine_are_no_other_requests():
    """One round in a hundred takes fifteen times as long: the blocks that have it are nothing to begin anew for."""
    trials, used = Trials(range(3)), 0
    for number in range(100):
        used += play(trials, [1.0, 1.2, 1.0], 99, sessions=16, seed=number)[1]
        trials.observe(placed=16, sampled=0, sessions=16, verified=16, tokens=16.0, round_ns=15.0, hopeless=NOTHING)
    assert used > 0.75 * 99 * 100


def test_a_way_that_begins_badly_is_heard_again():
    """One session alone: the first block of the first way met a cold start."""
    trials = Trials(range(3))
    play(trials, [0.7, 0.9, 0.9], 68, sessions=1)
    used = play(trials, [1.2, 1.0, 1.0], 3000, sessions=1)
    assert used[0] > 0.6 * 3000


def test_every_number_of_sessions_has_records_of_its_own():
    trials = Trials(range(2))
    play(trials, [1.0, 1.3], 2000, sessions=8)
    assert trials.current == 1
    play(trials, [1.3, 1.0], 600, sessions=64)
    assert trials.current == 0
    assert play(trials, [1.0, 1.3], 400, sessions=8)[1] > 300


def test_a_hopeless_way_is_left_at_once_and_not_tried():
    trials = Trials(range(2))
    assert play(trials, [1.0, 5.0], 500, hopeless=frozenset({1}))[1] == 0
    play(trials, [1.0, 5.0], 200)
    assert trials.current == 1
    assert play(trials, [1.0, 5.0], 100, hopeless=frozenset({1}))[1] <= 1


def test_what_one_way_shows_where_there_is_no_other_is_not_held_against_it():
    """Plain decoding, then drafts, with which either way gives thrice the tokens."""
    trials = Trials(range(2))
    play(trials, [1.0, 1.0], 2000, hopeless=frozenset({1}))
    assert play(trials, [3.3, 3.0], 400)[0] > 300


def test_requests_that_come_and_go_are_compared_all_the_same():
    """One short request after another: the first rounds of each have one way, in its last nobody is left."""
    trials, used = Trials(range(2)), 0
    for _ in range(400):
        play(trials, [1.0, 1.0], 2, sessions=1, hopeless=frozenset({1}))
        used += play(trials, [1.0, 1.5], 9, sessions=1)[1]
        trials.observe(placed=1, sampled=0, sessions=0, verified=1, tokens=1.0, round_ns=1.0, hopeless=NOTHING)
    assert used > 0.7 * 400 * 9


def test_prompts_that_come_and_go_do_not_begin_anew():
    trials = Trials(range(2))
    for _ in range(300):
        play(trials, [1.0, 1.5], 10, sessions=16)
        trials.observe(placed=16, sampled=0, sessions=15, verified=15, tokens=15.0, round_ns=1.0, hopeless=NOTHING)
    assert play(trials, [1.0, 1.5], 300, sessions=16)[1] > 200


def test_a_long_life_leaves_the_filter_sound():
    """Four ways, one of which never is to be tried: rounding must not add up (warnings are errors)."""
    trials = Trials(range(4))
    used = play(trials, [1.0, 1.01, 1.2, 1.0], 60_000, sessions=8, hopeless=frozenset({3}))
    assert used[2] > 0.8 * 60_000


def test_longer_rounds_of_more_sessions_are_no_pauses():
    """Rounds of many sessions take forty times as long: that must not count for the way that meets them first."""
    trials, used = Trials(range(2)), [0, 0]
    play(trials, [1.0, 1.0], 400, sessions=1)
    for _ in range(200):
        way = trials.current
        used[way] += 1
        rate = (0.9, 1.0)[way]
        trials.observe(
            placed=256, sampled=0, sessions=256, verified=256, tokens=256 * rate, round_ns=40.0, hopeless=NOTHING
        )
    assert used[1] > 0.7 * 200


def test_a_load_that_is_met_while_another_way_is_played_has_its_first_rounds_all_the_same():
    """They are slow, whoever plays them: the way that comes first is not to pay for that."""
    trials = Trials(range(2))
    play(trials, [1.0, 2.0], 400, sessions=1)
    assert trials.current == 1
    used = play(trials, [0.1, 0.1], 24, sessions=16)
    assert used == [23, 1]
