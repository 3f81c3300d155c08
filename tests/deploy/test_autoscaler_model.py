"""Agreement of the autoscaler's model with a service of simple laws."""

import pytest
from tests.deploy.test_autoscaler import ROUND_S, Service

from outrider.deploy.autoscaler_model import Sample, speeds, window_of


def play(sessions: int, *, drafts: int, nodes: int) -> tuple[float, list[float]]:
    """The service's speed by that of plain decoding, and what the model says of each number of drafts."""
    service = Service(drafts=drafts, nodes=nodes)
    window = window_of([Sample.of(service.second(sessions), float(second)) for second in range(6)])
    plain_share = service.plain_s / ROUND_S
    return window.tokens_per_round * plain_share, speeds(window, 4)


def test_the_model_knows_the_speed_that_is_there_and_roughly_that_of_one_draft_more_or_less():
    one, from_one = play(16, drafts=1, nodes=4)
    two, from_two = play(16, drafts=2, nodes=4)
    assert from_one[0] == 1
    assert from_one[1] == pytest.approx(one, rel=0.05)
    assert from_two[2] == pytest.approx(two, rel=0.05)
    assert two / one > 1.15
    assert from_one[2] == pytest.approx(two, rel=0.2)
    assert from_two[1] == pytest.approx(one, rel=0.2)


def test_a_draft_that_keeps_up_with_its_sessions_is_said_to_be_enough():
    _, speed = play(4, drafts=1, nodes=64)
    assert speed[1] > 2
    assert speed[4] / speed[1] < 1.04
