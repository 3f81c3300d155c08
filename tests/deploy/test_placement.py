"""Where a deployment's actors go: places kept together, and nodes chosen and avoided by their ids."""

import pytest

from outrider.deploy import placement
from outrider.errors import WorkerUnavailable


async def test_places_kept_together_are_freed_with_their_target(monkeypatch: pytest.MonkeyPatch):
    asked = []
    wished = []

    def group(bundles: list[dict[str, float]], *, _soft_target_node_id: str | None, **_: object) -> None:
        asked.append(bundles)
        wished.append(_soft_target_node_id)

    monkeypatch.setattr(placement.ray.util, "placement_group", group)
    node = placement.Node(node_id="a", address="h", port=1, resources={"GPU": 4.0})
    kept = placement.keep_places([{"GPU": 2.0}, {"GPU": 0.5}, {}], name="d/target-0", nodes=[node], rather_on="a")
    assert wished == ["a"]
    assert kept.takers == [None, None, None]
    assert asked == [[{"GPU": 2.0}, {"GPU": 0.5}, {"CPU": 0.001}]]
    with pytest.raises(WorkerUnavailable, match="5 GPUs of one node asked for, no node has so many: at most 4"):
        placement.keep_places([{"GPU": 5.0}], name="d/target-0", nodes=[node])


async def test_nodes_are_chosen_and_avoided_by_their_ids():
    assert placement.selector(among=None, avoided=()) == {}
    assert placement.selector(among=None, avoided={"b", "a"}) == {"ray.io/node-id": "!in(a,b)"}
    assert placement.selector(among=["c", "a", "b"], avoided={"b"}) == {"ray.io/node-id": "in(a,c)"}
