"""The target's benchmark without a GPU: floors, points, tables, transformers' step, and a worker of a tiny shape."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.kernel_bench.case import Machine
from benchmarks.target_bench.command import run
from benchmarks.target_bench.models import BenchModel, ModelSizes, folder_model, shape_model
from benchmarks.target_bench.points import ASKED, QUICK, Point, attention_flops, grid, prefill_flops, step_floor
from benchmarks.target_bench.report import Report
from benchmarks.target_bench.serving import IdleResult, measure_mixed, measure_prefill, mixed_config
from benchmarks.target_bench.steps import StepRow, StepTimes
from benchmarks.target_bench.trace import count_calls
from benchmarks.target_bench.transformers_steps import TransformersStep, load_transformers
from benchmarks.target_bench.worker import Worker, worker_config
from rich.console import Console
from torch._C._autograd import DeviceType
from torch._dynamo.utils import counters
from transformers import DynamicCache

from outrider.models import embedded_target_path, widen
from outrider.models.widen import load_small
from outrider.models.widened_weights import LlamaShape, WidenedLlama

CPU = torch.device("cpu")
H200 = Machine(name="H200", copy_bytes_per_s=4.25e12, flops_per_s=780e12, launch_us=1.5)
TINY = LlamaShape(hidden=512, layers=5, heads=4, kv_heads=2, intermediate=1100, vocab=8256)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchModel]:
    monkeypatch.setitem(widen.SHAPES, "tiny", TINY)
    with torch.inference_mode(), shape_model("tiny", CPU, widened=False) as model:
        yield model


def test_sizes_count_every_matrix_that_a_step_reads() -> None:
    for shape in (TINY, widen.SHAPES["8b"]):
        large = WidenedLlama(*load_small(embedded_target_path()), shape, dtype=torch.bfloat16, fill_seed=None)
        sizes = ModelSizes.of(large.config())
        matrices = [size for size in large.tensor_shapes().values() if len(size) == 2]
        assert sizes.layer_weights + sizes.head_weights == sum(math.prod(size) for size in matrices)
        assert sizes.kv_values_per_token == 2 * shape.layers * shape.kv_heads * 128


def test_floors_of_the_8b_shape_at_the_rates_of_an_h200() -> None:
    sizes = ModelSizes(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
    one = step_floor(sizes, Point(1024, 1, 1), H200)
    assert (one.bound, one.products_ms) == ("bytes", pytest.approx(3.53, abs=0.01))
    # 131,072 bytes of keys and values a token.
    assert one.attention_ms == pytest.approx(1e3 * 131072 * 1026 / 4.25e12)
    # A byte for each weight of the layers, two for the output layer's.
    assert step_floor(sizes, Point(1024, 1, 1), H200, quantized=True).products_ms == pytest.approx(1.89, abs=0.01)
    many = step_floor(sizes, Point(2048, 32, 256), H200)
    assert (many.bound, many.products_ms) == ("FLOPs", pytest.approx(4.93, abs=0.01))
    assert many.ms == many.products_ms + many.attention_ms
    long = Point(32768, 1, 256)
    assert step_floor(sizes, long, H200).attention_ms == pytest.approx(1e3 * attention_flops(sizes, long) / 780e12)
    # Of a prompt the products dominate, and the attention is half a square.
    assert prefill_flops(sizes, 8192) == pytest.approx(2 * 6.98e9 * 8192 + 2 * 32 * 4096 * 8192**2, rel=0.01)


def test_points() -> None:
    points = grid()
    assert set(ASKED) <= set(points) and set(ASKED) <= set(QUICK) and len(points) == 61
    assert all(point.tokens % point.sessions == 0 and point.rows >= 1 for point in (*points, *QUICK))
    assert Point.parse("256x32@2048") == Point(2048, 32, 256)
    for text in ("256x32", "a", "5x2@8", "0x1@8"):
        with pytest.raises(ValueError, match=f"'{text}' given"):
            Point.parse(text)


def test_transformers_sees_trees_behind_its_cache(tiny: BenchModel) -> None:
    model = load_transformers(tiny, CPU).float()
    step = TransformersStep(model, Point(12, 2, 10))
    step.rewind()
    step.eager()()
    for session in range(2):
        sees = step._mask[session, 0]
        for node in range(5):
            path = [place - 12 for place in sees[node].nonzero()[:, 0].tolist() if place >= 12]
            cache = DynamicCache()
            for number, layer in enumerate(step._cache.layers):
                cache.update(layer.keys[session, None, :, :12], layer.values[session, None, :, :12], number)
            tokens = step._tokens[session, path][None]
            plain = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0, -1]
            assert int(plain.argmax()) == int(step.choices[session, node])
    # The compiled way: two programs, the layer and the end, and the same choices.
    programs: list[object] = []

    def backend(graph: Any, _inputs: object) -> Any:
        programs.append(graph)
        return graph.forward

    eager, run = step.choices.clone(), step.layerwise(backend=backend)
    for _ in range(2):
        step.choices.zero_()
        step.rewind()
        run()
        assert step.choices.equal(eager) and len(programs) == counters["stats"]["unique_graphs"] == 2


def test_a_worker_on_a_cpu(tiny: BenchModel) -> None:
    report = Report(model=tiny, machine=H200, settings={})
    limits = mixed_config(sessions=2, context=10, prompt=80, steps=3)
    worker = Worker(tiny, worker_config(tiny, "cpu", max_prefill_tokens=24, **limits))
    report.prefill.append(measure_prefill(worker, H200, prompt=40, prompts=1))
    report.mixed.append(measure_mixed(worker, sessions=2, rows=3, context=10, prompt=80, steps=3))
    assert worker.runner.slots.used == 0
    prefill, mixed = report.prefill[0], report.mixed[0]
    assert prefill.tokens_per_second == pytest.approx(40 / prefill.seconds)
    assert (prefill.max_prefill_tokens, prefill.tflops) == (24, pytest.approx(prefill.share_of_peak * 780))
    assert (mixed.alone.steps, mixed.beside.steps >= 1) == (3, True)
    assert 0 < mixed.alone.gap_p50_ms <= mixed.alone.gap_p99_ms
    assert mixed.gap_p99_ratio == mixed.beside.gap_p99_ms / mixed.alone.gap_p99_ms
    assert json.loads(json.dumps(report.as_dict()))["mixed"][0]["beside"]["steps"] == mixed.beside.steps


def test_tables_say_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    model = BenchModel(name="8b", folder=tmp_path, source=None, sizes=folder_model(embedded_target_path()).sizes)
    rows = [
        StepRow(
            point=Point(1024, 1, 1),
            ours=[StepTimes(device_ms=4.4, wall_ms=4.625), StepTimes(device_ms=4.41, wall_ms=4.7)],
            eager_ms=[22.0, 22.5],
            compiled_ms=[5.5, 5.6],
        ),
        StepRow(point=Point(1024, 1, 64), ours=[StepTimes(device_ms=4.95, wall_ms=5.1)]),
        StepRow(point=Point(8192, 1, 8), failures=["ours: RuntimeError: no"]),
    ]
    idle = IdleResult(
        sessions=16, rows=8, context=1024, steps=9, idle_p50_ms=0.2, idle_p90_ms=0.3, idle_max_ms=0.4, step_ms=5.0
    )
    report = Report(model=model, machine=H200, settings={}, rows=rows, idle=[idle])
    stream = io.StringIO()
    for table in report.tables():
        Console(file=stream, width=200).print(table)
    text = stream.getvalue()
    for part in ("4.400", "4.410", "4.625", "22.0", "5.00", "1.25", "4.5 ms", "2 x 16", "0.200", "0.15 ms"):
        assert part in text, part
    assert "Prefill" not in text
    steps = json.loads(json.dumps(report.as_dict()))["steps"]
    assert [step["target_met"] for step in steps] == [True, False, None]
    assert steps[0]["compiled_over_ours"] == pytest.approx(1.25) and steps[2]["eager_over_ours"] is None
    assert steps[0]["ours_over_floor"] == pytest.approx(4.4 / steps[0]["floor"]["ms"])


def test_a_trace_counts_what_the_host_asks_of_cuda() -> None:
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    names = [("cudaGraphLaunch", cpu), ("aten::add", cpu), ("cudaEventSynchronize", cpu), ("cudaGraphLaunch", cpu),
             ("kernel", cuda), ("Memcpy HtoD", cuda)]  # fmt: skip
    calls, on_device = count_calls(SimpleNamespace(name=name, device_type=kind) for name, kind in names)
    assert (calls, on_device) == ({"cudaGraphLaunch": 2, "cudaEventSynchronize": 1}, 2)


def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["--only", "idle"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert run(["--list", "--points", "8x1@64", "64x8@128"]) == 0
    assert capsys.readouterr().out == "8x1@64\n64x8@128\n"
    with pytest.raises(SystemExit):
        run(["--points", "8"])
    assert "TOKENSxSESSIONS@CONTEXT needed" in capsys.readouterr().err


@pytest.mark.gpu
# torch says once a process that a profile has the events of its own cycle alone, which is what is counted.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_it_measures_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    file = tmp_path / "report.json"
    line = ["--shape", "160m", "--quick", "--points", "1x1@1024", "64x8@1024", "--compiled", "--output-json", str(file)]
    assert run([*line, "--only", "steps", "idle", "prefill", "trace"]) == 0
    report = json.loads(file.read_text())
    for step in report["steps"]:
        assert min(step["floor"]["ms"], step["ours"][0]["device_ms"], step["ours"][0]["wall_ms"]) > 0
        assert step["eager_over_ours"] > 0
    assert all(idle["idle_p50_ms"] >= 0 for idle in report["idle"])
    assert report["prefill"][0]["share_of_peak"] > 0
