"""Trains the EAGLE-3 head of the embedded target, or its block drafter: text, training, report, checkpoint.

    python recipes/eagle/train.py
    python recipes/eagle/train.py --block

does everything and replaces the head in src/outrider/models/eagle, or the block drafter in src/outrider/models/block,
which begins as a smaller copy of the head. What was interrupted goes on with `--begin-with WORK/head`. For another
target, such as SmolLM2, the text is what recipes/smollm2/train.py has had it write, and the head ends up in WORK/head:

    python recipes/eagle/train.py --target TARGET --conversations TEXT --work WORK

The stages can run on different machines over one work folder: `--stages text` reads the installed packages,
`--stages train` wants a GPU.

What is trained is how a drafter is used: a head drafts several tokens on its own hidden rows (EAGLE-3's "training-time
test", arXiv 2503.01840), on source code and on what the target itself writes, towards the target's distribution.
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes" / "embedded_pair")]
# Behind everything: its train.py is another one.
sys.path.append(str(ROOT / "recipes" / "smollm2"))

from block import Block  # noqa: E402 the recipes must be found first
from checkpoint import load_head, load_target, save_head  # noqa: E402
from conversations import NO_ANSWER, read_shards  # noqa: E402
from distillation import drawn_sequences  # noqa: E402
from export import shape_of_checkpoint  # noqa: E402
from head import Eagle3  # noqa: E402
from llama import Llama  # noqa: E402
from loop import measure, run_loop  # noqa: E402
from sampling import write_texts  # noqa: E402
from settings import BLOCK, FULL, Recipe, for_target, tiny  # noqa: E402
from tokenization import END_OF_TEXT_ID  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402
from training import load_stream, token_windows  # noqa: E402

logger = logging.getLogger("train")

MODELS = ROOT / "src" / "outrider" / "models"
STAGES = ("text", "train", "install")


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Folders, device and target of the stages.

    Attributes:
        work: folder for everything in between.
        device: that the head is trained on.
        target: checkpoint folder.
        conversations: folder of text that the target has written; None: source code, and what the target makes of it.
    """

    work: Path
    device: torch.device
    target: Path
    conversations: Path | None


