"""A draft worker's sources, made of its configuration; what each needs (torch, numba) is imported where it grows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.ngram_card import ngram_model_info
from outrider.draft_worker.sourced_growth import SourcedGrowth
from outrider.v1 import common_pb2
from outrider.worker import model_info

if TYPE_CHECKING:
    from outrider.draft_worker.growth import TreeGrowth
    from outrider.draft_worker.ngram_corpus import CorpusLoader
    from outrider.draft_worker.ngram_growth import NgramGrowth

_STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GrowthParts:
    """What a worker grows by.

    Attributes:
        growth: over all sources.
        model: how it introduces itself.
        corpus: what fills the trie in the background; None without files.
    """

    growth: SourcedGrowth
    model: common_pb2.ModelInfo
    corpus: "CorpusLoader | None" = None

    def close(self) -> None:
        """Ends the threads that grow nothing."""
        if self.corpus is not None:
            self.corpus.stop()
        if self.growth.ngram is not None:
            self.growth.ngram.source.stop()
            self.growth.ngram.source.join(_STOP_S)


def make_growth(config: DraftWorkerConfig) -> GrowthParts:
    """Loads what the configuration asks for; called on the thread that grows.

    Raises:
        CheckpointError: the model folder cannot be served.
        CorpusError: a file of texts cannot be read, or begins with a line that is none.
    """
    folder = config.model_folder
    tree_growth: TreeGrowth | None = None
    if config.uses_model:
        tree_growth, model = _model(config)
    else:
        model = ngram_model_info(folder, max_model_len=config.max_model_len)
    if not config.uses_ngram:
        return GrowthParts(growth=SourcedGrowth(tree_growth, None), model=model)
    corpus = _corpus(config, model)
    ngram = _ngram(config, model)
    if corpus is not None:
        corpus.start(ngram.source)
    return GrowthParts(growth=SourcedGrowth(tree_growth, ngram), model=model, corpus=corpus)


def _model(config: DraftWorkerConfig) -> "tuple[TreeGrowth, common_pb2.ModelInfo]":
    from outrider.draft_worker.growth import TreeGrowth
    from outrider.engine.model_runner import ModelRunner

    runner = ModelRunner(config.engine())
    growth = TreeGrowth(runner, config.growth(max_model_len=runner.info.max_model_len))
    growth.warm_up()
    return growth, model_info(runner.info)


def _corpus(config: DraftWorkerConfig, model: common_pb2.ModelInfo) -> "CorpusLoader | None":
    if not config.ngram_corpus:
        return None
    from outrider.draft_worker.ngram_corpus import CorpusLoader, check_corpora

    check_corpora(config.ngram_corpus, config.model_folder, model.vocab_size)
    return CorpusLoader(config.ngram_corpus, config.model_folder, model.vocab_size)


def _ngram(config: DraftWorkerConfig, model: common_pb2.ModelInfo) -> "NgramGrowth":
    from outrider.draft_worker.ngram_growth import NgramGrowth, NgramGrowthConfig
    from outrider.draft_worker.ngram_source import NgramSource
    from outrider.draft_worker.ngram_tree import NgramConfig
    from outrider.draft_worker.ngram_trie import NgramTrie

    trees = NgramConfig(
        draft_tokens=config.ngram_draft_tokens,
        min_breadth=config.ngram_min_breadth,
        max_breadth=config.ngram_max_breadth,
        match_type=config.ngram_match_type,
    )
    trie = NgramTrie(capacity=config.ngram_capacity, max_trie_depth=config.ngram_max_trie_depth)
    source = NgramSource(trie, trees)
    source.start()
    own = NgramGrowthConfig(
        vocab_size=model.vocab_size, max_model_len=model.max_model_len, max_live_nodes=config.max_live_nodes
    )
    return NgramGrowth(source, own)
