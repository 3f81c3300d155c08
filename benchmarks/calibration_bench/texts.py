"""Which prompts the estimates' prior is fitted on, and which ones figures are reported on.

Neither model was trained on any of them. Each of the 96 was cut from a file of its own, so the two halves share no
file, though they share packages; every benchmark of this repository takes its prompts from the first half by default.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.models import embedded_target_path, held_out_prompts

REPORT_PROMPTS = 48
# The context that a position has at least.
FIRST_POSITION = 16
_CUT_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class Text:
    """A held-out prompt.

    Attributes:
        number: among all of them; its seed, too.
        ids: token ids.
    """

    number: int
    ids: tuple[int, ...]

    @property
    def beginnings(self) -> list[tuple[int, ...]]:
        """What stands before every sixteenth position."""
        return [self.ids[:cut] for cut in range(FIRST_POSITION, len(self.ids) + 1, _CUT_EVERY)]


def load_texts(*, fit: bool, limit: int = REPORT_PROMPTS) -> list[Text]:
    """At most `limit` prompts of the half that is fitted on, or of the one that is reported on."""
    tokenizer = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))
    texts = [
        Text(number=number, ids=tuple(tokenizer.encode(text).ids)) for number, text in enumerate(held_out_prompts())
    ]
    return (texts[REPORT_PROMPTS:] if fit else texts[:REPORT_PROMPTS])[:limit]
