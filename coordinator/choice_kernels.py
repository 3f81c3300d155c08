"""What a batch's nodes are worth, as loops: what steps cost, how many nodes pay, what a further level would bring.

For where numba is there; without it whoever calls them does the same with numpy.
"""

from typing import Any

import numpy as np

from outrider.compiled import compiled


@compiled
def predict_steps(rungs: Any, slope: float, rows: Any) -> Any:
    """[m] nanoseconds of steps of so many rows.

    Args:
        rungs: float64 [4, R] first and last size of every rung, and what steps of these take.
        slope: of what lies beyond the last rung.
        rows: [m]
    """
    low, high, at_low, at_high = rungs[0], rungs[1], rungs[2], rungs[3]
    found, rung, last = np.empty(len(rows)), 0, len(high) - 1
    for number in range(len(rows)):
        size = rows[number]
        if number and size < rows[number - 1]:
            rung = 0
        while rung < last and high[rung] < size:
            rung += 1
        share = min(max((size - low[rung]) / max(high[rung] - low[rung], 1.0), 0.0), 1.0)
        inside = at_low[rung] + share * (at_high[rung] - at_low[rung])
        found[number] = inside + max(size - high[last], 0.0) * slope
    return found


@compiled
def hoped_levels(  # noqa: PLR0917
    middles: Any,
    rows: Any,
    step_ns: Any,
    weight: Any,
    known: float,
    prior_slope: float,
    prior_spread: float,
    usual_slope: float,
    least_share: float,
) -> Any:
    """[R] what steps of each rung's middle would take if the rungs below it went on in a line.

    No more than the next one that is known does. The first ones, below which nothing was measured, go down from the
    first that was.

    Args:
        middles: float64 [R] rows.
        rows: float64 [R] mean of those measured.
        step_ns: float64 [R] mean of their times.
        weight: float64 [R] measurements.
        known: so many of them make a rung known.
        prior_slope: of the line's slope as a share of its mean, a row: expected before anything is known,
        prior_spread: and worth this much spread of rows (squared, summed over steps).
        usual_slope: by which the first ones go down, a row,
        least_share: and to no less than this share of what the first that was measured takes.
    """
    found = np.empty(len(middles))
    steps, sum_rows, sum_ns, sum_square, sum_product = 0.0, 0.0, 0.0, 0.0, 0.0
    first = 0
    while first < len(middles) - 1 and not weight[first]:
        first += 1
    for place in range(len(middles)):
        if place <= first:
            below_ns = usual_slope * (rows[first] - middles[place])
            found[place] = max(step_ns[first] - below_ns, least_share * step_ns[first])
        else:
            mean_rows, mean_ns = sum_rows / steps, sum_ns / steps
            spread = max(sum_square - steps * mean_rows * mean_rows, 0.0)
            covariance = sum_product - steps * mean_rows * mean_ns
            slope = (covariance + prior_spread * prior_slope * mean_ns) / (spread + prior_spread)
            found[place] = mean_ns + max(slope, 0.0) * (middles[place] - mean_rows)
        own = weight[place]
        steps += own
        sum_rows += own * rows[place]
        sum_ns += own * step_ns[place]
        sum_square += own * rows[place] * rows[place]
        sum_product += own * rows[place] * step_ns[place]
    most = np.inf
    for place in range(len(middles) - 1, -1, -1):
        if weight[place] >= known:
            most = min(most, step_ns[place])
        found[place] = min(found[place], most)
    return found


@compiled
def rising(levels: Any, weights: Any) -> Any:
    """[R] what comes nearest to these levels and never falls, by weighted squares: neighbours that fall are pooled.

    Args:
        levels: float64 [R]
        weights: float64 [R] above 0.
    """
    means, shares, firsts = np.empty(len(levels)), np.empty(len(levels)), np.empty(len(levels), np.int64)
    pools = 0
    for place in range(len(levels)):
        means[pools], shares[pools], firsts[pools] = levels[place], weights[place], place
        while pools and means[pools - 1] > means[pools]:
            both = shares[pools - 1] + shares[pools]
            means[pools - 1] += (means[pools] - means[pools - 1]) * shares[pools] / both
            shares[pools - 1] = both
            pools -= 1
        pools += 1
    found = np.empty(len(levels))
    for pool in range(pools):
        found[firsts[pool] : (firsts[pool + 1] if pool + 1 < pools else len(levels))] = means[pool]
    return found


