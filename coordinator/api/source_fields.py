"""Which sources of growth a request asks for: from the message to a set, with what is wrong about it."""

from outrider.errors import FieldViolation
from outrider.growth_source import ALL_SOURCES, GrowthSource
from outrider.v1 import generation_pb2

_FIELD = "speculation.sources"
_NEEDED = " or ".join(f"{source.value} ({source.word})" for source in GrowthSource)


def asked_sources(given: generation_pb2.SpeculationParams) -> tuple[frozenset[GrowthSource], list[FieldViolation]]:
    """The sources, all of them where none is named; a source that no worker has is no fault: it grows nothing."""
    asked, most = given.sources, len(GrowthSource)
    if not asked:
        return ALL_SOURCES, []
    if len(asked) > most:
        return ALL_SOURCES, [FieldViolation(_FIELD, f"{len(asked)} given, at most {most} needed: each source once")]
    wrong = []
    for place, number in enumerate(asked):
        if number not in set(GrowthSource):
            wrong.append(FieldViolation(f"{_FIELD}[{place}]", f"{number} given, {_NEEDED} needed"))
        elif number in asked[:place]:
            wrong.append(FieldViolation(f"{_FIELD}[{place}]", f"{GrowthSource(number).word} given twice: name it once"))
    return ALL_SOURCES if wrong else frozenset(map(GrowthSource, asked)), wrong
