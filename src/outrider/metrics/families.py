"""From counters to what Prometheus reads: families of samples, made when somebody asks.

    describe(families) -> a role's current values, family by family -> registry -> text

Names are vLLM's where it has the same thing, with `outrider_` in the place of `vllm:`, so that a dashboard of one needs
little to show the other (https://docs.vllm.ai/en/stable/usage/metrics/).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.metrics.histogram import Histogram

PREFIX = "outrider_"


class Families:
    """Takes values in; those of one name belong together, whatever their labels."""

    def __init__(self) -> None:
        self._found: dict[str, Metric] = {}

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """Add a counter; `_total` is appended to its name."""
        self._add(CounterMetricFamily, name, text, labels).add_metric(list(labels.values()), value)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """Add a gauge."""
        self._add(GaugeMetricFamily, name, text, labels).add_metric(list(labels.values()), value)

    def histogram(self, name: str, text: str, values: Histogram, **labels: str) -> None:
        """Add a histogram."""
        buckets, total = values.cumulated()
        self._add(HistogramMetricFamily, name, text, labels).add_metric(list(labels.values()), buckets, total)

    def by_label(self, kind: str, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        """A counter or a gauge for each value of one label; the family is there even when there is none yet."""
        family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        found = self._add(family, name, text, {label: ""})
        for key, value in values.items():
            found.add_metric([key], value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._found.values())

    def _add(self, family: Callable[..., Metric], name: str, text: str, labels: Mapping[str, str]) -> Any:
        full = PREFIX + name
        if full not in self._found:
            self._found[full] = family(full, text, labels=list(labels))
        return self._found[full]


Describe = Callable[[Families], None]


class RoleCollector(Collector):
    """A role's values, read when they are asked for."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe

    def collect(self) -> Iterator[Metric]:
        """The families now."""
        families = Families()
        self._describe(families)
        return iter(families)


def registry_of(describe: Describe) -> CollectorRegistry:
    """A registry of one role; it describes itself only when it is read, so it may be made before anything runs."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RoleCollector(describe))
    # Memory, files and CPU time of the process, under the names that Prometheus has for them.
    ProcessCollector(registry=registry)
    return registry
