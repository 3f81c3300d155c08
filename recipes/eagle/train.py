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
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes" / "embedded_pair")]

from checkpoint import load_head, load_target, save_head  # noqa: E402 the pair's recipe must be found first
from head import Eagle3  # noqa: E402
from loop import measure, run_loop  # noqa: E402
from sampling import write_texts  # noqa: E402
from settings import FULL, TINY, Recipe  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from training import compute_dtype, load_stream  # noqa: E402

logger = logging.getLogger("train")

MODELS = ROOT / "src" / "outrider" / "models"
STAGES = ("text", "train", "install")


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
    written, chosen_at = write_texts(target, source, recipe.written, compute_dtype(device))
    torch.manual_seed(recipe.windows.seed)
    head = Eagle3(recipe.shape, recipe.taps).to(device)
    head.start_from(target)
    if recipe.begin_with:
        load_head(head, Path(recipe.begin_with))
    logger.info("%.3f M parameters", sum(p.numel() for p in head.parameters()) / 1e6)
    # Nobody chose the source's tokens: what is asked there is what temperature 1 asks.
    stream, temperatures = torch.cat((source, written)), torch.cat((torch.full_like(source, 100), chosen_at))
    steps = run_loop(head, target, stream, temperatures, recipe=recipe, save=lambda: save_head(head, work / "head"))
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
    parser.add_argument("--feed-forward", type=int, help="units of the head's layer, at least those of --begin-with")
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
        "shape": replace(recipe.shape, intermediate_size=options.feed_forward or recipe.shape.intermediate_size),
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
