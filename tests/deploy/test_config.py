"""Deployment settings: what is refused, and how GPUs are shared out."""

from pathlib import Path
from typing import Any

import pytest

from outrider.deploy.config import NGRAM_FIELDS, Bind, DeployConfig, amounts
from outrider.deploy.resources import asked_draft_gpus, asked_target_gpus, shared_gpus, target_threads
from outrider.deploy.roles import WorkerSetting, coordinator_config, draft_config, target_config
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.models import embedded_draft_path


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name", ""),
        ("name", "a/b"),
        ("targets", 0),
        ("drafts", -1),
        ("drafts_per_session", 0),
        ("port", 65536),
        ("target_threads", 0),
        ("draft_threads", 0),
        ("draft_gpus", -0.5),
        ("target_gpus", float("nan")),
        ("hang_timeout_s", 0.0),
        ("start_timeout_s", float("inf")),
        ("node_timeout_s", 0.0),
        ("target_wait_s", -1.0),
        ("coordinators", 0),
        ("min_drafts", 1),
        ("max_drafts", 0),
        ("autoscale_draft_cost", -1.0),
        ("autoscale_down_s", 0.0),
        ("draft_port", 65536),
        ("tensor_parallel_size", 0),
        ("max_model_len", 0),
        ("max_num_seqs", -1),
        ("kv_cache_memory_fraction", 1.5),
        ("kv_cache_dtype", "int4"),
        ("quantization", "int4"),
        ("max_prefill_tokens", 0),
        ("prefill_slowdown", -1.0),
        ("max_running_sessions", 0),
        ("max_queue", -1),
        ("target_kv_bytes", 0),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(setting: str, value: object):
    with pytest.raises(ValueError, match=f"{setting}: {value!r}"):
        DeployConfig(**{setting: value})  # pyright: ignore[reportArgumentType] (wrong on purpose)


@pytest.mark.parametrize(
    ("available", "workers", "each"),
    [(0, 2, 0.0), (0.5, 1, 0.0), (1, 1, 1.0), (1, 2, 0.5), (2, 3, 0.5), (4, 3, 1.0), (8, 0, 0.0), (1, 3, 1 / 3)],
)
def test_gpus_are_shared_evenly_and_at_most_one_each(available: float, workers: int, each: float):
    assert shared_gpus(available, workers) == pytest.approx(each)


@pytest.mark.parametrize("entry", ["big_gpu", "=1", "big_gpu=much", "big_gpu=0", "big_gpu=-1", "big_gpu=inf"])
def test_a_resource_without_a_sound_amount_is_refused(entry: str):
    with pytest.raises(ValueError, match=f"target_resources: '{entry}' given, NAME=AMOUNT"):
        DeployConfig(target_resources=(entry,))


def test_resources_are_read_as_ray_wants_them():
    assert amounts(("big_gpu=1", "fast=0.5")) == {"big_gpu": 1.0, "fast": 0.5}


def test_targets_get_the_cores_that_drafts_leave():
    assert target_threads(DeployConfig(), cores=2) == 1
    assert target_threads(DeployConfig(drafts=0), cores=2) == 2
    assert target_threads(DeployConfig(drafts=2, targets=2), cores=16) == 7
    assert target_threads(DeployConfig(drafts=4), cores=2) == 1
    assert target_threads(DeployConfig(target_threads=3), cores=2) == 3
    assert target_threads(DeployConfig(bind=Bind.NODE, insecure=True, targets=4), cores=16) == 15


def test_a_target_on_several_gpus_asks_for_as_many():
    assert asked_target_gpus(DeployConfig()) is None
    assert asked_target_gpus(DeployConfig(tensor_parallel_size=4)) == 4
    assert asked_target_gpus(DeployConfig(tensor_parallel_size=4, target_gpus=0)) == 0
    with pytest.raises(ValueError, match="target_gpus: 1 given, with tensor_parallel_size 4"):
        DeployConfig(tensor_parallel_size=4, target_gpus=1)


def test_workers_get_the_options_of_their_own():
    config = DeployConfig(
        max_model_len=4096,
        max_num_seqs=600,
        kv_cache_memory_fraction=0.4,
        kv_cache_dtype="fp8_e4m3",
        quantization="fp8",
        enable_prefix_caching=False,
        max_prefill_tokens=77,
        prefill_slowdown=0.2,
        deterministic=True,
        tensor_parallel_size=2,
    )
    setting = WorkerSetting(name="d/target-0", coordinators=("h:1",), device="cuda")
    target = target_config(config, setting, host="127.0.0.1")
    shared = ("max_model_len", "max_num_seqs", "kv_cache_memory_fraction")
    own = ("kv_cache_dtype", "enable_prefix_caching", "max_prefill_tokens", "prefill_slowdown")
    for name in (*shared, *own, "quantization", "deterministic", "tensor_parallel_size"):
        assert getattr(target, name) == getattr(config, name), name
    assert target.max_step_tokens == 600
    assert target_config(DeployConfig(enforce_eager=True), setting, host="127.0.0.1").enforce_eager
    draft = draft_config(config, setting, host="127.0.0.1")
    assert all(getattr(draft.engine(), name) == getattr(config, name) for name in shared)
    on_cpu = WorkerSetting(name="d/target-0", coordinators=("h:1",))
    assert target_config(DeployConfig(), on_cpu, host="127.0.0.1").max_step_tokens == 512


