"""The chat format of SmolLM2, and the prompts that drafters are measured on.

<|im_start|>system\n ... <|im_end|>\n<|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n ... <|im_end|>\n
"""

from dataclasses import dataclass
from pathlib import Path

from outrider.coordinator.bench.prompts import DEFAULT_FILE, read_prompts


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """One of the prompts of `outrider bench`, as the model reads it.

    Attributes:
        id: its name.
        category: kind of task.
        messages: contents of the conversation's messages.
        token_ids: the whole conversation in the model's chat template, up to where the answer begins.
    """

    id: str
    category: str
    messages: tuple[str, ...]
    token_ids: list[int]


def read_chat_prompts(model: Path, file: Path = DEFAULT_FILE) -> list[ChatPrompt]:
    """Return the conversations of a prompt file, in its order.

    Args:
        model: checkpoint folder with tokenizer and chat template.
        file: JSON lines, as `outrider bench` reads them; every entry has messages.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    return [
        ChatPrompt(
            id=prompt.id,
            category=prompt.category,
            messages=tuple(message["content"] for message in prompt.messages),
            token_ids=tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=True
            )["input_ids"],
        )
        for prompt in read_prompts(file)
    ]
