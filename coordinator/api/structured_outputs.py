"""What a request's structured_outputs come to: the grammar that its workers follow, or what is wrong with them.

The grammar is compiled here, for the coordinator's own tokenizer, before any worker hears of it: who asks for what
cannot be compiled is told so at once. Compiling is bounded work on the compiler's own thread, but it may take a quarter
of a second: requests with structured_outputs are checked outside the event loop
(`outrider.coordinator.api.generations`).
"""

from typing import Any

from outrider.coordinator.api.field_checks import FieldChecks
from outrider.errors import GrammarUnsupported
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.library import GrammarError
from outrider.grammar.request import ConstraintError, grammar_of
from outrider.sampling import SamplingSpec

_FIELD = "sampling_params.structured_outputs"


def structured_outputs(fields: FieldChecks, sampling: SamplingSpec, grammars: GrammarCompiler | None) -> dict[str, Any]:
    """Fields of the sampling spec; `grammars` is None where the model has no tokenizer."""
    if not fields.params.HasField("structured_outputs"):
        return {}
    before, asked, ends = len(fields.violations), fields.params.structured_outputs, tuple(fields.model.eos_token_ids)
    # What cannot be had beside a grammar: it says when the output ends, and which tokens there are.
    for is_wrong, field, description in (
        (not ends, _FIELD, "this model names no end-of-sequence token, so no output could end: leave it out"),
        (fields.params.ignore_eos, "sampling_params.ignore_eos",
         "not with structured_outputs: the output ends when it matches"),
        (sampling.min_new_tokens, "sampling_params.min_new_tokens",
         "not with structured_outputs, which say when to end"),
        (sampling.allowed_token_ids, "sampling_params.allowed_token_ids",
         "not with structured_outputs: give one of them"),
        (sampling.is_synthetic, "speculation.verification",
         "4 (synthetic) accepts what no grammar allows: choose another"),
        (grammars is None, _FIELD, "this model has no tokenizer: leave structured_outputs out"),
    ):  # fmt: skip
        if is_wrong:
            fields.wrong(field, description)
    if grammars is None or len(fields.violations) > before:
        return {}
    try:
        grammar = grammar_of(asked)
        grammars.compile(grammar, ends)
    except ConstraintError as error:
        fields.wrong(f"{_FIELD}.{error.field}".rstrip("."), str(error))
    except GrammarError as error:
        fields.wrong(f"{_FIELD}.{asked.WhichOneof('constraint')}", f"cannot be compiled: {error}")
    except GrammarUnsupported as error:
        fields.wrong(_FIELD, str(error))
    else:
        return {"grammar": grammar, "grammar_end_ids": ends}
    return {}
