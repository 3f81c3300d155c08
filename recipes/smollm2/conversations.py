"""Conversations that the model writes itself: user turns and answers, in turns, out of its chat template.

All sequences have one length, and begin with the template's system message and, three times out of four, with the first
words of a question. Where the model ends a turn, the header of the next one is put in, so that a sequence is full of
text. A drafter serves on such text: what the model says at the temperatures at which it is asked.

Shapes: N sequences, T tokens, S scripts (tokens that are put in), F tokens of the longest.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from generation import KvCache, choose, next_logits
from llama import Llama
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# In place of a temperature: no token of an answer.
NO_ANSWER = 255
OPENINGS = Path(__file__).with_name("openings.txt")


@dataclass(frozen=True, kw_only=True)
class ConversationConfig:
    """Configuration of the conversations to write.

    Attributes:
        sequences: written at a time.
        tokens: of each.
        user_temperature: of the user's turns; above it they lose their thread.
        answer_tokens: most tokens of an answer, which ends there. At temperature 0 long answers of a small model go in
            circles: easy to draft, and nothing to learn from.
        temperatures: of the answers, spread evenly over the sequences.
        opening_share: sequences whose first question begins with an opening.
        seed: with the round's number, decides all of it.
    """

    sequences: int = 2048
    tokens: int = 1024
    user_temperature: float = 0.9
    answer_tokens: int = 192
    temperatures: tuple[float, ...] = (0.0, 1.0, 0.0, 0.7, 0.0, 1.0, 0.0, 0.4)
    opening_share: float = 0.75
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """Tokens of a chat template.

    Attributes:
        start: of a conversation, up to the first user turn.
        end_of_turn: token that ends a turn.
        to_assistant: between a user turn and the answer, after `end_of_turn`.
        to_user: between an answer and the next user turn, likewise.
        openings: first words of questions.
    """

    start: list[int]
    end_of_turn: int
    to_assistant: list[int]
    to_user: list[int]
    openings: list[list[int]]


def chat_format(tokenizer: "PreTrainedTokenizerBase") -> ChatFormat:
    """Return the format that a tokenizer's chat template has; the openings are those of openings.txt.

    Raises:
        ValueError: turns of the template do not end with the end-of-text token.
    """
    mark = "\N{SNOWMAN}"
    messages = [{"role": role, "content": mark} for role in ("user", "assistant", "user")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    start, to_assistant, to_user, _ = text.split(mark)
    end = str(tokenizer.eos_token)
    if not (to_assistant.startswith(end) and to_user.startswith(end)):
        raise ValueError(f"chat template: its turns do not end with {end!r}")

    def ids(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    lines = OPENINGS.read_text(encoding="utf-8").splitlines()
    return ChatFormat(
        start=ids(start),
        end_of_turn=ids(end)[0],
        to_assistant=ids(to_assistant.removeprefix(end)),
        to_user=ids(to_user.removeprefix(end)),
        openings=[ids(line.replace("\\n", "\n")) for line in lines],
    )


@torch.no_grad()
def write_conversations(
    model: Llama, chat: ChatFormat, config: ConversationConfig, *, number: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return one round of conversations.

    Args:
        model: that writes them.
        chat: its chat format.
        config: how.
        number: of the round: each has other conversations.
        dtype: of the arithmetic.

    Returns:
        tokens [N, T] int64, and [N, T] int64 hundredths of the temperature at which each token was chosen, NO_ANSWER
        where it is not an answer's.
    """
    device, count = model.model.embed_tokens.weight.device, config.sequences
    generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + number)
    to_assistant, to_user, no_opening, first_opening = range(4)
    parts = [chat.to_assistant, chat.to_user, [], *chat.openings]
    lengths = torch.tensor([len(part) for part in parts], device=device)
    scripts = torch.zeros((len(parts), int(lengths.max()) + 1), dtype=torch.int64, device=device)
    for index, part in enumerate(parts):
        scripts[index, : len(part)] = torch.tensor(part, dtype=torch.int64)
    script = torch.randint(first_opening, len(parts), (count,), generator=generator, device=device)
    opened = torch.rand(count, generator=generator, device=device) < config.opening_share
    script = torch.where(opened, script, no_opening)
    # Tokens of the script that are put in, and tokens of the turn that were chosen.
    place, written, answers = torch.zeros_like(script), torch.zeros_like(script), torch.zeros_like(opened)
    offered = torch.tensor(config.temperatures, device=device)
    own = offered[torch.arange(count, device=device) % len(offered)]
    hundredths = (100 * own).round().long()

    tokens = torch.empty((count, config.tokens), dtype=torch.int64, device=device)
    tokens[:, : len(chat.start)] = torch.tensor(chat.start)
    chosen_at = torch.full_like(tokens, NO_ANSWER)
    cache = KvCache.empty(model, count, config.tokens, dtype)
    begin = 0
    for end in range(len(chat.start), config.tokens):
        logits = next_logits(model, tokens[:, begin:end], begin, cache)
        temperature = torch.where(answers, own, config.user_temperature)[:, None]
        is_free, is_full = place >= lengths[script], answers & (written >= config.answer_tokens)
        chosen = torch.where(is_full, chat.end_of_turn, choose(logits, temperature, generator))
        tokens[:, end] = torch.where(is_free, chosen, scripts[script, place])
        chosen_at[:, end] = torch.where(is_free & answers & ~is_full, hundredths, NO_ANSWER)
        has_ended = is_free & (chosen == chat.end_of_turn)
        written = torch.where(has_ended, 0, written + is_free)
        place = torch.where(has_ended, 0, torch.where(is_free, place, place + 1))
        script = torch.where(has_ended, torch.where(answers, to_user, to_assistant), script)
        answers = answers ^ has_ended
        begin = end
    return tokens, chosen_at


