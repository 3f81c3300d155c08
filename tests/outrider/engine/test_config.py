"""Engine configurations."""

import pytest

from outrider.engine.config import EngineConfig, create_config_for_draft_model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("kv_bytes", -1),
        ("max_sessions", 0),
        ("max_tree_nodes", -1),
        ("device", "tpu"),
        ("dtype", "int8"),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}: {value!r} given"):
        EngineConfig(model_path="x", **{field: value})  # type: ignore[arg-type]


def test_dtype_defaults_follow_the_device() -> None:
    assert EngineConfig(model_path="x").dtype_name == "float32"
    assert EngineConfig(model_path="x", device="cuda:1").dtype_name == "bfloat16"


def test_a_draft_takes_its_model_and_place_and_the_targets_limits() -> None:
    target = EngineConfig(model_path="big", device="cuda", max_sessions=7, max_model_len=99, torch_threads=4)
    draft = EngineConfig(model_path="small", device="cuda:1", dtype="float16", num_slots=5, max_sessions=3)
    made = create_config_for_draft_model(target, draft)
    assert made == EngineConfig(
        model_path="small", device="cuda:1", dtype="float16", num_slots=5, max_sessions=7, max_model_len=99
    )
