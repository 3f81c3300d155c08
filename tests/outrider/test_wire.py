import numpy as np
import pytest

from outrider.sampling import SamplingSpec, VerificationRule
from outrider.wire import (
    entries_of,
    floats_from_bytes,
    floats_to_bytes,
    rows_of,
    split_by_counts,
    uints_from_bytes,
    uints_to_bytes,
)


def test_tokens_travel_as_little_endian_words():
    assert uints_to_bytes([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert uints_from_bytes(uints_to_bytes([7, 8, 9])).tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="multiple"):
        uints_from_bytes(b"abc")


def test_floats_travel_exactly():
    values = np.array([0.1, -np.inf, 3e-40], dtype=np.float32)
    assert floats_from_bytes(floats_to_bytes(values)).tobytes() == values.tobytes()


def test_columns_are_split_by_counts():
    assert [list(range(6))[part] for part in split_by_counts([2, 0, 3, 1])] == [[0, 1], [], [2, 3, 4], [5]]


def test_sampling_survives_the_wire():
    spec = SamplingSpec(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={3: -1.5},
        allowed_token_ids=(1, 2, 3),
        seed=2**64 - 1,
        choice_index=2,
        stop_token_ids=(0, 5),
        max_new_tokens=9,
        min_new_tokens=4,
        logprobs=0,
        verification=VerificationRule.TARGET_ONLY,
        threshold_single=0.5,
        threshold_acc=0.25,
        synthetic_rates=(0.5, 0.25),
        forced_token_ids=(7, 7, 0),
    )
    assert SamplingSpec.from_proto(spec.to_proto()) == spec
    assert SamplingSpec.from_proto(SamplingSpec().to_proto()) == SamplingSpec()
    assert spec.has_penalties
    assert not SamplingSpec().has_penalties


def test_a_rule_of_a_later_version_is_refused():
    state = SamplingSpec().to_proto()
    state.verification = 9  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="9 given"):
        SamplingSpec.from_proto(state)


def test_rows_of_columns_are_taken_with_their_entries():
    sessions, counts, entries = [7, 8, 9], [2, 0, 3], [1, 2, 3, 4, 5]
    assert rows_of(sessions, [0, 2]) == [7, 9]
    assert entries_of(entries, counts, [1, 2]) == [3, 4, 5]
    assert entries_of(entries, counts, [0]) == [1, 2]
    # Nothing is copied where nothing is left out.
    assert rows_of(sessions, range(3)) is sessions
    assert entries_of(entries, counts, range(3)) is entries
