"""Whatever comes in whatever order: tokens are those of plain decoding, and nothing is left behind."""

import random

import pytest
from tests.target_worker.rounds.driving import Driver, adversarial_tree, make_loop, no_tree, oracle_tree, random_tree
from tests.target_worker.rounds.random_sessions import live, random_cases

pytestmark = pytest.mark.usefixtures("device")


def test_random_opens_closes_holds_and_growth_leave_nothing_behind(checkpoint, reference_model):
    rng = random.Random(17)
    loop = make_loop(checkpoint, num_slots=190, chunk=9, max_step_rows=24, max_session_rows=8, capacity=32)
    makers = [random_tree, oracle_tree, adversarial_tree, no_tree]
    live(Driver(loop, seed=3), random_cases(reference_model, rng), rng, makers=makers)
