"""Python's garbage collector at work between rounds, not in the middle of them (torch-free).

It stops everything while it looks through young objects (some 0.1 ms), and at times through older ones (milliseconds).
By itself it does so after so many objects were made, which is when there is most to do: a result is applied, growth
comes, a step is committed. In a process that serves its threshold is high, and a target calls `between_rounds` when a
step has begun and the one before is answered.
"""

import gc

# In place of Python's 700: what rounds leave is collected by `between_rounds` long before.
_BY_ITSELF_AFTER = 50_000
# Of each generation: objects made, collections of the one below.
_COLLECTED_AFTER = (1_000, 10, 50)


def begin_serving() -> None:
    """Freeze existing objects, and from now on collect between rounds only."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_BY_ITSELF_AFTER, *gc.get_threshold()[1:])


def between_rounds() -> None:
    """Now is a good time. Nothing is done in a process that does not serve, or where there is little to collect."""
    if gc.get_threshold()[0] != _BY_ITSELF_AFTER:
        return
    counts = gc.get_count()
    if counts[0] < _COLLECTED_AFTER[0]:
        return
    due = [generation for generation, after in enumerate(_COLLECTED_AFTER) if counts[generation] >= after]
    gc.collect(max(due))
