"""What a tree must be to be verified: a fault here is the sender's."""

from __future__ import annotations

from outrider.draft_distribution import WEIGHT_SUM
from outrider.sampling import VerificationRule
from outrider.target_worker.sessions import Code, Session, SessionFault, TreeRequest


def check_length(tree: TreeRequest, session: Session, *, num_slots: int) -> None:
    """Checks that the tree grows from tokens that the session has, and that there is room for one more.

    Raises:
        SessionFault: FAILED_PRECONDITION where tokens are missing here, else INVALID_ARGUMENT.
    """
    if session.prompt_len <= tree.length <= min(len(session.tokens), session.limit - 1, num_slots):
        return
    given = f"length {tree.length} given"
    if tree.length > len(session.tokens):
        held = len(session.tokens)
        raise SessionFault(Code.FAILED_PRECONDITION, f"{given}, {held} tokens are here: open the session again")
    if tree.length < session.prompt_len:
        raise _fault(f"{given}, the prompt alone has {session.prompt_len} tokens")
    if tree.length >= session.limit:
        raise _fault(f"{given}, the session ends at {session.limit}")
    if tree.length > num_slots:
        raise _fault(
            f"{given}, the KV cache holds {num_slots} tokens: "
            "raise num_slots, kv_bytes or kv_cache_memory_fraction of the target worker"
        )


def check_tree(tree: TreeRequest, rule: VerificationRule, vocab_size: int) -> None:
    """Checks the shape, and what the session's rule needs of it.

    Raises:
        SessionFault: INVALID_ARGUMENT, with what is wrong.
    """
    count = len(tree.tokens)
    if not count and not tree.parents and not tree.distributions:
        return
    if count != len(tree.parents):
        raise _fault(f"{count} tokens and {len(tree.parents)} parents given, as many needed")
    if any(not 0 <= token < vocab_size for token in tree.tokens):
        raise _fault(f"tokens: ids from 0 to {vocab_size - 1} needed")
    if any(not 0 <= parent <= place for place, parent in enumerate(tree.parents)):
        raise _fault("parents: a parent must stand before its children")
    if rule is VerificationRule.REJECTION:
        _check_chain(tree, vocab_size)
    elif any(distribution is not None for distribution in tree.distributions):
        raise _fault(f"distributions: only rejection has them, the session's rule is {rule}")
    if rule is VerificationRule.TARGET_ONLY and len(set(zip(tree.tokens, tree.parents, strict=True))) < count:
        raise _fault("tokens: siblings hold the same token; target_only needs distinct ones")


def _check_chain(tree: TreeRequest, vocab_size: int) -> None:
    count = len(tree.tokens)
    if list(tree.parents) != list(range(count)):
        raise _fault("parents: rejection takes chains, every node the child of the one before")
    if count and len(tree.distributions) != count:
        raise _fault(f"distributions: {len(tree.distributions)} given, one for each of {count} nodes needed")
    for number, (token, distribution) in enumerate(zip(tree.tokens, tree.distributions, strict=False), start=1):
        if distribution is None:
            raise _fault(f"distributions: node {number} has none; its weights (of {WEIGHT_SUM}) are needed")
        if (fault := distribution.fault(token, vocab_size)) is not None:
            raise _fault(f"distributions: node {number}: {fault}")


def _fault(message: str) -> SessionFault:
    return SessionFault(Code.INVALID_ARGUMENT, message)
