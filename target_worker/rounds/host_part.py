"""The host's part of a round, for sessions whose choices the device cannot make alone.

    host_rows       the sessions' verified rows as host data: after pack, while the forward pass runs
    grammar_masks   which tokens each grammar allows at each row: while the forward pass runs
    apply_masks     the masks laid over the processed logits: before the choice
    ban_stops       stop tokens that come too early, of sessions that have many of them: before the choice
    force_choices   tokens of sessions whose output is known and has only to be scored: in the place of the choice
    judge           the paths that `target_only` and `rejection` accept: between the choice and the walk

A round walks down each session's rows as far as the choices agree. Here a session's path may be settled before that
walk: `decided` holds the accepted child's row at each row of the path, and `UNDECIDED` where the choices are followed.

    target_only   one coin a node, compared with the cumulative probability of its children
    rejection     min(1, p / q) along a chain, and a sample of max(p - q, 0) at the first rejection

Every random number is a function of (seed, choice index, position) alone, under rejection of the root's position and
the node's number; each is used once in a session's committed tokens. So the same tree gives the same tokens, and what
is drawn at a position tells nothing of another's.

Nothing but `host_rows` waits for the device.

Shapes: R rows of the step, L of them verified ("lines", first in the step), S rows of the pool, V vocabulary size,
W words of 32 tokens; n nodes of a session beside its root; bs sessions judged together, m rows of the largest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.grammar.matcher import SessionGrammar
from outrider.kernels.chain_sampling import chain_speculative_sampling
from outrider.kernels.noise import STREAM_COINS, STREAM_RESIDUAL, philox_uint32
from outrider.kernels.pool.columns import MAX_STOPS, Pool
from outrider.kernels.pool.pack import ROOT, Packed
from outrider.kernels.sampling.filtered_probs import filtered_probs
from outrider.kernels.sampling.grammar_mask import apply_grammar_masks
from outrider.kernels.sampling.rows import SampledRows
from outrider.kernels.tree_sampling import tree_speculative_sampling_target_only
from outrider.kernels.verification.tree_links import links_of_parents
from outrider.kernels.verification.walk import UNDECIDED
from outrider.sampling import SamplingSpec, VerificationRule

DETACHED = -2
"""In `Packed.parents`: the row is nobody's child. A walk may emit its token, and never accepts it."""

# 256 MiB of float32.
_MOST_PROBABILITIES = 1 << 26


class HostSession(Protocol):
    """A session as the host's part of a round knows it."""

    @property
    def sampling(self) -> SamplingSpec:
        """Sampling parameters."""
        ...

    @property
    def grammar(self) -> SessionGrammar | None:
        """Grammar that its output has to match; compiled by the time the session takes part in a round."""
        ...

    @property
    def output(self) -> Sequence[int]:
        """The committed output, to the root."""
        ...

    @property
    def distributions(self) -> Mapping[int, DraftDistribution]:
        """The q that each node's token was drawn from, by node id, without `DraftDistribution.fault`; for rejection."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class HostRows:
    """The verified rows of one session: its root, then its n selected nodes, parents before children.

    Attributes:
        session: whose they are.
        first: the root's row of the step; node i stands i rows behind it.
        tokens: [n + 1].
        parents: [n + 1] numbers of rows of this session, 0 for the root; the root's own is -1.
        node_ids: [n + 1] what the drafter at place 0 calls each; 0 for the root, and where it has not got the node.
    """

    session: HostSession
    first: int
    tokens: Sequence[int]
    parents: Sequence[int]
    node_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Masks:
    """Tokens that the grammars of a round allow.

    Attributes:
        rows: [M] int32, the row of the step that each mask is of.
        masks: [M, W] int32: bit v % 32 of word v // 32 is set where token v may be chosen. No bit is set at the root of
            a session whose grammar has a fault.
        detached: [K] int64, rows that a walk must not accept, because nobody knows what may follow them.
    """

    rows: npt.NDArray[np.int32]
    masks: npt.NDArray[np.int32]
    detached: npt.NDArray[np.int64]


def needs_host(session: HostSession) -> bool:
    """Return whether rounds with this session have a host's part."""
    sampling = session.sampling
    if session.grammar is not None or sampling.forced_token_ids:
        return True
    return sampling.rule is not VerificationRule.COUPLED or _bans_stops(sampling)


