"""Parts of a worker: n-grams alone need neither weights nor transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.draft_worker.settling import settle

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import load_drafters
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import CheckpointError, CorpusError
from outrider.models import embedded_draft_path, embedded_eagle_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without its weights."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(Path(embedded_draft_path()) / name, tmp_path / name)
    return tmp_path


def test_ngrams_alone_take_the_folders_tokenizer_and_sizes(folder: Path):
    texts = folder / "texts.jsonl"
    texts.write_text(json.dumps({"token_ids": [5, 6, 7, 8]}) + "\n")
    loaded = load_drafters(
        DraftWorkerConfig(
            source="ngram", model_path=folder, ngram_capacity=1000, ngram_corpus=(texts,), max_model_len=99
        )
    )
    try:
        assert loaded.drafters.calibrations.keys() == {GrowthSource.NGRAM}
        assert (loaded.model.max_model_len, loaded.model.dtype) == (99, "none")
        assert loaded.model.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]
        assert len(loaded.model.tokenizer_hash) == 64
        assert loaded.corpus is not None
        assert loaded.corpus.finished.wait(200)
        assert loaded.drafters.ngram is not None
        assert settle(loaded.drafters.ngram.trie)
        assert loaded.drafters.ngram.trie.counts.corpus_tokens == 4
    finally:
        loaded.close()


def test_both_share_the_models_vocabulary(checkpoint: Path):
    loaded = load_drafters(
        DraftWorkerConfig(source="model+ngram", model_path=checkpoint, num_slots=64, max_num_seqs=2, max_live_nodes=30)
    )
    try:
        assert loaded.drafters.calibrations.keys() == {GrowthSource.MODEL, GrowthSource.NGRAM}
        assert (loaded.model.vocab_size, loaded.drafters.slots) == (96, (0, 64))
    finally:
        loaded.close()


def test_what_is_missing_is_named(folder: Path):
    bad = folder / "bad.jsonl"
    bad.write_text('{"text": 1}\n')
    with pytest.raises(CorpusError, match=r"bad\.jsonl:1: "):
        load_drafters(DraftWorkerConfig(source="ngram", model_path=folder, ngram_corpus=(bad,)))
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="vocab_size"):
        load_drafters(DraftWorkerConfig(source="ngram", model_path=folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_drafters(DraftWorkerConfig(source="ngram", model_path=folder))


def test_a_head_belongs_into_a_target_worker():
    with pytest.raises(CheckpointError, match=r"an EAGLE head, which drafts inside its target worker: .*--draft-model"):
        load_drafters(DraftWorkerConfig(model_path=embedded_eagle_path()))


CODE = """
import sys, time
from outrider.draft_worker import server
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import load_drafters
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.sampling import SamplingSpec
loaded = load_drafters(DraftWorkerConfig(source="ngram", model_path=sys.argv[1], ngram_capacity=2000))
drafters = loaded.drafters
drafters.ngram.trie.add([5, 6, 7, 8, 9, 10])
while drafters.ngram.trie.waiting_tokens:
    time.sleep(0.005)
drafters.open(SessionStart(key=(1, 1), owner=1, epoch=1, prompt=[1, 5, 6, 7], output=[],
                           sampling=SamplingSpec(max_new_tokens=9), limits=GrowthLimits()))
while not (growths := list(drafters.advance())):
    pass
loaded.close()
print(growths[0].tokens, *({"transformers"} & set(sys.modules)))
"""


def test_ngrams_work_without_transformers(folder: Path):
    command = [sys.executable, "-c", CODE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[8, 9, 10]"


FIRST_SESSION = """
import sys
from numba.core import event
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import load_drafters
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.sampling import SamplingSpec
drafters = load_drafters(DraftWorkerConfig(model_path=sys.argv[1], num_slots=64, max_num_seqs=2)).drafters
assert (drafters.slots, drafters.steps, drafters.model.launches) == ((0, 64), 0, 0)
with event.install_recorder("numba:compiler_lock") as recorder:
    drafters.open(SessionStart(key=(1, 1), owner=1, epoch=1, prompt=[1, 5, 6, 7], output=[],
                               sampling=SamplingSpec(max_new_tokens=9, temperature=1.0), limits=GrowthLimits()))
    while not (growths := list(drafters.advance())):
        pass
print(len(growths[0].tokens) > 0, len(recorder.buffer))
"""


def test_nothing_is_compiled_or_loaded_when_the_first_session_comes(checkpoint: Path):
    command = [sys.executable, "-c", FIRST_SESSION, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True 0"