def unlike_prompts(
    tokens: Tensor, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[str], *, characters: int = 48
) -> Tensor:
    """Return [N] bool: which of the conversations [N, T] have no message's beginning in them."""
    beginnings = [message[:characters] for message in messages]
    texts = tokenizer.batch_decode(tokens.tolist())
    return torch.tensor([not any(each in text for each in beginnings) for text in texts], dtype=torch.bool)


def write_shards(
    model: Llama,
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    config: ConversationConfig,
    *,
    most_tokens: int,
    left_out: Sequence[str],
    dtype: torch.dtype,
    deadline_s: float,
    part: tuple[int, int] = (0, 1),
) -> bool:
    """Write rounds of conversations, one file each, unless they are there; return whether all are written.

    Args:
        model: that writes them.
        tokenizer: its own, with a chat template.
        folder: of the files, made if need be.
        config: how.
        most_tokens: after which no round begins.
        left_out: messages; a conversation with the beginning of one is dropped.
        dtype: of the arithmetic.
        deadline_s: on the clock of `time.perf_counter`; a round that would end later does not begin.
        part: (I, N): every Nth round, from the Ith on, where others write the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chat, longest_s = chat_format(tokenizer), 0.0
    number, parts = part
    while number * config.sequences * config.tokens < most_tokens:
        file = folder / f"{number:05}.npz"
        if not file.exists():
            begun = time.perf_counter()
            if begun + longest_s > deadline_s:
                return False
            tokens, chosen_at = (each.cpu() for each in write_conversations(
                model, chat, config, number=number, dtype=dtype
            ))  # fmt: skip
            kept = unlike_prompts(tokens, tokenizer, left_out)
            unfinished = file.with_suffix(".unfinished")
            with unfinished.open("wb") as stream:
                np.savez(
                    stream,
                    tokens=tokens[kept].numpy().astype(np.uint16),
                    chosen_at=chosen_at[kept].numpy().astype(np.uint8),
                )
            unfinished.rename(file)
            taken_s = time.perf_counter() - begun
            longest_s = max(longest_s, taken_s)
            logger.info("round %d: %d conversations in %.1f s", number, int(kept.sum()), taken_s)
        number += parts
    return True


def read_shards(folder: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens [N, T] int32 and chosen_at [N, T] uint8 of all files, on the device.

    Raises:
        FileNotFoundError: there is no file.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise FileNotFoundError(f"{folder}: no conversations; run the stage text")
    tokens, chosen_at = [], []
    for file in files:
        with np.load(file) as held:
            tokens.append(torch.from_numpy(held["tokens"].astype(np.int32)))
            chosen_at.append(torch.from_numpy(held["chosen_at"]))
    return torch.cat(tokens).to(device), torch.cat(chosen_at).to(device)
