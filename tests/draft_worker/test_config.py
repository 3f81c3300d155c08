import subprocess
import sys
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
    assert DraftWorkerConfig(device="cuda").growth(max_model_len=9).max_step_nodes == 64
    assert DraftWorkerConfig().growth(max_model_len=9).max_step_nodes == 8
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
