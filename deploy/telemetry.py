"""What an actor tells of itself: its log's lines, and traces of what it serves."""

import logging
import sys
from dataclasses import dataclass
from typing import Literal, Self

from outrider.deploy.config import DeployConfig
from outrider.roles.log_output import JsonFormatter, LogFormat, TextFormatter

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """How, and how much.

    Attributes:
        log_level: least severity that is logged.
        log_format: lines for people, or a JSON object a line.
        otlp_endpoint: collector that gets traces; None traces nothing.
    """

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None

    @classmethod
    def of(cls, config: DeployConfig) -> Self:
        """A deployment's."""
        return cls(log_level=config.log_level, log_format=config.log_format, otlp_endpoint=config.otlp_endpoint)

    def start_log(self, name: str) -> None:
        """Sends this process's log to stderr, which Ray keeps; `name` is in every line."""
        handler = logging.StreamHandler(sys.stderr)
        text = TextFormatter(f"%(asctime)s {name} %(levelname)s %(message)s")
        handler.setFormatter(JsonFormatter(name) if self.log_format == "json" else text)
        logging.basicConfig(level=self.log_level.upper(), handlers=[handler])
