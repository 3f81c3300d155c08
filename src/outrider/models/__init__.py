"""The embedded pair: a small Llama target and a smaller Llama draft that ship with the package.

Both read Python source through one shared byte-level tokenizer. They let every command, test and
benchmark run without a download; `docs/embedded-pair.md` says how they were trained. This module
imports nothing heavy, so that any role may ask for the paths.
"""

import json
from pathlib import Path

_MODELS_FOLDER = Path(__file__).resolve().parent


def embedded_target_path() -> Path:
    """Folder of the embedded target: a Hugging Face `LlamaForCausalLM` checkpoint with its tokenizer."""
    return _MODELS_FOLDER / "target"


def embedded_draft_path() -> Path:
    """Folder of the embedded draft: the same layout and the same tokenizer as the target's."""
    return _MODELS_FOLDER / "draft"


def embedded_eagle_path() -> Path:
    """Folder of the embedded target's EAGLE-3 head: the published layout, without a tokenizer of its own."""
    return _MODELS_FOLDER / "eagle"


def embedded_block_path() -> Path:
    """Folder of the embedded target's block drafter: laid out as its head, with what the block needs beside."""
    return _MODELS_FOLDER / "block"


def held_out_prompts() -> list[str]:
    """Python prompts cut from files that neither model was trained on, in a fixed order."""
    lines = (_MODELS_FOLDER / "held_out_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]
