"""Engine configurations."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.engine.config import EngineConfig, create_config_for_draft_model
from outrider.target_worker.config import TargetWorkerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("kv_bytes", -1),
        ("max_num_seqs", 0),
        ("max_tree_nodes", -1),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("quantization", "awq"),
        ("attention_backend", "eager"),
        ("kv_cache_memory_fraction", 0.0),
        ("kv_cache_memory_fraction", 1.5),
        ("kv_cache_dtype", "int4"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("tensor_parallel_size", 0),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}: {value!r} given"):
        EngineConfig(model_path="x", **{field: value})  # type: ignore[arg-type]


def test_a_model_over_several_gpus_takes_no_single_one() -> None:
    assert EngineConfig(model_path="x", device="cuda", tensor_parallel_size=2).tensor_parallel_size == 2
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 2 given, .* not cuda:1"):
        EngineConfig(model_path="x", device="cuda:1", tensor_parallel_size=2)


def test_a_target_worker_hands_every_option_of_the_engine_on() -> None:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float16",
        "quantization": "fp8",
        "num_slots": 300,
        "kv_bytes": 1 << 20,
        "kv_cache_memory_fraction": 0.5,
        "kv_cache_dtype": "fp8_e4m3",
        "enable_prefix_caching": False,
        "max_num_seqs": 5,
        "max_model_len": 77,
        "max_tree_nodes": 9,
        "attention_backend": "triton",
        "deterministic": True,
        "tensor_parallel_size": 2,
    }
    assert TargetWorkerConfig(model_path="x", enforce_eager=True).engine().enforce_eager
    made = TargetWorkerConfig(model_path="x", threads=3, **values).engine()
    assert made == EngineConfig(model_path=Path("x"), torch_threads=3, **values)
    untouched = {field.name for field in fields(EngineConfig)} - values.keys()
    assert untouched == {"model_path", "torch_threads", "enforce_eager"}


def test_dtype_defaults_follow_the_device() -> None:
    assert EngineConfig(model_path="x").dtype_name == "float32"
    assert EngineConfig(model_path="x", device="cuda:1").dtype_name == "bfloat16"


def test_attention_backend_defaults_follow_the_device() -> None:
    assert EngineConfig(model_path="x").attention_backend_name == "reference"
    assert EngineConfig(model_path="x", device="cuda:1").attention_backend_name == "triton"
    chosen = EngineConfig(model_path="x", device="cuda", attention_backend="reference")
    assert chosen.attention_backend_name == "reference"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_backend": "triton"}, "'triton' given, which needs a CUDA device"),
        ({"attention_backend": "flashinfer"}, "'flashinfer' given, which needs a CUDA device"),
        (
            {"attention_backend": "flashinfer", "device": "cuda", "dtype": "float32"},
            "'flashinfer' given, which needs dtype float16 or bfloat16, not float32",
        ),
    ],
)
def test_attention_backends_that_cannot_run_say_what_they_need(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model_path="x", **fields)


def test_flashinfer_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"not installed here: pip install 'outrider\[flashinfer\]'"):
        EngineConfig(model_path="x", device="cuda", attention_backend="flashinfer")


def test_a_draft_worker_hands_quantization_and_attention_backend_on() -> None:
    made = DraftWorkerConfig(device="cuda", quantization="fp8", attention_backend="reference").engine()
    assert (made.quantization, made.attention_backend) == ("fp8", "reference")
    with pytest.raises(ValueError, match="attention_backend: 'triton' given, which needs a CUDA device"):
        DraftWorkerConfig(attention_backend="triton")


def test_a_draft_takes_its_model_and_place_and_the_targets_limits() -> None:
    target = EngineConfig(model_path="big", device="cuda", max_num_seqs=7, max_model_len=99, torch_threads=4)
    draft = EngineConfig(
        model_path="small",
        device="cuda:1",
        dtype="float16",
        num_slots=5,
        max_num_seqs=3,
        attention_backend="reference",
    )
    made = create_config_for_draft_model(target, draft)
    assert made == EngineConfig(
        model_path="small",
        device="cuda:1",
        dtype="float16",
        num_slots=5,
        max_num_seqs=7,
        max_model_len=99,
        attention_backend="reference",
    )
