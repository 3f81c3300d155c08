"""A draft worker's drafters, made of its configuration; what each needs (torch, numba) is imported where it grows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.ngram.card import ngram_model_info
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.v1 import common_pb2
from outrider.worker import model_info

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.model.drafter import ModelDrafter
    from outrider.draft_worker.drafters.ngram.corpus import CorpusLoader
    from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter

_STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LoadedDrafters:
    """A worker's drafters, ready to grow.

    Attributes:
        drafters: all of them.
        model: how the worker introduces itself.
        corpus: fills the n-gram trie in the background; None without files.
    """

    drafters: Drafters
    model: common_pb2.ModelInfo
    corpus: "CorpusLoader | None" = None

    def close(self) -> None:
        """End the threads that grow nothing."""
        if self.corpus is not None:
            self.corpus.stop()
        if self.drafters.ngram is not None:
            self.drafters.ngram.trie.stop()
            self.drafters.ngram.trie.join(_STOP_S)


def load_drafters(config: DraftWorkerConfig) -> LoadedDrafters:
    """Load what the configuration asks for; called on the thread that grows.

    Raises:
        CheckpointError: the model folder cannot be served.
        CorpusError: a file of texts cannot be read, or begins with a line that is none.
    """
    model_drafter: ModelDrafter | None = None
    if config.uses_model:
        model_drafter, model = _load_model(config)
    else:
        model = ngram_model_info(config.model_folder, max_model_len=config.max_model_len)
    if not config.uses_ngram:
        return LoadedDrafters(drafters=Drafters(model_drafter, None), model=model)
    corpus = _corpus(config, model)
    ngram = _ngram(config, model)
    if corpus is not None:
        corpus.start(ngram.trie)
    return LoadedDrafters(drafters=Drafters(model_drafter, ngram), model=model, corpus=corpus)


def _load_model(config: DraftWorkerConfig) -> "tuple[ModelDrafter, common_pb2.ModelInfo]":
    from outrider.draft_worker.drafters.model.drafter import ModelDrafter
    from outrider.engine.model_runner import ModelRunner
    from outrider.grammar.compiler import GrammarCompiler

    engine = config.engine()
    runner = ModelRunner(engine)
    drafter = ModelDrafter(
        runner.packed_forward(sessions=config.max_num_seqs),
        config.growth(max_model_len=runner.info.max_model_len),
        max_sessions=config.max_num_seqs,
        num_slots=runner.slots.num_slots,
        vocab_size=runner.vocab_size,
        device=runner.device,
        captures=runner.steps is not None and not engine.enforce_eager,
        grammars=GrammarCompiler.of_checkpoint(engine.model_path),
    )
    drafter.warm_up()
    return drafter, model_info(runner.info)


def _corpus(config: DraftWorkerConfig, model: common_pb2.ModelInfo) -> "CorpusLoader | None":
    if not config.ngram_corpus:
        return None
    from outrider.draft_worker.drafters.ngram.corpus import CorpusLoader, check_corpora

    check_corpora(config.ngram_corpus, config.model_folder, model.vocab_size)
    return CorpusLoader(config.ngram_corpus, config.model_folder, model.vocab_size)


def _ngram(config: DraftWorkerConfig, model: common_pb2.ModelInfo) -> "NgramDrafter":
    from outrider.draft_worker.drafters.ngram import drafter
    from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
    from outrider.draft_worker.drafters.ngram.trie import NgramTrie

    proposals = ProposalConfig(
        draft_tokens=config.ngram_draft_tokens,
        min_breadth=config.ngram_min_breadth,
        max_breadth=config.ngram_max_breadth,
        match_type=config.ngram_match_type,
    )
    trie = SharedTrie(NgramTrie(capacity=config.ngram_capacity, max_trie_depth=config.ngram_max_trie_depth), proposals)
    trie.start()
    drafter.warm_up()
    return drafter.NgramDrafter(
        trie,
        drafter.NgramDrafterConfig(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            max_sessions=config.max_num_seqs,
            max_live_nodes=config.max_live_nodes,
        ),
    )