def device_stops(sampling: SamplingSpec) -> list[int]:
    """Return the stop tokens that the device knows of a session, in rising order: at most so many.

    Under `rejection` none: nodes with a stop token of the device are never verified, and what is verified must not
    depend on a token that was drawn.
    """
    if sampling.rule is VerificationRule.REJECTION:
        return []
    return sorted(set(sampling.stop_token_ids))[:MAX_STOPS]


def has_host_stops(sampling: SamplingSpec) -> bool:
    """Return whether a session has stop tokens that the device does not know."""
    return len(device_stops(sampling)) < len(set(sampling.stop_token_ids))


def _bans_stops(sampling: SamplingSpec) -> bool:
    """Return whether stop tokens that the device does not know are banned at first."""
    return sampling.bans_stops and has_host_stops(sampling)


def host_rows(packed: Packed, pool: Pool, sessions_by_row: Sequence[HostSession | None]) -> list[HostRows]:
    """Return the verified rows of the sessions that need the host, in the order of the step.

    One copy from the device, and none if no session needs the host. It waits for the current stream, which must not be
    one that runs the forward pass.

    Args:
        packed: the step, as `pack` wrote it.
        pool: whose step it is, not yet re-rooted.
        sessions_by_row: [S], the session in each row of the pool.
    """
    if not any(session is not None and needs_host(session) for session in sessions_by_row):
        return []
    pool_rows = packed.pool_rows[packed.sessions.clamp(min=0)]
    ids = pool.ids[pool_rows.clamp(min=0), packed.entries.clamp(min=0), 0]
    # Only rows in use have meaning; padding comes with entries below ROOT.
    columns = torch.stack((packed.tokens, packed.parents, packed.entries, pool_rows, ids)).cpu().numpy()
    tokens, parents, entries, row_of, ids = columns
    verified = entries >= ROOT
    # A round of prefill alone has none.
    roots = np.flatnonzero(entries == ROOT).tolist()
    found = []
    for root, behind in itertools.pairwise([*roots, len(entries)]):
        session = sessions_by_row[row_of[root]]
        if session is None or not needs_host(session):
            continue
        # Prefill and padding come behind the last verified row.
        rows = slice(root, root + int(verified[root:behind].sum()))
        found.append(
            HostRows(
                session=session,
                first=root,
                tokens=tokens[rows].tolist(),
                parents=[-1, *(parents[rows][1:] - root).tolist()],
                node_ids=[0, *ids[rows][1:].tolist()],
            )
        )
    return found


def grammar_masks(rows: Sequence[HostRows]) -> Masks | None:
    """Return which tokens may be chosen at each row of the sessions with a grammar; None if there is none.

    It waits for a grammar that is still being compiled.
    """
    places: list[npt.NDArray[np.int32]] = []
    masks: list[npt.NDArray[np.int32]] = []
    faulty: list[int] = []
    detached: list[int] = []
    for part in rows:
        grammar = part.session.grammar
        if grammar is None:
            continue
        found = grammar.masks(part.tokens[1:], part.parents[1:]) if grammar.follow(part.session.output) else None
        # `masks` may find a fault, too.
        if found is None or grammar.fault is not None:
            faulty.append(part.first)
            continue
        places.append(np.arange(part.first, part.first + len(part.tokens), dtype=np.int32))
        masks.append(found)
        detached += [part.first + node for node in grammar.unfollowed]
    if not masks and not faulty:
        return None
    words = masks[0].shape[1] if masks else 1
    return Masks(
        rows=np.concatenate([*places, np.array(faulty, dtype=np.int32)]),
        masks=np.concatenate([*masks, np.zeros((len(faulty), words), dtype=np.int32)]),
        detached=np.array(detached, dtype=np.int64),
    )


