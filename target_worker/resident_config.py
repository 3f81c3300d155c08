"""How a target drafts by itself (torch-free, so that command lines may build it)."""

from dataclasses import dataclass
from pathlib import Path

EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class ResidentConfig:
    """A draft head beside the target, and the trees that it grows.

    Attributes:
        head: its folder.
        depth: levels of a tree; a level takes one step of the head.
        top_k: children of a node, and nodes of a level that are expanded.
        nodes: most nodes of a tree, the best of all that were looked at.
        max_sessions: where more sessions of a step would grow a tree, none is grown.
        min_value: nodes that are reached less often are left out.

    Raises:
        ValueError: a number out of range.
    """

    head: Path
    depth: int = 5
    top_k: int = 4
    nodes: int = 16
    max_sessions: int = 64
    min_value: float = 0.01

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "nodes", "max_sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 needed")

    def tree_slots(self, top_k: int) -> int:
        """KV slots that a tree of so many children takes while it grows: its last level has no KV."""
        return (self.depth - 1) * top_k


def head_folder(option: str) -> Path:
    """The folder that an option names, `embedded` being the head of the embedded target."""
    if option != EMBEDDED:
        return Path(option)
    from outrider.models import embedded_eagle_path

    return embedded_eagle_path()
