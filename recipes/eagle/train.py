"""Trains the EAGLE-3 head of the embedded target: text, training, report, checkpoint.

    python recipes/eagle/train.py

does everything and replaces the head in src/outrider/models/eagle. The stages can run on different machines over one
work folder: `--stages text` reads the installed packages, `--stages train` wants a GPU.

What is trained is how the head is used: it drafts several tokens on its own hidden rows (EAGLE-3's "training-time
test", arXiv 2503.01840), on source code and on what the target itself writes, towards the target's distribution.
"""

import argparse
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes" / "embedded_pair")]

from checkpoint import load_head, load_target, save_head  # noqa: E402 the pair's recipe must be found first
from head import Eagle3, target_rows  # noqa: E402
from llama import Llama, LlamaShape  # noqa: E402
from optimisation import build_optimisers, set_learning_rate  # noqa: E402
from sampling import SamplingConfig, write_texts  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from training import TrainingConfig, compute_dtype, load_stream, token_windows  # noqa: E402

logger = logging.getLogger("train")

MODELS = ROOT / "src" / "outrider" / "models"
STAGES = ("text", "train", "install")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the head, apart from the text.

    Attributes:
        shape: of the head; hidden size and vocabulary are the target's.
        taps: after how many of the target's layers features are taken.
        unroll: drafting steps that are trained.
        judged: how many of them, drawn anew for every step of the loop, are held against the target: the vocabulary's
            rows are most of the arithmetic.
        step_share: how much less each of them counts than the one before.
        text_tokens: source that is read.
        written: what the target writes.
        windows: of a step.
        seconds: how long the loop runs; learning rates follow the clock.
        measured: windows at the end of the source that are not trained on.
        begin_with: folder of a head to go on with; empty: fresh weights.
    """

    shape: LlamaShape
    taps: tuple[int, ...]
    written: SamplingConfig
    windows: TrainingConfig
    unroll: int = 6
    judged: int = 3
    step_share: float = 0.9
    text_tokens: int = 30_000_000
    seconds: float = 600.0
    measured: int = 32
    begin_with: str = ""


FULL = Recipe(
    shape=LlamaShape(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1
    ),
    taps=(1, 3, 5),
    written=SamplingConfig(rounds=6, sequences=8192),
    windows=TrainingConfig(steps=1, batch_sequences=32, sequence_tokens=1024, matrix_lr=0.02, other_lr=0.004, seed=4),
)
TINY = replace(
    FULL,
    written=SamplingConfig(rounds=1, sequences=10, tokens=24, prompt_tokens=16),
    windows=replace(FULL.windows, batch_sequences=2, sequence_tokens=32, compile=False),
    text_tokens=4_000,
    seconds=2.0,
    measured=2,
)


def read_text(recipe: Recipe, work: Path) -> None:
    """Writes the source as tokens."""
    from text import collect_installed

    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    lines = (MODELS / "held_out_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    work.mkdir(parents=True, exist_ok=True)
    collect_installed(prompts, most_tokens=recipe.text_tokens, tokenizer=tokenizer).tofile(work / "source.bin")


def train(recipe: Recipe, work: Path, device: torch.device) -> None:
    """Trains the head and writes its checkpoint and what it measured."""
    torch.set_float32_matmul_precision("high")
    source = load_stream(str(work / "source.bin"), device)
    target = load_target(MODELS / "target", device)
    kept = recipe.measured * recipe.windows.sequence_tokens + 1
    held_out, source = source[-kept:], source[:-kept]
    written = write_texts(target, source, recipe.written, compute_dtype(device))
    torch.manual_seed(recipe.windows.seed)
    head = Eagle3(recipe.shape, recipe.taps).to(device)
    head.start_from(target)
    if recipe.begin_with:
        load_head(head, Path(recipe.begin_with))
    logger.info("%.3f M parameters", sum(p.numel() for p in head.parameters()) / 1e6)
    steps = run_loop(head, target, torch.cat((source, written)), recipe, lambda: save_head(head, work / "head"))
    report = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "steps": steps,
        "source_tokens": len(source),
        "written_tokens": len(written),
        "held_out_source": measure(head, target, held_out, recipe),
    }
    save_head(head, work / "head")
    (work / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run_loop(head: Eagle3, target: Llama, stream: Tensor, recipe: Recipe, save: Callable[[], None]) -> int:
    """Steps until the time is over; how many."""
    config = recipe.windows
    optimisers = build_optimisers(head, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay)
    divergence = torch.compile(_divergence, dynamic=True) if config.compile else _divergence
    shares = [recipe.step_share**step for step in range(recipe.unroll)]
    begin = saved = shown = time.perf_counter()
    for step, (tokens, _) in enumerate(token_windows(stream, config)):
        now = time.perf_counter() - begin
        set_learning_rate(optimisers, min(int(10_000 * now / recipe.seconds), 9_999), 10_000, config.decay_share)
        drawn = sorted(int(place) for place in torch.randperm(recipe.unroll)[: recipe.judged])
        losses = _losses(head, target, tokens, unroll=recipe.unroll, drawn=drawn, divergence=divergence)
        total = sum(shares[place] * (kl + variation) for place, (kl, variation) in zip(drawn, losses, strict=True))
        assert isinstance(total, Tensor)
        total.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if time.perf_counter() - shown > recipe.seconds / 30 or step == 0:
            shown = time.perf_counter()
            pairs = zip(drawn, losses, strict=True)
            values = " ".join(f"{place}: {kl.item():.3f}/{variation.item():.3f}" for place, (kl, variation) in pairs)
            if not math.isfinite(total.item()):
                raise FloatingPointError(f"loss {total.item()} at step {step}")
            logger.info("%.0f s, step %d: kl/variation of each drafting step %s", now, step + 1, values)
        if time.perf_counter() - saved > 45:
            saved = time.perf_counter()
            save()
        if now > recipe.seconds:
            return step + 1
    raise AssertionError("the windows never end")


def _losses(
    head: Eagle3,
    target: Llama,
    tokens: Tensor,
    *,
    unroll: int,
    drawn: Sequence[int],
    divergence: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """KL and total variation of the drawn ones of `unroll` drafting steps, on windows [N, T]."""
    dtype = compute_dtype(tokens.device)
    features, logits = target_rows(target, tokens, head.taps, dtype)
    embedding = target.model.embed_tokens.weight
    embedded = functional.embedding(tokens[:, 1:], embedding).to(dtype)
    normed = head.unroll(features[:, :-1], embedded, unroll)
    output = embedding.to(dtype)
    log_p = logits[:, unroll:].flatten(0, 1).float().log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1).mean()
    p = p.to(dtype)
    losses = [divergence(rows.flatten(0, 1), output, p) for rows in (normed[place] for place in drawn)]
    return [(cross_entropy - entropy, variation) for cross_entropy, variation in losses]


def _divergence(rows: Tensor, output: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of q under p in nats, and mean total variation; rows [R, C], output [V, C], p [R, V]."""
    log_q = functional.linear(rows, output).float().log_softmax(-1)
    return -(p * log_q).sum(-1).mean(), 0.5 * (p - log_q.exp()).abs().sum(-1).mean()


