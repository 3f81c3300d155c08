from __future__ import annotations

import pytest
import torch

from outrider.kernels import early_launch
from outrider.kernels.early_launch import early_options


@pytest.mark.parametrize(("capability", "early"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_launches_begin_early_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], early: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert early_launch.launches_early.__wrapped__(torch.device("cuda:0")) is early
    assert not early_launch.launches_early.__wrapped__(torch.device("cpu"))


def test_kernels_of_a_cpu_are_launched_in_order() -> None:
    assert early_options(torch.device("cpu")) == {"EARLY": False}
