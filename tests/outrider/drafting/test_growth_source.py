import pytest

from outrider.drafting.growth_source import (
    ALL_SOURCES,
    WORDS,
    GrowthSource,
    source_of_word,
    sources_from_proto,
    sources_to_proto,
    to_proto,
)
from outrider.v1 import common_pb2


def test_words_and_numbers_are_the_protocols():
    assert WORDS == ("model", "ngram", "eagle")
    names = {f"GROWTH_SOURCE_{word.upper()}": to_proto(source_of_word(word)) for word in WORDS}
    assert names | {"GROWTH_SOURCE_UNSPECIFIED": 0} == dict(common_pb2.GrowthSource.items())
    with pytest.raises(ValueError, match="'modell' given, model or ngram or eagle needed"):
        source_of_word("modell")


def test_a_field_of_sources():
    assert sources_from_proto(sources_to_proto(ALL_SOURCES)) == ALL_SOURCES
    assert sources_to_proto([GrowthSource.EAGLE, GrowthSource.MODEL]) == [1, 3]
    assert sources_from_proto([]) == frozenset()
    assert sources_from_proto([], default=ALL_SOURCES) == ALL_SOURCES
    # A newer peer may know more; what it names is still a choice.
    assert sources_from_proto([2, 77], default=ALL_SOURCES) == {GrowthSource.NGRAM}
    assert sources_from_proto([77], default=ALL_SOURCES) == frozenset()
