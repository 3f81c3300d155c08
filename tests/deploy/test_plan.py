"""The plan that `outrider serve` prints before it starts anything."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from outrider import cli
from outrider.deploy import plan as plan_module
from outrider.deploy.config import Bind, DeployConfig
from outrider.deploy.plan import Gpu, make_plan
from outrider.errors import CheckpointError, OutriderError
from outrider.models import embedded_block_path, embedded_draft_path, embedded_eagle_path, embedded_target_path

GPU = Gpu(name="NVIDIA H100", total_bytes=80_000_000_000)


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(plan_module, "visible_gpus", lambda: [GPU] * count)


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)


def checkpoint(folder: Path, **changes: object) -> str:
    """The embedded target under another name, with another config.json."""
    shutil.copytree(embedded_target_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def of_weights(folder: Path, gigabytes: int) -> str:
    """The embedded target with one more tensor, whose file has the header alone."""
    path = checkpoint(folder)
    tensor = {"dtype": "BF16", "shape": [gigabytes * 500_000_000], "data_offsets": [0, 0]}
    header = json.dumps({"more": tensor}).encode()
    (folder / "more.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def line(config: DeployConfig, name: str) -> str:
    (found,) = (own for own in make_plan(config).lines if own.startswith(name))
    return found


def test_the_embedded_pair_needs_nothing():
    plan = make_plan(DeployConfig(port=0))
    assert not plan.missing
    assert [own.split()[0] for own in plan.lines] == ["model", "drafter", "device", "memory", "sessions", "doors"]
    assert "CPU" in line(DeployConfig(port=0), "device")


def test_a_model_alone_is_drafted_for_by_n_grams(tmp_path: Path):
    config = DeployConfig(port=0, target_model=checkpoint(tmp_path / "coder"))
    plan = make_plan(config)
    assert plan.config.served_model_name == ("coder",)
    assert plan.config.target_model == str(tmp_path / "coder")
    assert "n-grams" in line(config, "drafter")


def placed(**options: Any) -> tuple[str | None, int]:
    config = make_plan(DeployConfig(port=0, **options)).config
    return config.drafter_placement, config.draft_workers


def test_a_draft_model_has_a_worker_where_a_gpu_is_left_for_it(monkeypatch: pytest.MonkeyPatch):
    assert placed() == ("worker", 1)
    assert "in a worker of its own, as there is no GPU" in line(DeployConfig(port=0), "drafter")
    have_gpus(monkeypatch, 1)
    assert placed() == ("resident", 0)
    assert "inside each target worker, as there is one GPU; no draft workers" in line(DeployConfig(port=0), "drafter")
    # The target leaves it room; no other worker is on the GPU.
    config = make_plan(DeployConfig(port=0)).config
    assert (config.target_kv_bytes, config.draft_kv_bytes) == (None, None)
    assert placed(drafter_placement="worker") == ("worker", 1)
    assert placed(drafter_placement="both") == ("both", 1)
    assert placed(target_gpus=0.0) == ("worker", 1)
    have_gpus(monkeypatch, 2)
    assert placed() == ("worker", 1)
    chosen = line(DeployConfig(port=0), "drafter")
    assert "in a worker of its own, as a GPU is left for it (with many sessions, --targets 2 --drafter" in chosen
    assert placed(drafter_placement="resident") == ("resident", 0)
    assert "as" not in line(DeployConfig(port=0, drafter_placement="worker"), "drafter").partition("  [")[0].split()
    wide: tuple[dict[str, Any], ...] = ({"targets": 2}, {"tensor_parallel_size": 2})
    for options in wide:
        assert placed(**options) == ("resident", 0)
        assert "as targets take all 2 GPUs" in line(DeployConfig(port=0, **options), "drafter")
    have_gpus(monkeypatch, 3)
    # One more does not make another target.
    assert "as a GPU is left for it  [" in line(DeployConfig(port=0, tensor_parallel_size=2), "drafter")


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({"drafts": 1}, 1),
        ({"drafts": 2}, 2),
        ({"max_drafts": 3}, 1),
        ({"source": "model+ngram"}, 1),
        ({"draft_gpus": 0.0}, 1),
        ({"draft_kv_bytes": 1 << 30}, 1),
        ({"draft_resources": ("cheap=1",)}, 1),
        ({"drafts_beside_target": 1}, 1),
        ({"draft_port": 60001}, 1),
        ({"draft_threads": 2}, 1),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_of_draft_workers_is_kept_to(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], workers: int):
    have_gpus(monkeypatch, 1)
    assert placed(**options) == ("worker", workers)
    name = next(iter(options))
    assert f"as --{name.replace('_', '-')} asks" in line(DeployConfig(port=0, **options), "drafter")
    with pytest.raises(ValueError, match=f"{name}: .* given, where the drafter is resident: drafter_placement both"):
        DeployConfig(port=0, drafter_placement="resident", **options)


def test_without_a_draft_model_nothing_is_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 1)
    assert "none: plain decoding" in line(DeployConfig(port=0, drafts=0), "drafter")
    coder = checkpoint(tmp_path / "coder")
    others: tuple[dict[str, Any], ...] = ({"target_model": coder}, {"source": "ngram"})
    for options in others:
        assert placed(**options)[1] == 1
        assert "n-grams of prompts and outputs, in a worker of its own" in line(
            DeployConfig(port=0, **options), "drafter"
        )


def test_where_gpus_are_a_clusters_a_draft_model_has_a_worker(monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 1)
    assert placed(address="auto") == ("worker", 1)
    assert "as GPUs are a cluster's" in line(DeployConfig(port=0, address="auto"), "drafter")


def test_two_workers_on_one_gpu_share_one_budget(monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 1)
    asked = DeployConfig(port=0, drafter_placement="worker")
    plan = make_plan(asked)
    target, draft = plan.config.target_kv_bytes, plan.config.draft_kv_bytes
    assert target is not None
    assert draft is not None
    assert 0.8 * GPU.total_bytes < target + draft < 0.9 * GPU.total_bytes
    # As many tokens of one as of the other.
    configs = [
        json.loads((path / "config.json").read_text()) for path in (embedded_target_path(), embedded_draft_path())
    ]
    per_token = [own["num_hidden_layers"] * own["num_key_value_heads"] * own["head_dim"] for own in configs]
    assert target / per_token[0] == draft / per_token[1]
    assert "0.5 for each target" in line(asked, "device")
    # What one of them is given, the other does not have.
    given = make_plan(dataclasses.replace(asked, target_kv_bytes=50_000_000_000)).config
    assert given.target_kv_bytes == 50_000_000_000
    assert given.draft_kv_bytes == pytest.approx(target + draft - 50_000_000_000, rel=1e-3)
    with pytest.raises(OutriderError, match="draft_kv_bytes: no room is left for the KV of the others"):
        make_plan(dataclasses.replace(asked, draft_kv_bytes=75_000_000_000))
    # Whoever has a GPU for itself takes what is free there.
    have_gpus(monkeypatch, 2)
    assert make_plan(DeployConfig(port=0)).config.target_kv_bytes is None
    assert make_plan(DeployConfig(port=0, target_kv_bytes=5)).config.target_kv_bytes == 5


def test_kv_beside_a_worker_with_its_own_gpu_is_shared_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 2)
    target, draft = of_weights(tmp_path / "target", 16), of_weights(tmp_path / "draft", 2)
    drafts: dict[str, Any] = {"port": 0, "target_model": target, "draft_model": draft, "drafts": 2}
    alone = make_plan(DeployConfig(target_gpus=1.0, **drafts)).config
    assert alone.target_kv_bytes is None
    assert alone.draft_kv_bytes == pytest.approx((0.9 * GPU.total_bytes - 2 * 2e9) / 2, rel=0.05)
    for kv_bytes in (40_000_000_000, 54_000_000_000):
        given = make_plan(DeployConfig(target_gpus=1.0, target_kv_bytes=kv_bytes, **drafts)).config
        assert (given.target_kv_bytes, given.draft_kv_bytes) == (kv_bytes, alone.draft_kv_bytes)
    # The other way round: the target has half a GPU, and the draft one for itself.
    drafts["drafts"] = 1
    half = DeployConfig(target_gpus=0.5, draft_gpus=1.0, draft_kv_bytes=60_000_000_000, **drafts)
    beside = make_plan(half).config
    assert beside.target_kv_bytes == pytest.approx(0.9 * GPU.total_bytes - 16e9, rel=0.05)
    # Each must fit its own GPU.
    drafts["target_model"] = of_weights(tmp_path / "large", 75)
    large = DeployConfig(target_gpus=1.0, **drafts)
    for count in (0, 2):
        with pytest.raises(OutriderError, match=r"the weights take 75\.0 GB of a GPU, which has 80\.0 GB"):
            make_plan(dataclasses.replace(large, drafts=count))


def test_a_resident_draft_is_a_part_of_its_target(monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 1)
    alone = DeployConfig(port=0, drafter_placement="resident")
    assert "inside each target worker; no draft workers" in line(alone, "drafter")
    assert "1 for each target" in line(alone, "device")
    assert make_plan(alone).config.target_kv_bytes is None
    # With draft workers on the same GPU, the target's share is for the KV of two models.
    own, both = (make_plan(DeployConfig(port=0, drafter_placement=name)).config for name in ("worker", "both"))
    assert own.target_kv_bytes and own.draft_kv_bytes and both.target_kv_bytes and both.draft_kv_bytes
    ratio = own.target_kv_bytes / own.draft_kv_bytes
    assert both.target_kv_bytes / both.draft_kv_bytes == pytest.approx(ratio + 1)
    lines = make_plan(DeployConfig(port=0, drafter_placement="both")).lines
    assert [text.split()[0] for text in lines].count("drafter") == 2


def test_a_head_is_resident_by_itself(monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 1)
    pair: dict[str, Any] = {"target_model": str(embedded_target_path()), "draft_model": str(embedded_eagle_path())}
    config = DeployConfig(port=0, **pair)
    plan = make_plan(config)
    assert (plan.config.drafter_placement, plan.config.draft_workers) == ("resident", 0)
    assert plan.config.resident_model == embedded_eagle_path()
    assert "inside each target worker" in line(config, "drafter")
    assert make_plan(DeployConfig(port=0, draft_model=str(embedded_eagle_path()))).config.draft_workers == 0
    placements: tuple[Literal["worker", "both"], ...] = ("worker", "both")
    for placement in placements:
        with pytest.raises(ValueError, match=rf"drafter_placement: {placement} given, resident needed: .* EAGLE"):
            make_plan(DeployConfig(port=0, drafter_placement=placement, **pair))
    for name, value in {"drafts": 1, "max_drafts": 3, "source": "ngram"}.items():
        with pytest.raises(ValueError, match=rf"{name}: {value} given, which draft workers alone have, leave it out"):
            make_plan(DeployConfig(port=0, **pair | {name: value}))
    have_gpus(monkeypatch, 2)
    assert placed(tensor_parallel_size=2, **pair) == ("resident", 0)


def test_a_head_may_draft_beside_draft_workers(monkeypatch: pytest.MonkeyPatch):
    have_gpus(monkeypatch, 2)
    head, draft = str(embedded_eagle_path()), str(embedded_draft_path())
    pair: dict[str, Any] = {"target_model": str(embedded_target_path()), "draft_model": draft}
    config = DeployConfig(port=0, resident_draft=head, **pair)
    planned = make_plan(config).config
    assert (planned.resident_model, planned.draft_model, planned.draft_workers) == (Path(head), draft, 1)
    first, second = (text for text in make_plan(config).lines if text.startswith("drafter"))
    assert first.startswith(f"drafter   {head} (") and "inside each target worker" in first
    assert second.startswith(f"drafter   {draft} (") and "in a worker of its own" in second
    # Without a draft model for them, draft workers grow by n-grams.
    without = DeployConfig(port=0, target_model=str(embedded_target_path()), resident_draft=head)
    assert "n-grams" in [text for text in make_plan(without).lines if text.startswith("drafter")][1]
    assert make_plan(dataclasses.replace(config, drafts=0)).config.draft_workers == 0
    # On one GPU the target's share is for the KV and the hidden rows of both.
    have_gpus(monkeypatch, 1)
    target, draft_bytes = (getattr(make_plan(config).config, name) for name in ("target_kv_bytes", "draft_kv_bytes"))
    alone = make_plan(DeployConfig(port=0, drafter_placement="worker", **pair)).config
    assert alone.target_kv_bytes and alone.draft_kv_bytes
    assert target / draft_bytes > alone.target_kv_bytes / alone.draft_kv_bytes
    with pytest.raises(ValueError, match=r"draft_model: .* given, a draft model needed beside resident_draft: .* head"):
        make_plan(DeployConfig(port=0, resident_draft=head, draft_model=head))
    placements: tuple[Literal["resident", "both"], ...] = ("resident", "both")
    for placement in placements:
        with pytest.raises(ValueError, match=f"drafter_placement: {placement} given, worker needed beside resident_d"):
            DeployConfig(drafter_placement=placement, resident_draft=head, **pair)


@pytest.mark.parametrize("folder", [embedded_eagle_path(), embedded_block_path()])
def test_a_target_s_tokens_take_a_hidden_row_for_a_head_too(monkeypatch: pytest.MonkeyPatch, folder: Path):
    have_gpus(monkeypatch, 1)
    target, draft = embedded_target_path(), embedded_draft_path()
    numbers: dict[Path, int] = {}
    for path in (target, draft, folder):
        own = json.loads((path / "config.json").read_text())
        numbers[path] = 2 * own["num_hidden_layers"] * own["num_key_value_heads"] * own["head_dim"]
    row = json.loads((folder / "config.json").read_text())["hidden_size"]
    pair: dict[str, Any] = {"target_model": str(target), "draft_model": str(draft), "resident_draft": str(folder)}
    planned = make_plan(DeployConfig(port=0, **pair)).config
    assert planned.target_kv_bytes and planned.draft_kv_bytes
    ratio = (numbers[target] + numbers[folder] + row) / numbers[draft]
    assert planned.target_kv_bytes / planned.draft_kv_bytes == pytest.approx(ratio)


def test_a_head_needs_its_targets_vocabulary(tmp_path: Path):
    other = checkpoint(tmp_path / "other", vocab_size=9000)
    with pytest.raises(
        CheckpointError, match=r"has 8192 vocabulary entries, .*other 9000: is it a head of this target"
    ):
        make_plan(DeployConfig(port=0, target_model=other, draft_model=str(embedded_eagle_path())))


def test_a_model_too_large_for_its_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small = Gpu(name="small", total_bytes=1_000_000)
    monkeypatch.setattr(plan_module, "visible_gpus", lambda: [small])
    with pytest.raises(OutriderError, match=r"the weights take 0\.0 GB of a GPU"):
        make_plan(DeployConfig(port=0, drafts=0))


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"target_gpus": 1.0}, "target_gpus: 1 GPUs needed, 0 visible: is the driver loaded"),
        ({"target_model": "/no/such/folder"}, "/no/such/folder: no such folder"),
        ({"target_model": "no.gguf"}, "no.gguf: no such file"),
        ({"max_model_len": 100_000}, "max_model_len: 100000 given, the model ends at 2048"),
        ({"chat_template": Path("no.jinja")}, "chat_template: no.jinja: no such file"),
        ({"token_file": Path("none.json")}, "none.json"),
        ({"bind": Bind.NODE, "insecure": True, "target_model": "some/name"}, "target_model: 'some/name' given"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(options: dict[str, object], wrong: str):
    with pytest.raises((OutriderError, ValueError, OSError), match=wrong):
        make_plan(DeployConfig(port=0, **options))  # pyright: ignore[reportArgumentType]


def test_a_name_that_is_nearly_right_is_asked_about(tmp_path: Path):
    checkpoint(tmp_path / "llama-8b")
    with pytest.raises(CheckpointError, match=r"did you mean .*llama-8b\?"):
        make_plan(DeployConfig(port=0, target_model=str(tmp_path / "lama-8b")))


def test_a_family_that_is_not_served_is_named(tmp_path: Path):
    folder = checkpoint(tmp_path / "old", model_type="gpt2")
    with pytest.raises(CheckpointError, match="model type 'gpt2' is not served"):
        make_plan(DeployConfig(port=0, target_model=folder))


def test_a_draft_needs_its_targets_tokenizer(tmp_path: Path):
    folder = checkpoint(tmp_path / "draft")
    document = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(document, indent=1))
    # Other bytes, the same tokens.
    make_plan(DeployConfig(port=0, target_model=str(embedded_target_path()), draft_model=folder))
    document["model"]["merges"].pop()
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"the tokenizers of .* differ"):
        make_plan(DeployConfig(port=0, target_model=str(embedded_target_path()), draft_model=folder))


def test_a_port_that_is_taken_is_named_with_its_option():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OutriderError, match=f"http_port: 127.0.0.1:{port} is taken: give another --http-port"):
            make_plan(DeployConfig(port=0, http_port=port))


def test_a_dry_run_imports_neither_ray_nor_torch():
    code = (
        "import sys; from outrider import cli; assert cli.run(['serve', '--dry-run', '--port', '0']) == 0; "
        "assert not {'ray', 'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("model ")


def test_errors_are_one_line_and_code_1(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["serve", "/no/such/folder"]) == 1
    assert capsys.readouterr().err == "error: /no/such/folder: no such folder\n"


# ----------------------------------------------------------------------------------------------------- Hugging Face Hub


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, `acme/coder`: the embedded target in one revision."""

    asked: list[str] = []  # noqa: RUF012 one server at a time

    def do_GET(self) -> None:
        self.serve()

    def do_HEAD(self) -> None:
        self.serve()

    def serve(self) -> None:
        self.asked.append(self.path)
        files = {path.name: path for path in embedded_target_path().iterdir()}
        name = self.path.rpartition("/")[2]
        if not self.path.startswith(("/acme/coder/", "/api/models/acme/coder")):
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif self.path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": path.stat().st_size} for name, path in files.items()]
            tree = [
                {"type": "file", "path": own["rfilename"], "oid": "e" * 40, "size": own["size"]} for own in siblings
            ]
            about = {"id": "acme/coder", "sha": "a" * 40, "siblings": siblings}
            self.answer(200, json.dumps(tree if "/tree/" in self.path else about).encode())
        elif name in files:
            self.answer(200, files[name].read_bytes(), ETag=f'"{name}"', **{"X-Repo-Commit": "a" * 40})
        else:
            self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})

    def answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that finds it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    server.shutdown()
    server.server_close()


