"""Builds the embedded pair: corpus, tokenizer, target, distilled draft, joint training, checkpoints, report.

    python recipes/embedded_pair/train.py

does everything and replaces the checkpoints in src/outrider/models. The stages can run on different machines over one
work folder: `--stages corpus` needs a package index, `--stages target draft pair report` a GPU.
"""

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from export import load_checkpoint, save_checkpoint
from llama import Llama, LlamaShape
from prompts import cut_prompts
from report import complete, measure_pair
from sources import CorpusLimits, SourceFile, collect
from tokenization import encode_documents, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from training import JointConfig, TrainingConfig, distil, load_stream, new_model, train_jointly, train_target

logger = logging.getLogger("train")

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "src" / "outrider" / "models"
STAGES = ("corpus", "target", "draft", "pair", "report", "install")
PROMPTS_FILE = "held_out_prompts.jsonl"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the pair, apart from the packages."""

    target: LlamaShape
    draft: LlamaShape
    target_training: TrainingConfig
    draft_training: TrainingConfig
    joint_training: JointConfig
    tokenizer_sample: int = 4  # every fourth file is plenty for 8192 entries
    prompts: int = 96
    report_windows: int = 128


FULL = Recipe(
    target=LlamaShape(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=5, num_attention_heads=3, num_key_value_heads=1
    ),
    draft=LlamaShape(
        hidden_size=128, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    ),
    target_training=TrainingConfig(steps=6600, batch_sequences=64, seed=1),
    draft_training=TrainingConfig(steps=6000, seed=2, decay_share=0.0, stream_tokens=74_541_526),
    joint_training=JointConfig(
        loop=TrainingConfig(steps=2600, seed=3, decay_share=0.9, stream_tokens=74_541_526), pull=0.5
    ),
)
_TINY_LOOP = TrainingConfig(steps=3, batch_sequences=2, sequence_tokens=64, compile=False)
TINY = replace(
    FULL,
    target_training=_TINY_LOOP,
    draft_training=_TINY_LOOP,
    joint_training=JointConfig(loop=_TINY_LOOP),
    report_windows=2,
)


def build_corpus(recipe: Recipe, work: Path) -> None:
    """Collect the source, train the tokenizer, and write token streams and prompts."""
    files = collect(work, CorpusLimits())
    train = [file.text for file in files if not file.held_out]
    held_out: list[SourceFile] = [file for file in files if file.held_out]
    tokenizer = train_tokenizer(train[:: recipe.tokenizer_sample])
    save_tokenizer(tokenizer, work / "tokenizer", recipe.target.max_position_embeddings)
    encode_documents(tokenizer, train).tofile(work / "train.bin")
    encode_documents(tokenizer, [file.text for file in held_out]).tofile(work / "held_out.bin")
    prompts = cut_prompts(held_out, tokenizer, recipe.prompts)
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    (work / PROMPTS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_target(recipe: Recipe, work: Path, device: torch.device) -> None:
    """Train the target alone."""
    stream = load_stream(str(work / "train.bin"), device)
    model = train_target(recipe.target, stream, recipe.target_training)
    # Rounded here already: what the draft learns from is then what a bfloat16 checkpoint would say.
    torch.save({name: value.bfloat16() for name, value in model.state_dict().items()}, work / "target.pt")


def build_draft(recipe: Recipe, work: Path, device: torch.device) -> None:
    """Distil the target into the draft."""
    stream = load_stream(str(work / "train.bin"), device)
    target = load_weights(work / "target.pt", recipe.target, device)
    draft = new_model(recipe.draft, device, recipe.draft_training.seed)
    distil(target, draft, stream, recipe.draft_training)
    torch.save(draft.state_dict(), work / "draft.pt")


def build_pair(recipe: Recipe, work: Path, device: torch.device) -> None:
    """Finish both models together and write their checkpoints."""
    stream = load_stream(str(work / "train.bin"), device)
    target = load_weights(work / "target.pt", recipe.target, device)
    draft = load_weights(work / "draft.pt", recipe.draft, device)
    train_jointly(target, draft, stream, recipe.joint_training)
    for model, name in ((target, "target"), (draft, "draft")):
        save_checkpoint(model, load_tokenizer(work), work / name)


def write_report(recipe: Recipe, work: Path, device: torch.device) -> None:
    """Measure the exported pair on held-out files and write report.json."""
    target = load_checkpoint(work / "target", recipe.target, device)
    draft = load_checkpoint(work / "draft", recipe.draft, device)
    tokenizer = load_tokenizer(work)
    torch.set_float32_matmul_precision("highest")
    stream = load_stream(str(work / "held_out.bin"), device)
    measured = measure_pair(target, draft, stream, tokenizer, recipe.report_windows)
    logger.info("%s", measured)
    lines = (work / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:: len(lines) // 4][:4]]
    report = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "held_out": measured,
        "completions": complete(work / "target", tokenizer, prompts, new_tokens=96),
    }
    (work / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def install(work: Path) -> None:
    """Replace the checkpoints, the prompts and the report that the repository carries."""
    for name in ("target", "draft"):
        shutil.rmtree(MODELS / name, ignore_errors=True)
        shutil.copytree(work / name, MODELS / name)
    shutil.copy(work / PROMPTS_FILE, MODELS / PROMPTS_FILE)
    shutil.copy(work / "report.json", Path(__file__).with_name("report.json"))


def load_weights(path: Path, shape: LlamaShape, device: torch.device) -> Llama:
    """The model whose training state lies at `path`."""
    model = Llama(shape).to(device)
    model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    return model


def load_tokenizer(work: Path) -> Tokenizer:
    """The work folder's tokenizer."""
    return Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen stages in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--work", type=Path, default=ROOT / "corpus", help="folder for everything in between")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a few steps of each loop, to try the recipe itself")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    recipe, work, device = (TINY if options.tiny else FULL), options.work, torch.device(options.device)
    stages = {
        "corpus": lambda: build_corpus(recipe, work),
        "target": lambda: build_target(recipe, work, device),
        "draft": lambda: build_draft(recipe, work, device),
        "pair": lambda: build_pair(recipe, work, device),
        "report": lambda: write_report(recipe, work, device),
        "install": lambda: install(work),
    }
    for name in STAGES:
        if name in options.stages:
            stages[name]()


if __name__ == "__main__":
    main()
