"""Checks of a request's speculation and verification fields."""

from typing import Any

from outrider.coordinator.api.field_checks import FieldChecks, RequestLimits
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource
from outrider.sampling import SpeculationMode, VerificationRule, mode_from_proto, rule_from_proto
from outrider.v1 import generation_pb2

MAX_SYNTHETIC_RATES = 64
# Defaults in sync mode, where every round waits for a whole tree: it is as large each time.
_SYNC_NODES, _SYNC_DEPTH = 24, 8
_SOURCES = "speculation.sources"
_KNOWN_SOURCES = " or ".join(f"{source.value} ({source.word})" for source in GrowthSource)


def speculation(
    fields: FieldChecks, given: generation_pb2.SpeculationParams, limits: RequestLimits
) -> tuple[SpeculationMode, int, int]:
    """Return a request's speculation mode, node limit and depth limit."""
    mode = SpeculationMode.ASYNC
    try:
        mode = mode_from_proto(given.mode)
    except ValueError as error:
        fields.wrong("speculation.mode", str(error))
    values = []
    for name, in_sync in (("max_nodes", _SYNC_NODES), ("max_depth", _SYNC_DEPTH)):
        most = getattr(limits, name)
        default = min(in_sync, most) if mode is SpeculationMode.SYNC else most
        # The generated stub lists the names.
        value = getattr(given, name) if given.HasField(name) else default  # pyright: ignore[reportArgumentType]
        if not 1 <= value <= most:
            fields.wrong(f"speculation.{name}", f"{value} given, 1 to {most} needed (mode 3, off, needs none)")
        values.append(value)
    return mode, values[0], values[1]


def verification(
    fields: FieldChecks, given: generation_pb2.SpeculationParams, *, allow_synthetic: bool
) -> dict[str, Any]:
    """The rule and its thresholds, as fields of a SamplingSpec."""
    rule = VerificationRule.COUPLED
    try:
        rule = rule_from_proto(given.verification)
    except ValueError as error:
        fields.wrong("speculation.verification", str(error))
    chosen: dict[str, Any] = {"verification": rule}
    for name in ("threshold_single", "threshold_acc"):
        if not given.HasField(name):  # pyright: ignore[reportArgumentType] the generated stub lists the names
            continue
        value = chosen[name] = getattr(given, name)
        if rule is not VerificationRule.TARGET_ONLY:
            fields.wrong(f"speculation.{name}", f"only verification 2 (target_only) has it, not {rule}: leave it out")
        elif not 0 < value <= 1:
            fields.wrong(f"speculation.{name}", f"{value:g} given, more than 0 and at most 1 needed (1 is off)")
    return chosen | _synthetic(fields, given, rule, allow_synthetic)


def _synthetic(
    fields: FieldChecks, given: generation_pb2.SpeculationParams, rule: VerificationRule, allow_synthetic: bool
) -> dict[str, Any]:
    field, rates = "speculation.synthetic_rates", given.synthetic_rates
    if rule is not VerificationRule.SYNTHETIC:
        if rates:
            fields.wrong(field, f"only verification 4 (synthetic) has them, not {rule}: leave them out")
        return {}
    if not allow_synthetic:
        fields.wrong(
            "speculation.verification",
            "4 (synthetic) is for benchmarks, its output means nothing: start the coordinator with "
            "--allow-synthetic, or choose another",
        )
    if not 1 <= len(rates) <= MAX_SYNTHETIC_RATES:
        fields.wrong(field, f"{len(rates)} given, 1 to {MAX_SYNTHETIC_RATES} needed")
        return {}
    wrong = [
        (f"{field}[{place}]", f"{rate:g} given, 0 to 1 needed")
        for place, rate in enumerate(rates)
        if not 0 <= rate <= 1
    ]
    fields.wrong_entries(field, wrong, "wrong rates")
    return {"synthetic_rates": tuple(rates)}


def asked_sources(fields: FieldChecks, given: generation_pb2.SpeculationParams) -> frozenset[GrowthSource]:
    """The sources, all of them where none is named; a source that no worker has is no fault: it grows nothing."""
    asked, most, wrong = given.sources, len(GrowthSource), list[tuple[str, str]]()
    if len(asked) > most:
        fields.wrong(_SOURCES, f"{len(asked)} given, at most {most} needed: each source once")
        return ALL_SOURCES
    for place, number in enumerate(asked):
        if number not in set(GrowthSource):
            wrong.append((f"{_SOURCES}[{place}]", f"{number} given, {_KNOWN_SOURCES} needed"))
        elif number in asked[:place]:
            wrong.append((f"{_SOURCES}[{place}]", f"{GrowthSource(number).word} given twice: name it once"))
    fields.wrong_entries(_SOURCES, wrong, "wrong sources")
    return ALL_SOURCES if wrong or not asked else frozenset(map(GrowthSource, asked))
