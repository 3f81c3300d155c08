"""Lists one behind the other are the lists that they were made of."""

import numpy as np
import pytest

from outrider.coordinator.parts import Parts


@pytest.mark.parametrize("lists", [[], [[]], [[1, 2], [], [3]], [[], [4], []]])
def test_cut_apart_they_are_what_they_were(lists):
    whole = Parts.of(lists)
    assert (list(whole), len(whole), whole.counts.tolist()) == (lists, len(lists), [len(own) for own in lists])
    assert whole.array.tolist() == whole.values == [value for own in lists for value in own]
    again = Parts(whole.values, whole.counts)
    assert again.lists == lists
    assert [again[place] for place in range(len(lists))] == lists
    assert again[1:] == lists[1:]
    assert Parts.of(again) is again
    assert whole.array.dtype == np.int64