@compiled
def best_count(values: Any, order: Any, costs: Any, sessions: int) -> tuple[int, float]:
    """The number of nodes with the highest rate, and the tokens that a step with them is expected to emit.

    Args:
        values: [n] path values.
        order: [k] the best of them, falling.
        costs: [k + 1] of a step with none, with one, ...
        sessions: tokens without any.
    """
    summed, best, emitted = 0.0, 0, float(sessions)
    highest = emitted / costs[0]
    for number in range(len(order)):
        summed += values[order[number]]
        tokens = sessions + summed
        if tokens / costs[number + 1] > highest:
            best, emitted, highest = number + 1, tokens, tokens / costs[number + 1]
    return best, emitted


@compiled
def whole_level_values(  # noqa: PLR0917
    values: Any, is_leaf: Any, starts: Any, widths: Any, most: Any, hit: float, price: float
) -> Any:
    """[S] what a level more is worth to each session, where nothing is there yet of what may come below leaves.

    Args:
        values: [n] path values of the candidates.
        is_leaf: [n] whether nothing hangs below it.
        starts: [S + 1] where each session's begin.
        widths: [S] nodes that the draft's next step expands.
        most: [S] nodes that may be sent.
        hit: chance that a node's children hold the truth.
        price: of a row, in tokens.
    """
    sums = np.zeros(len(most))
    for session in range(len(most)):
        first, end = starts[session], starts[session + 1]
        if first == end:
            if most[session] > 0:
                sums[session] = max(1.0 - price / hit, 0.0)
            continue
        displaced, rank = price, 0.0
        # A session that has all the nodes that it may send pays with the last of them, any other with the row.
        if end - first >= most[session]:
            displaced = max(values[end - 1], price)
        for node in range(first, end):
            if is_leaf[node]:
                share = min(max(widths[session] - rank, 0.0), 1.0)
                rank += 1
                sums[session] += share * max(values[node] - displaced / hit, 0.0)
    return sums


@compiled
def level_values(  # noqa: PLR0917
    leaf_values: Any,
    leaf_places: Any,
    shares: Any,
    values: Any,
    starts: Any,
    widths: Any,
    most: Any,
    hit: float,
    price: float,
) -> tuple[Any, Any]:
    """[S] what a level more is worth to each session, and [S] what it would displace.

    Args:
        leaf_values: [m] path values of leaves; each session's stand together, the best first.
        leaf_places: [m] the session of each.
        shares: [m] of what may come below each, what is not there yet.
        values: [n] path values of the candidates.
        starts: [S + 1] where each session's begin.
        widths: [S] nodes that the draft's next step expands.
        most: [S] nodes that may be sent.
        hit: chance that a node's children hold the truth.
        price: of a row, in tokens.
    """
    sessions = len(most)
    sums, displaced, ranks = np.zeros(sessions), np.full(sessions, price), np.zeros(sessions)
    for session in range(sessions):
        count = starts[session + 1] - starts[session]
        # A session that has all the nodes that it may send pays with the last of them, any other with the row.
        if count and count >= most[session]:
            displaced[session] = max(values[starts[session + 1] - 1], price)
        elif not count and most[session] > 0:
            sums[session] = max(1.0 - price / hit, 0.0)
    for leaf in range(len(leaf_values)):
        session = leaf_places[leaf]
        share = min(max(widths[session] - ranks[session], 0.0), 1.0) * shares[leaf]
        ranks[session] += 1
        sums[session] += share * max(leaf_values[leaf] - displaced[session] / hit, 0.0)
    return sums, displaced