PLANS = """
import sys
from outrider.deploy.config import DeployConfig
from outrider.deploy.plan import make_plan
plan = make_plan(DeployConfig(port=0, target_model="acme/coder"))
print(*(model.missing for model in plan.missing))
if "complete" in sys.argv:
    plan = plan.completed()
print(plan.config.target_model, *plan.config.served_model_name)
"""


def planned(hub: dict[str, str], *words: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PLANS, *words], capture_output=True, text=True, env=hub, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_name_on_the_hub_is_looked_at_before_its_weights_are_loaded(hub: dict[str, str]):
    assert planned(hub) == [
        "load the weights of acme/coder from the Hugging Face Hub",
        "acme/coder acme/coder",
    ]
    assert not any(path.endswith(".safetensors") for path in Hub.asked)
    folder, name = planned(hub, "complete")[1].split()
    assert name == "acme/coder"
    assert (Path(folder) / "model-00001-of-00003.safetensors").is_file()
    # What is in the cache is not asked for again.
    Hub.asked.clear()
    assert planned(hub) == ["", f"{folder} acme/coder"]
    assert not Hub.asked
    other = subprocess.run(
        [sys.executable, "-m", "outrider.cli", "serve", "acme/other"],
        capture_output=True,
        text=True,
        env=hub,
        check=False,
    )
    assert other.returncode == 1
    assert "acme/other: no folder, no file and no model in the cache is called so" in other.stderr
