"""Where a draft's next level would hang, and how much of it would be new, when several sources grow the same trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED
from outrider.coordinator.candidates import Candidates
from outrider.coordinator.choice_kernels import level_values, whole_level_values
from outrider.coordinator.forest import Floats
from outrider.coordinator.mirror import TreeMirror
from outrider.coordinator.rows import Ints


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """What the next level of S sessions would hang from.

    Attributes:
        values: [S] path values of the leaves, less what the level's rows would cost; 0 where none may follow.
        has_tree: [S] whether anything is known below the root.
    """

    values: npt.NDArray[np.float64]
    has_tree: npt.NDArray[np.bool_]


class OpenLeaves(NamedTuple):
    """Of S sessions, m leaves in all; each session's stand together, the best first.

    Attributes:
        values: [m] path values.
        places: [m] the session of each.
        shares: [m] of what may come below each, what is not there yet.
        root_shares: [S] the same of roots below which a model has not grown, 0 of others; None: only models grow.
    """

    values: Floats
    places: Ints
    shares: Floats
    root_shares: Floats | None


def open_leaves(found: Candidates, by_model: Sequence[bool] | npt.NDArray[np.bool_] | None) -> OpenLeaves:
    """The leaves among candidates.

    Args:
        by_model: [S] whether what is waited for is a model's growth; None: it is.
    """
    forest = next((mirror.forest for mirror in found.mirrors if isinstance(mirror, TreeMirror)), None)
    if forest is None or not forest.mix.is_active:
        values, places = found.values[found.is_leaf], found.places[found.is_leaf]
        return OpenLeaves(values, places, np.ones(len(places)), None)
    rows = np.array([mirror.row if isinstance(mirror, TreeMirror) else 0 for mirror in found.mirrors])
    is_tree = found.slots >= 0
    offered = found.slots[is_tree]
    shares = found.is_leaf.astype(np.float64)
    shares[is_tree] = forest.mix.open_shares(forest, offered, offered)
    roots = np.maximum(forest.root[rows], 0)
    root_shares = forest.mix.open_shares(forest, roots, offered)
    root_shares[rows == 0] = 0.0
    if by_model is not None and not np.all(by_model):
        other = ~np.asarray(by_model)
        shares = np.where(other[found.places], found.is_leaf, shares)
        root_shares[other] = 0.0
    kept = shares > 0
    return OpenLeaves(found.values[kept], found.places[kept], shares[kept], root_shares)


def whole_next_level(found: Candidates, *, widths: Floats, most: Ints, hit: float, price: float) -> Floats | None:
    """The first of `next_level` where only models grow; None where that is not so, or nothing is compiled."""
    if not IS_COMPILED or found.chains:
        return None
    forest = next((mirror.forest for mirror in found.mirrors if isinstance(mirror, TreeMirror)), None)
    if forest is None or forest.mix.is_active:
        return None
    return whole_level_values(found.values, found.is_leaf, found.starts, widths, most, hit, price)


def next_level(
    found: Candidates, leaves: OpenLeaves, *, widths: Floats, most: Ints, hit: float, price: float
) -> tuple[Floats, Floats]:
    """[S] what a level more is worth to each session, less what its rows cost, and [S] what it would displace.

    Args:
        found: the candidates.
        leaves: among them.
        widths: [S] nodes that one step of the session's draft expands of it.
        most: [S] nodes that it may send.
        hit: chance that the truth is among the children of a node that it has reached.
        price: of a row, in tokens.
    """
    values, places = leaves.values, leaves.places
    if IS_COMPILED:
        return level_values(values, places, leaves.shares, found.values, found.starts, widths, most, hit, price)
    # A session that has all the nodes that it may send pays with the last of them, any other with the row.
    counts = np.diff(found.starts)
    displaced = np.full(len(counts), price)
    full = np.flatnonzero((counts >= most) & (counts > 0))
    displaced[full] = np.maximum(found.values[found.starts[full + 1] - 1], price)
    # Each leaf's rank among its session's, best first, as they come.
    own = np.bincount(places, minlength=len(counts))
    ranks = np.arange(len(places)) - np.repeat(np.cumsum(own) - own, own)
    shares = np.clip(widths[places] - ranks, 0.0, 1.0) * leaves.shares
    net = shares * np.maximum(values - displaced[places] / hit, 0.0)
    sums = np.bincount(places, weights=net, minlength=len(counts)).astype(np.float64)
    sums[(counts == 0) & (most > 0)] = max(1.0 - price / hit, 0.0)
    return sums, displaced


def level_leaves(
    found: Candidates,
    by_model: Sequence[bool] | npt.NDArray[np.bool_] | None,
    *,
    widths: Floats,
    most: Ints,
    hit: float,
    price: float,
) -> Leaves:
    """The leaves that the next level of each session will hang from; as of `open_leaves` and `next_level`."""
    has_tree = found.starts[1:] > found.starts[:-1]
    whole = whole_next_level(found, widths=widths, most=most, hit=hit, price=price)
    if whole is not None:
        return Leaves(values=whole, has_tree=has_tree)
    leaves = open_leaves(found, by_model)
    sums, displaced = next_level(found, leaves, widths=widths, most=most, hit=hit, price=price)
    if leaves.root_shares is not None:
        # Below these roots others have grown, and the model has not: it begins anew there.
        anew = has_tree & (most > 0) & (leaves.root_shares > 0)
        sums[anew] = leaves.root_shares[anew] * np.maximum(1.0 - displaced[anew] / hit, 0.0)
        has_tree &= leaves.root_shares == 0
    return Leaves(values=sums, has_tree=has_tree)
