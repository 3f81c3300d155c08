"""Stages of a process before it serves, as log records that whoever started it may show."""

import logging

logger = logging.getLogger("outrider.start")
# Weights smaller than this arrive before anybody has read that they are on their way.
_STEP_BYTES = 1 << 28


def report_stage(stage: str) -> None:
    """Say what begins now, such as "CUDA graphs: 3 of 20"."""
    logger.info(stage)


def report_weights(loaded: int, total: int, *, step: int) -> None:
    """Say how many bytes of the weights are there, where `step` more of them are worth a line."""
    if loaded // _STEP_BYTES != (loaded - step) // _STEP_BYTES:
        report_stage(f"weights: {loaded / 1e9:.1f} of {total / 1e9:.1f} GB")


class Stages(logging.Handler):
    """Keeps what this process has said in `texts`."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        self.texts.append(record.getMessage())