@torch.inference_mode()
def apply_masks(masks: Masks, logits: torch.Tensor, packed: Packed) -> None:
    """Ban the tokens that a grammar does not allow, and detach the rows that a walk must not accept.

    At the root of a session whose grammar has a fault no token is left, so its choice is -1: the walk ends with a
    fault, and the session's `grammar.fault` says which.

    Args:
        masks: of the round.
        logits: [L, V] float32, every other processor applied; changed.
        packed: the step; `parents` is changed.
    """
    device = logits.device
    apply_grammar_masks(logits, _to_device(masks.rows, device), _to_device(masks.masks, device))
    if len(masks.detached):
        packed.parents.index_fill_(0, _to_device(masks.detached, device), DETACHED)


@torch.inference_mode()
def ban_stops(rows: Sequence[HostRows], logits: torch.Tensor) -> None:
    """Ban stop tokens before min_new_tokens are out, where the device does not know all of them.

    Args:
        rows: of the sessions that need the host, others among them.
        logits: [L, V] float32, changed.
    """
    for part in rows:
        sampling = part.session.sampling
        if not _bans_stops(sampling):
            continue
        left = sampling.min_new_tokens - len(part.session.output)
        banned = [part.first + number for number, depth in enumerate(_depths(part)) if depth < left]
        lines, tokens = np.array(banned, np.int64)[:, None], np.array(sampling.stop_token_ids, np.int64)[None, :]
        logits[_to_device(lines, logits.device), _to_device(tokens, logits.device)] = -torch.inf


@torch.inference_mode()
def force_choices(rows: Sequence[HostRows], choices: torch.Tensor) -> None:
    """Put the tokens of forced outputs in the place of choices; a row without a choice (-1) keeps its fault.

    Args:
        rows: of the sessions that need the host, others among them.
        choices: [L] int64, changed.
    """
    lines, tokens = list[int](), list[int]()
    for part in rows:
        if forced := part.session.sampling.forced_token_ids:
            done = len(part.session.output)
            for number, depth in enumerate(_depths(part)):
                # What lies behind the end is not committed.
                if done + depth < len(forced):
                    lines.append(part.first + number)
                    tokens.append(forced[done + depth])
    if lines:
        forced_lines, forced_tokens = _to_device(np.array([lines, tokens], np.int64), choices.device)
        choices[forced_lines] = torch.where(choices[forced_lines] < 0, -1, forced_tokens)


def _depths(part: HostRows) -> list[int]:
    """[n + 1] of each row below the root."""
    depths = [0]
    for parent in part.parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


