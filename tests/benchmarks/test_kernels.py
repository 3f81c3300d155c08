"""The kernel benchmark without a GPU: floors, targets, cases, tables, and that every builder fits its operator."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.kernel_bench.attention import SHAPES, WINDOWED
from benchmarks.kernel_bench.case import Case, Machine, Work
from benchmarks.kernel_bench.command import all_cases, run
from benchmarks.kernel_bench.targets import GREEDY, TARGETS, Target

import outrider.ops

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
H200 = Machine(name="H200", copy_bytes_per_s=4.25e12, flops_per_s=780e12, launch_us=1.5)


def test_a_floor_is_the_larger_of_bytes_and_flops() -> None:
    assert Work(bytes_moved=4_250_000).floor_us(H200) == pytest.approx(1.0)
    assert Work(bytes_moved=4_250_000, flops=1_560_000_000).floor_us(H200) == pytest.approx(2.0)
    assert Work(bytes_moved=4_250_000, flops=1_560_000_000).bound(H200) == "FLOPs"
    assert Work(bytes_moved=8_600_000, flops=1_560_000_000).bound(H200) == "bytes"


def test_a_target_is_met_below_the_largest_of_its_limits() -> None:
    target = Target(times_floor=2, part_of_flashinfer=4)
    met = {
        (ours, flashinfer): target.is_met(ours, floor_us=10, flashinfer_us=flashinfer, beside_us={})
        for ours in (19, 21, 26)
        for flashinfer in (100, 40, None)
    }
    assert met == {
        (19, 100): True, (19, 40): True, (19, None): True,
        (21, 100): True, (21, 40): False, (21, None): None,
        (26, 100): False, (26, 40): False, (26, None): None,
    }  # fmt: skip
    assert str(target) == "2 x floor or FlashInfer / 4"
    beside = Target(times_beside=(GREEDY, 1.5))
    assert beside.is_met(15, floor_us=1, flashinfer_us=None, beside_us={GREEDY: 10}) is True
    assert beside.is_met(16, floor_us=1, flashinfer_us=None, beside_us={GREEDY: 10}) is False
    assert beside.is_met(16, floor_us=1, flashinfer_us=None, beside_us={}) is None
    assert Target(microseconds=6).is_met(6.1, floor_us=1, flashinfer_us=None, beside_us={}) is False


def test_cases_are_distinct_and_every_target_is_somebodys() -> None:
    cases = all_cases()
    assert len({(case.operator, case.shape) for case in cases}) == len(cases)
    assert {case.target for case in cases} - {None} == set(TARGETS)
    operators = {case.operator for case in cases if not case.operator.startswith("pool.")}
    assert operators <= set(outrider.ops.__all__)


_SMALL = [
    case
    for case in all_cases()
    if case.shape.startswith(("batch 1, context 1024", "1 x", "batch 1, nodes", "batch 1, drafts"))
]


@pytest.mark.parametrize("case", _SMALL, ids=lambda case: f"{case.operator}-{case.shape}")
def test_builders_fit_their_operators(case: Case) -> None:
    torch.manual_seed(0)
    subject = case.build(CPU, None)
    subject.ours()
    assert subject.work.bytes_moved > 0


def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert run(["--only", "tree_attention", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"tree_attention: {shape}" for shape in (*SHAPES, *WINDOWED)]
    assert run(["--only", "nonsense"]) == 2
    assert "no operator is called nonsense" in capsys.readouterr().err


def test_the_script_hides_its_own_name_from_who_looks_for_a_package_called_kernels() -> None:
    # As `python benchmarks/kernels.py --list` does, and then what transformers does.
    probe = f"""
import importlib.util, runpy, sys
sys.path[0], sys.argv = {str(ROOT / "benchmarks")!r}, ["kernels.py", "--list"]
assert importlib.util.find_spec("kernels").origin.endswith("benchmarks/kernels.py")
try:
    runpy.run_path({str(ROOT / "benchmarks" / "kernels.py")!r}, run_name="__main__")
except SystemExit as end:
    assert end.code == 0
spec = importlib.util.find_spec("kernels")
assert spec is None or spec.origin is None
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(all_cases())


@pytest.mark.gpu
def test_it_measures_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    report = tmp_path / "report.json"
    assert run(["--quick", "--only", "coupled_topk", "--output-json", str(report)]) == 0
    measured = json.loads(report.read_text())
    # Times are differences of two: where others use the GPU, too, they may have any sign.
    assert all(math.isfinite(measured["machine"][name]) for name in ("copy_bytes_per_s", "flops_per_s", "launch_us"))
    assert [row["shape"] for row in measured["rows"]] == [
        case.shape for case in all_cases() if case.operator == "coupled_topk"
    ]
    for row in measured["rows"]:
        assert all(math.isfinite(row[name]["ours_us"]) for name in ("first", "again"))
        assert row["over_floor"] == pytest.approx(row["first"]["ours_us"] / row["floor_us"])
