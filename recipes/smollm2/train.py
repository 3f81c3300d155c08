"""Train a small draft model for SmolLM2-135M-Instruct: conversations, distillation, checkpoint, report.

    python recipes/smollm2/fetch.py WORK/target
    python recipes/smollm2/train.py --work WORK

The stages can run one by one (`--stages text train export report`), and each goes on where it has stopped: with
`--minutes M` the command ends in time, with exit status 75 while something is left to do, and the same command goes on
with it. Training takes `--train-minutes`, from when the target begins to read the text, and its learning rates are zero
at the end of that time, however many steps were taken; a command that goes on with it reads the text and compiles
again, in time of its own. Stages text and train want a GPU.
"""

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "recipes" / "embedded_pair")]

from chat import read_chat_prompts  # noqa: E402 the pair's recipe must be found first
from conversations import ConversationConfig, read_shards, write_shards  # noqa: E402
from distillation import DistillationConfig, distil, measure_overlap, trained_draft  # noqa: E402
from export import SpecialTokens, load_checkpoint, save_weights, shape_of_checkpoint  # noqa: E402
from llama import Llama, LlamaShape  # noqa: E402
from training import compute_dtype, new_model  # noqa: E402

logger = logging.getLogger("train")

STAGES = ("text", "train", "export", "report")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# As sysexits.h has it: try again later.
UNFINISHED = 75


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the draft, apart from the target.

    Attributes:
        draft: its layers; its vocabulary are the rows of its embedding, and positions are the target's.
        conversations: what it is trained on.
        distillation: the loop.
        text_tokens: of the conversations.
        held_out: conversations that are not trained on.
    """

    draft: LlamaShape
    conversations: ConversationConfig
    distillation: DistillationConfig
    text_tokens: int = 40_000_000
    held_out: int = 64


FULL = Recipe(
    # 9.8 M parameters, 19.9 MB with the row of each token. 12,288 rows make width 384 affordable, where 49,152 leave
    # 160: half of the parameters are layers then. Four layers of narrow MLPs rather than three of wide ones, since
    # depth is what agreement needs and a layer costs a step some 10 us.
    draft=LlamaShape(
        hidden_size=384, intermediate_size=768, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        head_dim=64, vocab_size=12_288, max_position_embeddings=8192,
    ),
    conversations=ConversationConfig(),
    distillation=DistillationConfig(),
)  # fmt: skip
TINY = replace(
    FULL,
    draft=replace(
        FULL.draft,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=16,
        vocab_size=128,
    ),
    conversations=ConversationConfig(sequences=8, tokens=64),
    distillation=DistillationConfig(seconds=3.0, batch_sequences=2, compile=False),
    text_tokens=1024,
    held_out=2,
)


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Folders, device, target and deadline of the stages.

    Attributes:
        work: folder for everything in between; the draft's checkpoint and report.json end up there.
        target: checkpoint folder.
        device: that they run on.
        deadline_s: on the clock of `time.perf_counter`.
        part: of the rounds of text, as `write_shards` takes it.
    """

    work: Path
    target: Path
    device: torch.device
    deadline_s: float
    part: tuple[int, int] = (0, 1)

    def load_target(self) -> Llama:
        """Return the target, fixed, in the dtype of the device's arithmetic."""
        model = load_checkpoint(self.target, shape_of_checkpoint(self.target), self.device)
        return model.to(compute_dtype(self.device)).requires_grad_(False)

    def new_draft(self, recipe: Recipe) -> Llama:
        """Return a fresh draft for the target."""
        positions = shape_of_checkpoint(self.target).max_position_embeddings
        own = replace(recipe.draft, max_position_embeddings=positions)
        return new_model(own, self.device, recipe.distillation.seed)


