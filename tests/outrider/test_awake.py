from pathlib import Path

import pytest

from outrider.awake import cores_awake
from outrider.errors import OutriderError


def _is_open(device: Path) -> bool:
    return device.resolve() in [entry.resolve() for entry in Path("/proc/self/fd").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_the_device_holds_the_request_for_the_time_of_the_block(tmp_path):
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    with cores_awake(True, device):
        assert device.read_bytes() == b"\0\0\0\0"
        assert _is_open(device)
    assert not _is_open(device)


def test_nothing_is_touched_unless_wanted(tmp_path):
    with cores_awake(False, tmp_path / "cpu_dma_latency"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_machine_without_the_interface_says_what_it_takes(tmp_path):
    with (
        pytest.raises(OutriderError, match=r"--keep-cores-awake: cannot write .*nowhere.*root"),
        cores_awake(True, tmp_path / "nowhere" / "device"),
    ):
        pass