@torch.inference_mode()
def judge(
    rows: Sequence[HostRows],
    packed: Packed,
    sampled_rows: SampledRows,
    logits: torch.Tensor,
    choices: torch.Tensor,
    decided: torch.Tensor,
    *,
    most_probabilities: int = _MOST_PROBABILITIES,
) -> None:
    """Settle the paths of the sessions whose rule is `target_only` or `rejection`.

    Sessions of one rule and thresholds are judged together, as far as their probabilities have room. A path ends at a
    row of which no token can be chosen (all logits -inf, or one of them NaN or +inf) with choice -1, and before a
    detached row with that row's token.

    Args:
        rows: of the sessions that need the host, others among them.
        packed: the step, after `apply_masks`.
        sampled_rows: how tokens are chosen at the step's rows; line i is row i.
        logits: [L, V] float32, processors and masks applied.
        choices: [L] int64, written at the last row of each path: the final token.
        decided: [L] int32, written: the accepted child's row at each row of a path, -1 at its last row, and `UNDECIDED`
            everywhere else.
        most_probabilities: how many probabilities may exist at a time; one session's always do.
    """
    decided.fill_(UNDECIDED)
    for rule, thresholds, trees in _shares(rows, most_probabilities // logits.shape[1]):
        columns = _columns(trees, logits.device)
        probs = _probs(logits, sampled_rows, columns.rows)
        if rule is VerificationRule.TARGET_ONLY:
            paths = _target_only_paths(columns, sampled_rows, probs, thresholds)
        else:
            paths = _rejection_paths(trees, columns, sampled_rows, probs)
        _write(paths, columns, packed, probs, choices, decided)


class _Tree(NamedTuple):
    """The judged rows of one session.

    Attributes:
        rows: [n + 1] of the step, the root's first.
        tokens: [n + 1].
        parents: [n + 1], places in `rows`; -1 for the root.
        distributions: [n], under rejection; otherwise empty.
    """

    rows: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    distributions: Sequence[DraftDistribution]


def _shares(
    rows: Sequence[HostRows], most_rows: int
) -> Iterator[tuple[VerificationRule, tuple[float, float], list[_Tree]]]:
    """Group what is judged together: trees of one rule and thresholds, padded to at most `most_rows` rows."""
    groups: dict[tuple[VerificationRule, tuple[float, float]], list[_Tree]] = {}
    for part in rows:
        sampling = part.session.sampling
        if sampling.rule is VerificationRule.TARGET_ONLY:
            # Thresholds are numbers of a launch.
            key = sampling.rule, (sampling.threshold_single, sampling.threshold_acc)
            groups.setdefault(key, []).append(_whole_tree(part))
        elif sampling.rule is VerificationRule.REJECTION:
            groups.setdefault((sampling.rule, (1.0, 1.0)), []).append(_chain(part))
    for (rule, thresholds), trees in groups.items():
        most = max(1, most_rows // max(len(tree.rows) for tree in trees))
        for first in range(0, len(trees), most):
            yield rule, thresholds, trees[first : first + most]


def _whole_tree(part: HostRows) -> _Tree:
    return _Tree(range(part.first, part.first + len(part.tokens)), part.tokens, part.parents, ())


def _chain(part: HostRows) -> _Tree:
    """The chain from the root along first children, as far as the q of each is known."""
    numbers, distributions = [0], []
    for number in range(1, len(part.tokens)):
        if part.parents[number] != numbers[-1]:
            # A sibling, or below one: drafters of these sessions send none.
            continue
        distribution = part.session.distributions.get(part.node_ids[number]) if part.node_ids[number] else None
        if distribution is None:
            break
        numbers.append(number)
        distributions.append(distribution)
    return _Tree(
        [part.first + number for number in numbers],
        [part.tokens[number] for number in numbers],
        range(-1, len(numbers) - 1),
        distributions,
    )


class _Columns(NamedTuple):
    """Trees on the device, all [bs, m] int64; behind a tree's last row it is the root's row, without token and links.

    Attributes:
        rows: of the step.
        tokens: -1 behind the last row.
        first_child, next_sibling: places in the tree's own rows, -1 for none.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor


def _columns(trees: Sequence[_Tree], device: torch.device) -> _Columns:
    most = max(len(tree.rows) for tree in trees)
    columns = np.full((5, len(trees), most), -1, dtype=np.int64)
    for place, tree in enumerate(trees):
        count = len(tree.rows)
        columns[0, place] = tree.rows[0]
        columns[0, place, :count], columns[1, place, :count] = tree.rows, tree.tokens
        columns[4, place, :count] = tree.parents
    columns[2], columns[3] = (links.numpy() for links in links_of_parents(torch.from_numpy(columns[4])))
    return _Columns(*_to_device(columns[:4], device))


class _Paths(NamedTuple):
    """Accepted paths.

    Attributes:
        places: [bs, m] int64: the path's rows, root first, as places in `_Columns.rows` flattened.
        tokens: [bs, m]: the token emitted at each: the accepted child's, and the final one.
        accepted: [bs] int64, accepted nodes k; what stands behind place k means nothing.
    """

    places: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor


def _target_only_paths(
    columns: _Columns, sampled_rows: SampledRows, probs: torch.Tensor, thresholds: tuple[float, float]
) -> _Paths:
    """Judge trees by coins.

    The coin of a node is that of the position after it; the final token's is that of the position after the root.
    """
    trees, most = columns.rows.shape
    device = columns.rows.device
    places = torch.arange(trees * most, device=device).view(trees, most)
    predicts = torch.zeros(trees * most, dtype=torch.int32, device=device)
    accept_index = torch.zeros(trees, most, dtype=torch.int32, device=device)
    accept_token_num = torch.zeros(trees, dtype=torch.int32, device=device)
    tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        accept_token_num,
        columns.tokens,
        places,
        columns.first_child,
        columns.next_sibling,
        _coins(sampled_rows, columns.rows, STREAM_COINS),
        _coins(sampled_rows, columns.rows[:, :1], STREAM_RESIDUAL)[:, 0],
        probs,
        None,
        *thresholds,
    )
    path = accept_index.long()
    return _Paths(path, predicts[path], accept_token_num.long())


def _rejection_paths(
    trees: Sequence[_Tree], columns: _Columns, sampled_rows: SampledRows, probs: torch.Tensor
) -> _Paths:
    """Judge chains, each node by its q. The numbers of node i are those of (position after the root, i)."""
    roots = columns.rows[:, 0]
    tokens, _, emitted = chain_speculative_sampling(
        _draft_probs(trees, probs.shape, probs.device),
        columns.tokens[:, 1:].contiguous(),
        probs,
        seed=sampled_rows.seeds[roots],
        offset=sampled_rows.positions[roots].long() | sampled_rows.choice_index[roots].long() << 32,
    )
    places = torch.arange(columns.rows.numel(), device=roots.device).view(columns.rows.shape)
    return _Paths(places, tokens, emitted.long())


def _write(
    paths: _Paths,
    columns: _Columns,
    packed: Packed,
    probs: torch.Tensor,
    choices: torch.Tensor,
    decided: torch.Tensor,
) -> None:
    """Write accepted paths, each to its last row or to the row before a detached one."""
    step_rows = columns.rows.flatten()[paths.places]
    number = torch.arange(step_rows.shape[1], device=step_rows.device)
    is_cut = (packed.parents[step_rows] == DETACHED) & (number <= paths.accepted[:, None])
    # The root is never detached.
    last = torch.where(is_cut, number - 1, paths.accepted[:, None]).amin(1, keepdim=True)

    at_end = probs.flatten(0, 1)[paths.places.gather(1, last)[:, 0]].sum(1, keepdim=True)
    final = paths.tokens.gather(1, last).to(choices.dtype)
    # Nothing is chosen from a row whose probabilities are 0 or NaN throughout; a detached row's token was accepted.
    final = torch.where((at_end > 0) | (last < paths.accepted[:, None]), final, -1)
    choices.scatter_(0, step_rows.gather(1, last)[:, 0], final[:, 0])

    # Behind the last row its own is written again: no row is left out, and none gets two values.
    at = number.minimum(last)
    below = torch.where(number < last, step_rows.gather(1, (number + 1).minimum(last)), -1)
    decided.scatter_(0, step_rows.gather(1, at).flatten(), below.flatten().to(decided.dtype))


def _probs(logits: torch.Tensor, sampled_rows: SampledRows, rows: torch.Tensor) -> torch.Tensor:
    """The target's distributions at `rows` [bs, m], as [bs, m, V]."""
    flat = rows.flatten()
    parameters = (sampled_rows.temperature, sampled_rows.top_k, sampled_rows.top_p, sampled_rows.min_p)
    return filtered_probs(logits[flat], *(column[flat] for column in parameters)).view(*rows.shape, -1)


def _draft_probs(trees: Sequence[_Tree], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The distributions of all nodes as [bs, m - 1, V], dense: each number the float32 that was drawn from."""
    most, vocab_size = shape[1] - 1, shape[2]
    places, weights = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
    for place, tree in enumerate(trees):
        for node, distribution in enumerate(tree.distributions):
            places.append((place * most + node) * vocab_size + distribution.token_ids.astype(np.int64))
            weights.append(distribution.probabilities())
    dense = torch.zeros(len(trees), most, vocab_size, dtype=torch.float32, device=device)
    flat = _to_device(np.concatenate(places), device)
    dense.view(-1)[flat] = _to_device(np.concatenate(weights), device)
    return dense


def _coins(sampled_rows: SampledRows, rows: torch.Tensor, stream: int) -> torch.Tensor:
    """A float32 in [0, 1) for the position after each of `rows` [bs, m]."""
    flat = rows.flatten()
    words = philox_uint32(
        sampled_rows.seeds[flat],
        sampled_rows.positions[flat],
        torch.zeros_like(flat)[:, None],
        stream,
        sampled_rows.choice_index[flat],
    )
    return ((words[:, 0] >> 8).float() * 2.0**-24).view(rows.shape)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for what it computes."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
