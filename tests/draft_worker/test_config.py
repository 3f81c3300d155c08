import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.models import embedded_draft_path


def test_defaults_serve_the_embedded_draft_on_loopback():
    config = DraftWorkerConfig()
    assert config.engine().model_path == embedded_draft_path()
    assert config.address == "127.0.0.1:0"
    assert config.growth(max_model_len=77).max_model_len == 77


def test_a_gpu_grows_wider_steps():
    assert DraftWorkerConfig(device="cuda").growth(max_model_len=9).max_step_nodes == 128
    assert DraftWorkerConfig().growth(max_model_len=9).max_step_nodes == 8
    assert DraftWorkerConfig(device="cuda", max_session_nodes=5).growth(max_model_len=9).max_session_nodes == 5
    assert DraftWorkerConfig(device="cuda", max_step_nodes=5).growth(max_model_len=9).max_step_nodes == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", 70000),
        ("coordinators", ("nowhere",)),
        ("device", "tpu"),
        ("threads", 0),
        ("max_num_seqs", 0),
        ("max_step_nodes", 0),
        ("max_session_nodes", 0),
        ("max_live_nodes", 0),
        ("max_live_nodes", 257),
        ("branching", 0),
        ("min_path_value", 1.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any):
    name = {"threads": "torch_threads"}.get(field, field)
    with pytest.raises(ValueError, match=name):
        DraftWorkerConfig(**{field: value})


def test_the_configuration_needs_no_torch():
    code = "import sys; import outrider.draft_worker.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "trie"}, "source: 'trie' given, model, ngram, model+ngram needed"),
        ({"ngram_max_trie_depth": 1}, "ngram_max_trie_depth: 1 given, 2 to 64 needed"),
        ({"ngram_capacity": 30}, "ngram_capacity: 30 given, 36 (twice ngram_max_trie_depth) to"),
        ({"ngram_min_breadth": 0}, "ngram_min_breadth: 0 given, 1 to 32 needed"),
        ({"ngram_min_breadth": 4, "ngram_max_breadth": 3}, "ngram_max_breadth: 3 given, 4 (ngram_min_breadth) to 32"),
        ({"ngram_draft_tokens": 0}, "ngram_draft_tokens: 0 given, 1 to 256 needed"),
        ({"ngram_match_type": "often"}, "ngram_match_type: 'often' given, prob or bfs needed"),
        ({"ngram_corpus": (Path("here"),)}, "ngram_corpus: a file given, with source ngram or model+ngram needed"),
        ({"source": "ngram", "ngram_corpus": (Path("gone"),)}, "ngram_corpus: gone given, a file needed"),
    ],
)
def test_options_of_the_ngram_source_say_what_to_change(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftWorkerConfig(**options)


def test_sources():
    uses = {source: DraftWorkerConfig(source=source) for source in ("model", "ngram", "model+ngram")}
    assert [(config.uses_model, config.uses_ngram) for config in uses.values()] == [
        (True, False),
        (False, True),
        (True, True),
    ]