def read_text(recipe: Recipe, work: Path) -> None:
    """Write the source as tokens."""
    from text import collect_installed

    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    lines = (MODELS / "held_out_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    work.mkdir(parents=True, exist_ok=True)
    collect_installed(prompts, most_tokens=recipe.text_tokens, tokenizer=tokenizer).tofile(work / "source.bin")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Texts that a head is trained and measured on.

    Attributes:
        windows: endless batches, as `run_loop` takes them.
        held_out: [N, T] that are not trained on, and the temperatures of each, as `windows` have them.
        answer_share: of all rows, those in front of a token that a drafter would be asked for.
        source_tokens: of text that others have written.
        written_tokens: of text that the target has written.
    """

    windows: Iterator[tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    answer_share: float
    source_tokens: int
    written_tokens: int


def pair_text(recipe: Recipe, target: Llama, work: Path, device: torch.device) -> Text:
    """Return the source of the stage text, and what the embedded target writes after pieces of it."""
    source = load_stream(str(work / "source.bin"), device)
    length = recipe.windows.sequence_tokens
    kept = recipe.measured * length + 1
    held_out, source = source[-kept:-1].unflatten(0, (-1, length)).clone(), source[:-kept]
    held_out[:, 0] = END_OF_TEXT_ID
    written, chosen_at = _written_text(recipe, target, source, work / "written.pt")
    # Nobody chose the source's tokens: what is asked there is what temperature 1 asks.
    stream, temperatures = torch.cat((source, written)), torch.cat((torch.full_like(source, 100), chosen_at))
    # The same windows of both, since the seed decides which.
    both = zip(token_windows(stream, recipe.windows), token_windows(temperatures, recipe.windows), strict=True)
    windows = ((tokens, at) for (tokens, _), (_, at) in both)
    return Text(
        windows=windows,
        held_out=(held_out, torch.full_like(held_out, 100)),
        answer_share=1.0,
        source_tokens=len(source),
        written_tokens=len(written),
    )


def _written_text(recipe: Recipe, target: Llama, source: Tensor, file: Path) -> tuple[Tensor, Tensor]:
    """Return texts of the target as `write_texts` does; an earlier run's, if that was asked for the same."""
    asked = {
        "written": asdict(recipe.written),
        "source": _digest(source),
        "target": _digest(target.model.embed_tokens.weight.detach().float()),
    }
    if file.is_file():
        held = torch.load(file, map_location=source.device)
        if held["asked"] == asked:
            return held["texts"]
    texts = write_texts(target, source, recipe.written, recipe.compute_dtype(source.device))
    torch.save({"asked": asked, "texts": texts}, file)
    return texts


def _digest(values: Tensor) -> str:
    return sha256(values.cpu().numpy().tobytes()).hexdigest()


def conversation_text(recipe: Recipe, folder: Path, device: torch.device) -> Text:
    """Return conversations that recipes/smollm2/train.py has had a target write; each one's beginning is a window."""
    tokens, chosen_at = (each[:, : recipe.windows.sequence_tokens] for each in read_shards(folder, device))
    after = chosen_at.roll(-1, 1)
    after[:, -1] = NO_ANSWER
    kept, config = recipe.measured, recipe.windows
    numbers = drawn_sequences(
        len(tokens) - kept, config.batch_sequences, seed=config.seed, begin=0, device=tokens.device
    )
    return Text(
        windows=((tokens[kept + own].long(), after[kept + own].long()) for own in numbers),
        held_out=(tokens[:kept], after[:kept]),
        answer_share=(after != NO_ANSWER).float().mean().item(),
        source_tokens=0,
        written_tokens=tokens[kept:].numel(),
    )


def train(recipe: Recipe, place: Workplace) -> None:
    """Train the head and write its checkpoint and what it measured."""
    torch.set_float32_matmul_precision("high")
    work, device = place.work, place.device
    target = load_target(place.target, device).to(recipe.compute_dtype(device))
    if place.conversations is None:
        text = pair_text(recipe, target, work, device)
    else:
        text = conversation_text(recipe, place.conversations, device)
    torch.manual_seed(recipe.windows.seed)
    if recipe.rank:
        head = Block(recipe.shape, recipe.taps, steps=recipe.unroll, rank=recipe.rank).to(device)
    else:
        head = Eagle3(recipe.shape, recipe.taps).to(device)
    head.start_from(target)
    if recipe.begin_with:
        load_head(head, ROOT / recipe.begin_with)
    logger.info("%.3f M parameters", sum(p.numel() for p in head.parameters()) / 1e6)
    ends = json.loads((place.target / "config.json").read_text(encoding="utf-8"))

    def save() -> None:
        save_head(head, work / "head", bos=ends["bos_token_id"], eos=ends["eos_token_id"])

    steps = run_loop(head, target, text.windows, recipe=recipe, answer_share=text.answer_share, save=save)
    save()
    report = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "steps": steps,
        "source_tokens": text.source_tokens,
        "written_tokens": text.written_tokens,
        **measure(head, target, *text.held_out, recipe),
    }
    if recipe.rank and place.conversations is None:
        other = Eagle3(FULL.shape, FULL.taps).to(device)
        load_head(other, MODELS / "eagle")
        report["head"] = measure(other, target, *text.held_out, recipe)
    (work / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def install(recipe: Recipe, work: Path) -> None:
    """Replace the drafter that the repository carries, and its report."""
    shutil.rmtree(MODELS / recipe.name, ignore_errors=True)
    shutil.copytree(work / "head", MODELS / recipe.name)
    report = "block_report.json" if recipe.rank else "report.json"
    shutil.copy(work / "report.json", Path(__file__).with_name(report))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen stages in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="default: all; with --conversations, train alone")
    parser.add_argument("--block", action="store_true", help="train a block drafter")
    parser.add_argument("--target", type=Path, default=MODELS / "target", help="checkpoint folder; default: embedded")
    parser.add_argument("--conversations", type=Path, help="text of another target, by recipes/smollm2/train.py")
    parser.add_argument("--work", type=Path, help="folder for everything in between; default: corpus/eagle or block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="of the training loop")
    parser.add_argument("--sequences", type=int, help="that the target writes in a round")
    parser.add_argument("--rounds", type=int, help="in which the target writes")
    parser.add_argument("--batch", type=int, help="windows of a training step")
    parser.add_argument("--feed-forward", type=int, help="units of the layer; if --begin-with has more, its largest")
    parser.add_argument("--seed", type=int, help="of windows and of what the target writes")
    parser.add_argument("--begin-with", type=Path, help="folder of a head to go on with")
    parser.add_argument("--matrix-lr", type=float, help="learning rate of the matrices")
    parser.add_argument("--tiny", action="store_true", help="a few seconds of each stage, to try the recipe itself")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    recipe, device = _recipe(options), torch.device(options.device)
    work = options.work or ROOT / "corpus" / recipe.name
    place = Workplace(work=work, device=device, target=options.target, conversations=options.conversations)
    work.mkdir(parents=True, exist_ok=True)
    chosen = options.stages or (STAGES if options.conversations is None else ("train",))
    stages = {
        "text": lambda: read_text(recipe, work),
        "train": lambda: train(recipe, place),
        "install": lambda: install(recipe, work),
    }
    for name in STAGES:
        if name in chosen:
            stages[name]()


def _recipe(options: argparse.Namespace) -> Recipe:
    """The full or the tiny recipe with what the options change."""
    recipe = BLOCK if options.block else FULL
    recipe = tiny(recipe) if options.tiny else recipe
    if options.conversations is not None:
        recipe = for_target(recipe, shape_of_checkpoint(options.target))
    windows = {
        "batch_sequences": options.batch,
        "matrix_lr": options.matrix_lr,
        "seed": options.seed,
    }
    written = {"sequences": options.sequences, "rounds": options.rounds, "seed": options.seed}
    changes = {
        "shape": replace(recipe.shape, intermediate_size=options.feed_forward or recipe.shape.intermediate_size),
        "seconds": options.seconds,
        "begin_with": None if options.begin_with is None else str(options.begin_with.resolve()),
        "windows": replace(recipe.windows, **{name: value for name, value in windows.items() if value is not None}),
        "written": replace(recipe.written, **{name: value for name, value in written.items() if value is not None}),
    }
    return replace(recipe, **{name: value for name, value in changes.items() if value is not None})


if __name__ == "__main__":
    main()
