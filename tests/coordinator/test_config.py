"""Options of a coordinator."""

import pytest

from outrider.coordinator.sessions.config import CoordinatorConfig


def test_a_choice_has_no_more_nodes_than_its_pool_holds():
    assert CoordinatorConfig(max_live_nodes=256).max_live_nodes == 256
    with pytest.raises(ValueError, match="max_live_nodes: 257 given, at most 256 needed"):
        CoordinatorConfig(max_live_nodes=257)
