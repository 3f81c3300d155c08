"""What a request's structured_outputs come to: the grammar that its workers follow, or what is wrong with them.

The grammar is compiled here, for the coordinator's own tokenizer, before any worker hears of it: who asks for what
cannot be compiled is told so at once. Compiling is bounded work on the compiler's own thread, but it may take a quarter
of a second: requests with structured_outputs are checked outside the event loop
(`outrider.coordinator.api.generations`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.errors import FieldViolation, GrammarUnsupported
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.library import GrammarError
from outrider.grammar.request import ConstraintError, grammar_of
from outrider.sampling import SamplingSpec
from outrider.v1 import generation_pb2

_FIELD = "sampling_params.structured_outputs"


def structured_outputs(
    params: generation_pb2.SamplingParams,
    sampling: SamplingSpec,
    grammars: GrammarCompiler | None,
    end_ids: Sequence[int],
) -> tuple[dict[str, Any], list[FieldViolation]]:
    """Fields of the sampling spec, and what is wrong.

    Args:
        params: of the request.
        sampling: what the others of its fields come to.
        grammars: None where the model has no tokenizer.
        end_ids: the model's end-of-sequence tokens.
    """
    if not params.HasField("structured_outputs"):
        return {}, []
    wrong = list(_conflicts(params, sampling, end_ids))
    if grammars is None:
        wrong.append(FieldViolation(_FIELD, "this model has no tokenizer: leave structured_outputs out"))
    if wrong or grammars is None:
        return {}, wrong
    asked, ends = params.structured_outputs, tuple(end_ids)
    try:
        grammar = grammar_of(asked)
        grammars.compile(grammar, ends)
    except ConstraintError as error:
        return {}, [FieldViolation(f"{_FIELD}.{error.field}".rstrip("."), str(error))]
    except GrammarError as error:
        return {}, [FieldViolation(f"{_FIELD}.{asked.WhichOneof('constraint')}", f"cannot be compiled: {error}")]
    except GrammarUnsupported as error:
        return {}, [FieldViolation(_FIELD, str(error))]
    return {"grammar": grammar, "grammar_end_ids": ends}, []


def _conflicts(
    params: generation_pb2.SamplingParams, sampling: SamplingSpec, end_ids: Sequence[int]
) -> Iterator[FieldViolation]:
    """What cannot be had beside a grammar: it says when the output ends, and which tokens there are."""
    if not end_ids:
        yield FieldViolation(_FIELD, "this model names no end-of-sequence token, so no output could end: leave it out")
    if params.ignore_eos:
        yield FieldViolation(
            "sampling_params.ignore_eos", "not with structured_outputs: the output ends when it matches"
        )
    if sampling.min_new_tokens:
        yield FieldViolation("sampling_params.min_new_tokens", "not with structured_outputs, which say when to end")
    if sampling.allowed_token_ids:
        yield FieldViolation("sampling_params.allowed_token_ids", "not with structured_outputs: give one of them")
    if sampling.is_synthetic:
        yield FieldViolation("speculation.verification", "4 (synthetic) accepts what no grammar allows: choose another")
