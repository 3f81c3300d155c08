"""Keeps the machine's cores from falling asleep while a role serves.

A round passes through six threads that sleep until a message or the device wakes them. A core that has nothing to do
for some milliseconds, a step of the target, goes to sleep so deeply that waking it takes long: in a virtual machine it
is given back to the host. Linux keeps cores ready for as long as somebody holds /dev/cpu_dma_latency open and has
written there how many microseconds a wake-up may take (the kernel's PM quality of service interface).
"""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import OutriderError

_DEVICE = Path("/dev/cpu_dma_latency")


@contextlib.contextmanager
def cores_awake(wanted: bool, device: Path = _DEVICE) -> Iterator[None]:
    """For the time of the block no core of this machine sleeps, if that is wanted: all of them draw full power.

    Raises:
        OutriderError: the kernel's interface is not here, or not for this user.
    """
    if not wanted:
        yield
        return
    try:
        request = device.open("wb", buffering=0)
    except OSError as error:
        raise OutriderError(
            f"--keep-cores-awake: cannot write {device}: {error.strerror}; it takes Linux and a user who may (root, or "
            "a container that was given the device)"
        ) from error
    with request:
        # A signed 32-bit number of microseconds.
        request.write(struct.pack("=i", 0))
        yield