def write_text(recipe: Recipe, place: Workplace) -> bool:
    """Have the target write conversations."""
    from transformers import AutoTokenizer

    messages = [message for prompt in read_chat_prompts(place.target) for message in prompt.messages]
    return write_shards(
        place.load_target(),
        AutoTokenizer.from_pretrained(place.target, trust_remote_code=False),
        place.work / "text",
        recipe.conversations,
        most_tokens=recipe.text_tokens,
        left_out=messages,
        dtype=compute_dtype(place.device),
        deadline_s=place.deadline_s,
        part=place.part,
    )


def train(recipe: Recipe, place: Workplace) -> bool:
    """Distil the target into the draft."""
    tokenizer = Tokenizer.from_file(str(place.target / "tokenizer.json"))
    tokens, chosen_at = read_shards(place.work / "text", place.device)
    logger.info("%d conversations of %d tokens", *tokens.shape)
    return distil(
        place.new_draft(recipe),
        place.load_target(),
        tokens[recipe.held_out :],
        chosen_at[recipe.held_out :],
        recipe.distillation,
        always=sorted(tokenizer.get_added_tokens_decoder()),
        work=place.work,
        deadline_s=place.deadline_s,
    )


def export(recipe: Recipe, place: Workplace) -> bool:
    """Write the draft as a checkpoint in bfloat16, as trained so far."""
    from transformers import GenerationConfig

    folder = place.work / "draft"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(place.target / name, folder / name)
    ends = GenerationConfig.from_pretrained(place.target)
    special = SpecialTokens(bos=ends.bos_token_id, eos=ends.eos_token_id, pad=ends.pad_token_id)
    draft, rows = trained_draft(place.new_draft(recipe), place.work, place.device)
    save_weights(draft, folder, special, row_of=rows.row_of)
    logger.info("%.1f MB of weights", sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6)
    return True


def report(recipe: Recipe, place: Workplace) -> bool:
    """Measure the exported draft on held-out conversations."""
    folder = place.work / "draft"
    tokens, chosen_at = (each[: recipe.held_out] for each in read_shards(place.work / "text", place.device))
    draft = load_checkpoint(folder, shape_of_checkpoint(folder), place.device)
    held_out = measure_overlap(draft, place.load_target(), tokens, chosen_at)
    logger.info("%s", held_out)
    measured = {
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "held_out": held_out,
    }
    (place.work / "report.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen stages in order; return 0 once all of them are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything in between")
    parser.add_argument("--target", type=Path, help="checkpoint folder; default: WORK/target")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--minutes", type=float, help="after which the command ends")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", type=int, nargs=2, metavar=("I", "N"), default=(0, 1),
                        help="of the text: every Nth round from the Ith on, for a machine with N GPUs")  # fmt: skip
    parser.add_argument("--sequences", type=int, help="that it writes at a time: memory of its keys and values")
    parser.add_argument("--train-minutes", type=float, help="of the distillation; learning rates are zero at its end")
    parser.add_argument("--batch", type=int, help="conversations of a step")
    parser.add_argument("--tiny", action="store_true", help="a few steps of each stage, to try the recipe itself")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    place = Workplace(
        work=options.work,
        target=options.target or options.work / "target",
        device=torch.device(options.device),
        deadline_s=time.perf_counter() + 60 * options.minutes if options.minutes else float("inf"),
        part=tuple(options.part),
    )
    recipe = _recipe(options)
    stages = {"text": write_text, "train": train, "export": export, "report": report}
    for name in STAGES:
        if name in options.stages and not stages[name](recipe, place):
            logger.info("time is over in stage %s: the same command goes on", name)
            return UNFINISHED
    return 0


def _recipe(options: argparse.Namespace) -> Recipe:
    """The full or the tiny recipe with what the options change."""
    recipe = TINY if options.tiny else FULL
    distillation, conversations = recipe.distillation, recipe.conversations
    return replace(
        recipe,
        distillation=replace(
            distillation,
            seconds=60 * options.train_minutes if options.train_minutes else distillation.seconds,
            batch_sequences=options.batch or distillation.batch_sequences,
        ),
        conversations=replace(conversations, sequences=options.sequences or conversations.sequences),
    )


if __name__ == "__main__":
    sys.exit(main())
