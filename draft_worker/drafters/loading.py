"""A draft worker's drafters, made of its configuration; what each needs (torch, numba) is imported where it grows."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.checkpoint_json import is_eagle_head, read_json_object
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.errors import CheckpointError
from outrider.roles.worker import model_info
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import common_pb2

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.model.drafter import ModelDrafter
    from outrider.draft_worker.drafters.ngram.corpus import CorpusLoader
    from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter

_STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LoadedDrafters:
    """A worker's drafters, ready to grow."""

    drafters: Drafters
    model: common_pb2.ModelInfo  # how the worker introduces itself
    corpus: "CorpusLoader | None" = None  # fills the n-gram trie in the background; None without files

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
    drafter, model = _load_model(config) if config.uses_model else (None, _model_info(config))
    ngram, corpus = _load_ngram(config, model) if config.uses_ngram else (None, None)
    return LoadedDrafters(drafters=Drafters(drafter, ngram), model=model, corpus=corpus)


def _load_model(config: DraftWorkerConfig) -> "tuple[ModelDrafter, common_pb2.ModelInfo]":
    from outrider.draft_worker.drafters.model.drafter import ModelDrafter
    from outrider.engine.model_runner import ModelRunner
    from outrider.grammar.compiler import GrammarCompiler

    engine = config.engine()
    if is_eagle_head(Path(engine.model_path)):
        raise CheckpointError(
            f"{engine.model_path}: an EAGLE head, which drafts inside its target worker: give it as --draft-model there"
        )
    runner = ModelRunner(engine)
    drafter = ModelDrafter(
        runner.packed_forward(sessions=config.max_num_seqs),
        config.growth(max_model_len=runner.info.max_model_len),
        max_sessions=config.max_num_seqs,
        num_slots=runner.slots.num_slots,
        vocab_size=runner.vocab_size,
        device=runner.device,
        captures=engine.captures,
        grammars=GrammarCompiler.of_checkpoint(engine.model_path),
    )
    drafter.warm_up()
    return drafter, model_info(runner.info)


def _model_info(config: DraftWorkerConfig) -> common_pb2.ModelInfo:
    """Return the model info of a worker without a model, from the folder's tokenizer and sizes, without a dtype."""
    folder = config.model_folder
    found = read_json_object(folder / "config.json")
    if found is None:
        raise CheckpointError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint")
    try:
        vocab_size, longest = int(found["vocab_size"]), int(found["max_position_embeddings"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json: vocab_size and max_position_embeddings are needed") from error
    return common_pb2.ModelInfo(
        name=f"ngram-{folder.resolve().name}",
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash(folder),
        dtype="none",
        max_model_len=config.max_model_len or longest,
    )


def _load_ngram(config: DraftWorkerConfig, model: common_pb2.ModelInfo) -> "tuple[NgramDrafter, CorpusLoader | None]":
    from outrider.draft_worker.drafters.ngram import drafter
    from outrider.draft_worker.drafters.ngram.corpus import CorpusLoader, check_corpora
    from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig
    from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
    from outrider.draft_worker.drafters.ngram.trie import NgramTrie

    corpus = None
    if config.ngram_corpus:
        check_corpora(config.ngram_corpus, config.model_folder, model.vocab_size)
        corpus = CorpusLoader(config.ngram_corpus, config.model_folder, model.vocab_size)
    proposals = ProposalConfig(
        draft_tokens=config.ngram_draft_tokens,
        min_breadth=config.ngram_min_breadth,
        max_breadth=config.ngram_max_breadth,
        match_type=config.ngram_match_type,
    )
    trie = SharedTrie(NgramTrie(capacity=config.ngram_capacity, max_trie_depth=config.ngram_max_trie_depth), proposals)
    trie.start()
    drafter.warm_up()
    if corpus is not None:
        corpus.start(trie)
    grower = drafter.NgramDrafter(
        trie,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        max_sessions=config.max_num_seqs,
        max_live_nodes=config.max_live_nodes,
    )
    return grower, corpus
