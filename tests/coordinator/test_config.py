"""Options of a coordinator."""

from typing import Any

import pytest

from outrider.coordinator.sessions.config import CoordinatorConfig


@pytest.mark.parametrize("name", ["max_nodes", "max_live_nodes"])
def test_a_choice_has_no_more_nodes_than_its_pool_holds_and_no_fewer_unless_told(name: str) -> None:
    assert getattr(CoordinatorConfig(), name) == 256
    for wrong in (0, 257):
        options: dict[str, Any] = {name: wrong}
        with pytest.raises(ValueError, match=f"{name}: {wrong} given, 1 to 256 needed"):
            CoordinatorConfig(**options)
