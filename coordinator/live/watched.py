"""What a tap reads of the session that it watches."""

from typing import Any, Protocol

from outrider.coordinator.messages import ChoiceResult, GenerationRequest, SpeculationMode
from outrider.coordinator.trees import Tree
from outrider.sampling import SamplingSpec


class SentTree(Protocol):
    """What a session has in flight."""

    @property
    def tree(self) -> Tree:
        """As it was chosen."""
        ...

    @property
    def submitted_ns(self) -> int:
        """When it left."""
        ...

    @property
    def waited_ns(self) -> int:
        """How long the target was held for growth before."""
        ...


class WatchedSession(Protocol):
    """What a tap reads of its session."""

    @property
    def request(self) -> GenerationRequest:
        """Whose choice it is."""
        ...

    @property
    def submission(self) -> SentTree | None:
        """What is in flight."""
        ...

    @property
    def result(self) -> ChoiceResult | None:
        """How it ended."""
        ...

    @property
    def committed_ns(self) -> int:
        """When tokens were last committed."""
        ...

    index: int
    mode: SpeculationMode
    sampling: SamplingSpec
    token_ids: list[int]
    prompt_length: int
    mirror: Any
    tap: Any
