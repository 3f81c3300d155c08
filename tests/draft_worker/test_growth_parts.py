"""What a worker is made of: n-grams alone need neither torch nor weights nor numba."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.growth_parts import make_growth
from outrider.errors import CheckpointError, CorpusError
from outrider.growth_source import GrowthSource
from outrider.models import embedded_draft_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without its weights."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(Path(embedded_draft_path()) / name, tmp_path / name)
    return tmp_path


def test_ngrams_alone_take_the_folders_tokenizer_and_sizes(folder: Path):
    texts = folder / "texts.jsonl"
    texts.write_text(json.dumps({"token_ids": [5, 6, 7, 8]}) + "\n")
    parts = make_growth(
        DraftWorkerConfig(
            source="ngram", model_path=folder, ngram_capacity=1000, ngram_corpus=(texts,), max_model_len=99
        )
    )
    try:
        assert parts.growth.sources == {GrowthSource.NGRAM}
        assert parts.growth.model is None
        assert (parts.model.max_model_len, parts.model.dtype) == (99, "none")
        assert parts.model.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]
        assert len(parts.model.tokenizer_hash) == 64
        assert parts.corpus is not None
        assert parts.corpus.finished.wait(200)
        assert parts.growth.ngram is not None
        assert parts.growth.ngram.source.settle()
        assert parts.growth.ngram.source.counts.corpus_tokens == 4
    finally:
        parts.close()


def test_what_is_missing_is_named(folder: Path):
    bad = folder / "bad.jsonl"
    bad.write_text('{"text": 1}\n')
    with pytest.raises(CorpusError, match=r"bad\.jsonl:1: "):
        make_growth(DraftWorkerConfig(source="ngram", model_path=folder, ngram_corpus=(bad,)))
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="vocab_size"):
        make_growth(DraftWorkerConfig(source="ngram", model_path=folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        make_growth(DraftWorkerConfig(source="ngram", model_path=folder))


CODE = """
import sys
sys.modules["numba"] = None
from outrider.draft_worker import server
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.growth_parts import make_growth
from outrider.draft_worker.session import GrowthLimits, SessionStart
from outrider.sampling import SamplingSpec
parts = make_growth(DraftWorkerConfig(source="ngram", model_path=sys.argv[1], ngram_capacity=2000))
growth, text = parts.growth, [5, 6, 7, 8, 9, 10]
growth.ngram.source.add(text)
assert growth.ngram.source.settle()
growth.open(SessionStart(key=(1, 1), owner=1, epoch=1, prompt=[1, 5, 6, 7], output=[],
                         sampling=SamplingSpec(max_new_tokens=9), limits=GrowthLimits()))
while (step := growth.match()) is None:
    pass
(record,) = step.growths
parts.close()
print(record.tokens, *({"torch", "transformers", "triton"} & set(sys.modules)))
"""


def test_it_works_without_torch_and_without_numba(folder: Path):
    command = [sys.executable, "-c", CODE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[8, 9, 10]"
