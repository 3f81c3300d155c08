"""Configuration of a draft worker (torch-free, so that command lines may build it)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from outrider.draft_worker.drafters.ngram.options import MatchType, check_ngram_options
from outrider.drafting.config import GrowthConfig, step_defaults
from outrider.engine.config import EngineConfig
from outrider.models import embedded_draft_path
from outrider.roles.worker_config import WorkerConfig
from outrider.wire import MOST_NODES

DraftSource = Literal["model", "ngram", "model+ngram"]


@dataclass(frozen=True, kw_only=True)
class DraftWorkerConfig(WorkerConfig):
    """One draft worker process; what it has in common with a target worker is in `WorkerConfig`.

    Attributes:
        source: by what trees grow: model, ngram (of what prompts and outputs said before; no weights are loaded and no
            GPU is used), or model+ngram.
        model_path: checkpoint folder; default the embedded draft. With source ngram its tokenizer.json and config.json
            are read.
        max_live_nodes: most nodes of one session's tree, for the memory of this worker; a coordinator's own
            max_live_nodes may ask for fewer.
        max_step_nodes: most nodes expanded in one step, over all sessions; default 8 on a CPU, 128 on a GPU.
        max_session_nodes: of these, most of one session: with more a step takes longer, and a tree is less deep by the
            time that it is asked for.
        max_step_tokens: most prefill tokens of one step.
        ngram_capacity: most nodes of the trie of n-grams, of some 50 bytes each; the least recently used make room.
        ngram_max_trie_depth: tokens of an n-gram: all but the last are compared, and what is longer is not seen.
        ngram_min_breadth: most continuations of a node below the longest suffix that was seen before.
        ngram_max_breadth: likewise, below the shortest one; 1 makes a single branch.
        ngram_draft_tokens: most nodes proposed for a session at a time.
        ngram_match_type: which continuations come first: prob, the most frequent; bfs, the most recent.
        ngram_corpus: a file of texts that the trie begins with, read in the background; may be given several times.
            JSON lines, each an object with "text" or "token_ids".
        branching: children of a node.
        min_path_value: nodes less likely to be reached are not expanded; default 0.03 on a CPU, 0.003 on a GPU.
        min_acceptance: children less likely to be accepted are not grown.
        rejection_acceptance: under the rejection rule, the estimate that a node is accepted.

    Raises:
        ValueError: a value out of range, with the value.
    """

    source: DraftSource = "model"
    max_live_nodes: int = 256
    max_step_nodes: int | None = None
    max_session_nodes: int = GrowthConfig.max_session_nodes
    max_step_tokens: int = 256
    ngram_capacity: int = 10_000_000
    ngram_max_trie_depth: int = 18
    ngram_min_breadth: int = 1
    ngram_max_breadth: int = 10
    ngram_draft_tokens: int = 12
    ngram_match_type: MatchType = "prob"
    ngram_corpus: tuple[Path, ...] = ()
    branching: int = 4
    min_path_value: float | None = None
    min_acceptance: float = GrowthConfig.min_acceptance
    rejection_acceptance: float = GrowthConfig.rejection_acceptance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in get_args(DraftSource):
            raise ValueError(f"source: {self.source!r} given, {', '.join(get_args(DraftSource))} needed")
        check_ngram_options(self)
        if self.max_live_nodes > MOST_NODES:
            raise ValueError(
                f"max_live_nodes: {self.max_live_nodes} given, at most {MOST_NODES} needed: a pool holds no more"
            )
        self.growth(max_model_len=self.max_model_len or 1)

    @property
    def uses_model(self) -> bool:
        """True if a draft model grows."""
        return "model" in self.source

    @property
    def uses_ngram(self) -> bool:
        """True if n-grams grow."""
        return "ngram" in self.source

    @property
    def model_folder(self) -> Path:
        """See `WorkerConfig`."""
        return Path(self.model_path or embedded_draft_path())

    def engine(self) -> EngineConfig:
        """See `WorkerConfig`."""
        return replace(super().engine(), max_tree_nodes=self.max_live_nodes)

    def growth(self, *, max_model_len: int) -> GrowthConfig:
        """The trees' part; the length is the loaded model's."""
        own = self.fields_of(GrowthConfig)
        defaults = {name: value for name, value in step_defaults(self.device).items() if own[name] is None}
        return GrowthConfig(**own | defaults | {"max_model_len": max_model_len})
