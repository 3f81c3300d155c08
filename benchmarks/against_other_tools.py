"""`outrider loadtest` and guidellm against the same local OpenAI door, with the same prompts at the same fixed rate.

    python -m venv /tmp/other && /tmp/other/bin/pip install guidellm
    python benchmarks/against_other_tools.py --guidellm /tmp/other/bin/guidellm [--rate 1] [--requests 40] [--turns 3]

Both tools send `--requests` prompts over HTTP/1.1, one every 1 / rate seconds, each asking for `--output-len` tokens.
A prompt is a line with a number and `--texts` of the embedded pair's held-out prompts. The number is another one for
every tool and turn, so that the target's prefix cache has nothing of what anybody asks, and what takes long is the
service's work and not a client's. They take turns, after a turn of each that is not counted. The figures are medians
over the turns; the ratio is ours over theirs.

TTFT and TPOT are medians over the requests of a turn. guidellm counts its TPOT over all output tokens, from the sending
on; what it calls inter-token latency is the time after the first token over the tokens after it, which is what vLLM and
this project call TPOT. That is what is compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    # Of this folder nothing is meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.local import LocalService
from outrider.models import embedded_target_path, held_out_prompts
from outrider.ports import free_port

_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one tool found once, in ms."""

    completed: int
    ttft_ms: float
    tpot_ms: float
    mean_ttft_ms: float
    mean_tpot_ms: float


class ToolFailed(Exception):
    """A tool ended with an error, with what it wrote."""


def run_ours(door: str, prompts: Path, options: argparse.Namespace, folder: Path) -> Turn:
    """`outrider loadtest`."""
    figures = folder / "ours.json"
    _run(
        [
            *(sys.executable, "-m", "outrider.cli", "loadtest", "--protocol", "openai", "--endpoint", door),
            *("--dataset-name", "jsonl", "--dataset-path", str(prompts), "--num-prompts", str(options.requests)),
            *("--request-rate", str(options.rate), "--arrivals", "fixed", "--num-warmups", "0"),
            *("--output-len", str(options.output_len), "--output-json", str(figures)),
        ]
    )
    found = json.loads(figures.read_text(encoding="utf-8"))
    return Turn(
        completed=found["completed"],
        ttft_ms=found["median_ttft_ms"],
        tpot_ms=found["median_tpot_ms"],
        mean_ttft_ms=found["mean_ttft_ms"],
        mean_tpot_ms=found["mean_tpot_ms"],
    )


def run_guidellm(door: str, prompts: Path, options: argparse.Namespace, folder: Path) -> Turn:
    """guidellm of the 0.8 series, set up by a file."""
    figures, scenario = folder / "theirs.json", folder / "scenario.json"
    scenario.write_text(json.dumps(guidellm_scenario(door, prompts, options, figures)), encoding="utf-8")
    _run([str(options.guidellm), "run", "--config", str(scenario), "--disable-console-interactive"])
    return guidellm_turn(json.loads(figures.read_text(encoding="utf-8")))


def guidellm_scenario(door: str, prompts: Path, options: argparse.Namespace, figures: Path) -> dict[str, Any]:
    """Its configuration."""
    extras = {"body": {"temperature": 0.0, "ignore_eos": True, "seed": 0}}
    return {
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": f"http://{door}",
                "request_format": "/v1/completions",
                "http2": False,
                "max_tokens": options.output_len,
                "extras": extras,
            },
            "profile": {"kind": "constant", "rate": [options.rate]},
            "constraints": [{"kind": "max_requests", "count": options.requests}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(embedded_target_path())},
            "data": [{"kind": "json_file", "path": str(prompts)}],
            "data_column_mapper": {
                "kind": "generative_column_mapper",
                "column_mappings": {"text_column": ["prompt"]},
            },
            "outputs": [{"kind": "json", "path": str(figures)}],
        }
    }


def guidellm_turn(report: dict[str, Any]) -> Turn:
    """From its report."""
    metrics = report["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]
    tpot = metrics["inter_token_latency_ms"]["successful"]
    return Turn(
        completed=ttft["count"],
        ttft_ms=ttft["median"],
        tpot_ms=tpot["median"],
        mean_ttft_ms=ttft["mean"],
        mean_tpot_ms=tpot["mean"],
    )


def _run(command: Sequence[str]) -> None:
    # guidellm starts ten processes by default, which would have the service's cores; the embedded tokenizer is here.
    environment = os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    if done.returncode:
        raise ToolFailed(
            f"{' '.join(command[:4])} ... ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[-2000:]}"
        )


def prompts_of(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is sent in a turn of a tool, of which `number` is unique: the same texts, after another first line."""
    texts = held_out_prompts()
    return [
        {
            "prompt": f"# {1000 * (1 + number) + place}\n"
            + "\n\n".join(texts[(place * options.texts + each) % len(texts)] for each in range(options.texts)),
            "max_tokens": options.output_len,
        }
        for place in range(options.requests)
    ]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[Turn]]:
    """All turns of both tools."""
    prompts = folder / "prompts.jsonl"
    port = free_port()
    turns: dict[str, list[Turn]] = {"ours": [], "guidellm": []}
    with LocalService(drafts=1, coordinator_args=["--http-port", str(port), "--max-queue", "1000"]):
        for number in range(options.turns + 1):
            for place, (name, tool) in enumerate((("ours", run_ours), ("guidellm", run_guidellm))):
                lines = prompts_of(2 * number + place, options)
                prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
                turn = tool(f"127.0.0.1:{port}", prompts, options, folder)
                if number:
                    turns[name].append(turn)
    return turns


def run(arguments: Sequence[str]) -> int:
    """A table; 1 where a median differs by more than `--tolerance`."""
    parser = argparse.ArgumentParser(prog="benchmarks/against_other_tools.py", description="Two tools, one door.")
    parser.add_argument("--guidellm", type=Path, required=True, help="its command")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (default 1)")
    parser.add_argument("--texts", type=int, default=5, help="held-out prompts in a prompt (default 5)")
    parser.add_argument("--requests", type=int, default=40, help="of a turn (default 40)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--turns", type=int, default=3, help="of each tool (default 3)")
    parser.add_argument("--tolerance", type=float, default=0.05, help="that TTFT and TPOT may differ by (default 0.05)")
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        turns = measure(options, Path(folder))
    figures = summary(turns)
    table = Table("median over turns", "ours", "guidellm", "ratio", title=f"{options.rate:g} requests a second")
    for name, (ours, theirs) in figures.items():
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.3f}")
    Console().print(table)
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    agreed = all(abs(ours / theirs - 1) <= options.tolerance for ours, theirs in figures.values())
    return 0 if agreed else 1


def summary(turns: dict[str, list[Turn]]) -> dict[str, tuple[float, float]]:
    """(ours, theirs) of each figure, medians over the turns."""
    names = ("completed", "ttft_ms", "tpot_ms", "mean_ttft_ms", "mean_tpot_ms")
    return {
        name: (
            statistics.median(getattr(turn, name) for turn in turns["ours"]),
            statistics.median(getattr(turn, name) for turn in turns["guidellm"]),
        )
        for name in names
    }


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
