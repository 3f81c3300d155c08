"""What every source of growth asks of a session's opening and of its commits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.errors import FieldViolation, InvalidRequest
from outrider.sampling import SamplingSpec, VerificationRule

if TYPE_CHECKING:
    from outrider.draft_worker.session import SessionStart


class CommitMismatch(ValueError):
    """A commit that does not continue what the session holds."""


def check_start(start: "SessionStart", *, vocab_size: int, max_model_len: int) -> None:
    """Looks at the tokens and the sampling of what is to be opened.

    Raises:
        InvalidRequest: token ids or lengths that the model does not take, with every field that is wrong.
    """
    length = len(start.prompt) + len(start.output)
    violations = []
    if not start.prompt:
        violations.append(FieldViolation("prompt", "empty, at least one token needed"))
    if length > max_model_len:
        violations.append(
            FieldViolation("prompt", f"{length} tokens with the output given, at most {max_model_len} fit")
        )
    highest = max((*start.prompt, *start.output), default=0)
    if highest >= vocab_size:
        violations.append(FieldViolation("prompt", f"token {highest} given, ids below {vocab_size} needed"))
    if (fault := start.sampling.fault(None)) is not None:
        violations.append(FieldViolation("sampling", fault))
    if violations:
        raise InvalidRequest(violations)


def check_commit(token_ids: Sequence[int], *, vocab_size: int) -> None:
    """Looks at committed tokens: the target's vocabulary may be padded wider than the draft's.

    Raises:
        InvalidRequest: one of them is not in the vocabulary.
    """
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        violation = FieldViolation("tokens", f"token {highest} given, ids below {vocab_size} needed")
        raise InvalidRequest([violation])


def new_tokens(held: Sequence[int], position: int, token_ids: Sequence[int]) -> Sequence[int]:
    """The part of a commit that the session does not have yet.

    Args:
        held: the session's committed tokens.
        position: committed length before the commit's tokens.
        token_ids: of the commit.

    Raises:
        CommitMismatch: tokens are missing before `position`, or differ from what was committed.
    """
    known = len(held) - position
    if known < 0:
        raise CommitMismatch(f"commit at {position}, but only {len(held)} tokens are known")
    if known and list(token_ids[:known]) != list(held[position : position + len(token_ids)]):
        raise CommitMismatch(f"commit at {position} differs from what was committed there")
    return token_ids[known:] if known else token_ids


def final_tokens(sampling: SamplingSpec) -> frozenset[int]:
    """The tokens that have no children."""
    if sampling.rule is VerificationRule.REJECTION:
        # How long a chain is must not depend on its tokens: it decides what is submitted.
        return frozenset()
    return frozenset(sampling.stop_token_ids)