def test_a_resident_draft_is_an_option_of_the_target():
    setting = WorkerSetting(name="d/target-0", coordinators=("h:1",))

    def draft_of(**options: Any) -> Path | None:
        return target_config(DeployConfig(**options), setting, host="127.0.0.1").draft_model

    assert draft_of() is None
    assert draft_of(drafter_placement="resident") == embedded_draft_path()
    pair = {"target_model": "/models/large", "draft_model": "/models/small"}
    assert draft_of(drafter_placement="both", **pair) == Path("/models/small")
    counts = {None: 1, "worker": 1, "resident": 0, "both": 1}
    assert {name: DeployConfig(drafter_placement=name).draft_workers for name in counts} == counts
    with pytest.raises(ValueError, match="drafter_placement: both given, with draft_model needed"):
        DeployConfig(drafter_placement="both", target_model="/models/large")


def test_drafts_grow_as_was_asked_for(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("")
    grown: dict[str, Any] = {
        "source": "model+ngram",
        "ngram_capacity": 5000,
        "ngram_max_trie_depth": 9,
        "ngram_min_breadth": 2,
    }
    grown |= {"ngram_max_breadth": 3, "ngram_draft_tokens": 5, "ngram_match_type": "bfs", "ngram_corpus": (corpus,)}
    assert set(grown) == {"source", *NGRAM_FIELDS}
    config = DeployConfig(**grown)
    setting = WorkerSetting(name="d/draft-0", coordinators=("h:1",), device="cuda")
    draft = draft_config(config, setting, host="127.0.0.1")
    assert {name: getattr(draft, name) for name in grown} == grown
    # A deployment's defaults are the workers' own.
    own = DraftWorkerConfig()
    assert {name: getattr(DeployConfig(), name) for name in NGRAM_FIELDS} == {
        name: getattr(own, name) for name in NGRAM_FIELDS
    }
    with pytest.raises(ValueError, match="ngram_capacity: 0 given"):
        DeployConfig(ngram_capacity=0)
    assert asked_draft_gpus(DeployConfig(source="ngram")) == 0
    assert asked_draft_gpus(DeployConfig(source="ngram", draft_gpus=1)) == 1
    assert asked_draft_gpus(DeployConfig()) is None


def test_workers_are_read_on_ports_of_their_numbers():
    config = DeployConfig(metrics_port=9100)
    target, draft = (WorkerSetting(name=name, coordinators=("h:1",)) for name in ("d/target-1", "d/draft-3"))
    assert target_config(config, target, host="127.0.0.1").metrics_port == 9101
    assert draft_config(config, draft, host="127.0.0.1").metrics_port == 9203
    assert target_config(DeployConfig(), target, host="127.0.0.1").metrics_port is None
    with pytest.raises(ValueError, match="metrics_port: 0 given"):
        DeployConfig(metrics_port=0)


def test_what_drafts_is_worked_out_from_the_models():
    assert DeployConfig().draft_source == "model"
    assert DeployConfig(target_model="big").draft_source == "ngram"
    assert DeployConfig(target_model="big", draft_model="small").draft_source == "model"
    setting = WorkerSetting(name="d/draft-0", coordinators=())
    # N-grams are of the target's tokens.
    assert draft_config(DeployConfig(target_model="big"), setting, host="127.0.0.1").model_path == "big"
    assert draft_config(DeployConfig(draft_kv_bytes=5), setting, host="127.0.0.1").kv_bytes == 5
    assert target_config(DeployConfig(target_kv_bytes=6), setting, host="127.0.0.1").kv_bytes == 6


def test_a_coordinator_has_what_users_ask_of_it():
    config = DeployConfig(
        stop_timeout_s=7.0, targets=2, max_num_seqs=10, max_queue=3, served_model_name=("a", "b"), http_cors=("*",)
    )
    own = coordinator_config(config, host="127.0.0.1", port=1, worker_port=1)
    assert (own.drain_s, own.max_running_sessions, own.max_queue) == (7.0, 20, 3)
    assert (own.served_model_name, own.http_cors, own.http_port) == (("a", "b"), ("*",), 8000)
    assert (
        coordinator_config(DeployConfig(max_running_sessions=5), host="127.0.0.1", port=1, worker_port=1).drain_s
        == 10.0
    )