@torch.no_grad()
def measure(head: Eagle3, target: Llama, stream: Tensor, recipe: Recipe) -> list[dict[str, float]]:
    """Of each drafting step on source that was not trained on: how often the largest entries agree, and the overlap."""
    length, dtype = recipe.windows.sequence_tokens, compute_dtype(stream.device)
    output = target.model.embed_tokens.weight.to(dtype)
    sums = torch.zeros(recipe.unroll, 2, device=stream.device)
    for index in range(recipe.measured):
        tokens = stream[None, index * length : (index + 1) * length].long().clone()
        tokens[:, 0] = 0
        features, logits = target_rows(target, tokens, head.taps, dtype)
        embedded = functional.embedding(tokens[:, 1:], target.model.embed_tokens.weight).to(dtype)
        for step, rows in enumerate(head.unroll(features[:, :-1], embedded, recipe.unroll)):
            q, p = functional.linear(rows, output).float(), logits[:, recipe.unroll :].float()
            sums[step, 0] += (q.argmax(-1) == p.argmax(-1)).float().mean()
            sums[step, 1] += torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1).mean()
    means = (sums / recipe.measured).tolist()
    return [{"agreement": round(agreement, 4), "overlap": round(overlap, 4)} for agreement, overlap in means]


def install(work: Path) -> None:
    """Replaces the head that the repository carries, and the report."""
    shutil.rmtree(MODELS / "eagle", ignore_errors=True)
    shutil.copytree(work / "head", MODELS / "eagle")
    shutil.copy(work / "report.json", Path(__file__).with_name("report.json"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen stages in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--work", type=Path, default=ROOT / "corpus" / "eagle", help="folder for everything in between")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="of the training loop")
    parser.add_argument("--sequences", type=int, help="that the target writes in a round")
    parser.add_argument("--rounds", type=int, help="in which the target writes")
    parser.add_argument("--batch", type=int, help="windows of a training step")
    parser.add_argument("--window", type=int, help="tokens of a window")
    parser.add_argument("--unroll", type=int, help="drafting steps that are trained")
    parser.add_argument("--judged", type=int, help="how many of them are held against the target in each step")
    parser.add_argument("--taps", type=int, nargs=3, help="after how many layers features are taken")
    parser.add_argument("--seed", type=int, help="of windows and of what the target writes")
    parser.add_argument("--decay-share", type=float, help="of the time, in which learning rates fall to zero")
    parser.add_argument("--begin-with", help="folder of a head to go on with")
    parser.add_argument("--matrix-lr", type=float, help="learning rate of the matrices")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a few seconds of each stage, to try the recipe itself")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    recipe, work, device = _recipe(options), options.work, torch.device(options.device)
    stages = {
        "text": lambda: read_text(recipe, work),
        "train": lambda: train(recipe, work, device),
        "install": lambda: install(work),
    }
    for name in STAGES:
        if name in options.stages:
            stages[name]()


def _recipe(options: argparse.Namespace) -> Recipe:
    """The full or the tiny recipe with what the options change."""
    recipe = TINY if options.tiny else FULL
    windows = {
        "batch_sequences": options.batch,
        "sequence_tokens": options.window,
        "matrix_lr": options.matrix_lr,
        "decay_share": options.decay_share,
        "seed": options.seed,
    }
    if options.no_compile:
        windows["compile"] = False
    written = {"sequences": options.sequences, "rounds": options.rounds, "seed": options.seed}
    changes = {
        "seconds": options.seconds,
        "unroll": options.unroll,
        "judged": options.judged,
        "begin_with": options.begin_with,
        "taps": None if options.taps is None else tuple(options.taps),
        "windows": replace(recipe.windows, **{name: value for name, value in windows.items() if value is not None}),
        "written": replace(recipe.written, **{name: value for name, value in written.items() if value is not None}),
    }
    return replace(recipe, **{name: value for name, value in changes.items() if value is not None})


if __name__ == "__main__":
    main()
