"""Usage and speculation metrics of one request, in the shapes of OpenAI and vLLM.

vLLM documents `metrics.speculative_decoding` for chains of draft tokens. Here they are trees: a step's draft tokens are
all nodes that were verified, its accepted ones a path, and `num_spec_tokens` is the deepest that a path may be.
"""

from collections import Counter
from typing import Any

from outrider.coordinator.sessions.messages import GenerationRequest, GenerationResult
from outrider.v1 import generation_pb2


class RequestMetrics:
    """Counts one response."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._requests: list[GenerationRequest] = []
        self._results: list[GenerationResult] = []
        self._accepted: list[int] = []
        self._drafted: list[int] = []
        self.completion_tokens = 0

    def begin(self, request: GenerationRequest) -> None:
        """Note the start of a prompt's generation."""
        self._requests.append(request)

    def note_round(self, record: generation_pb2.Round) -> None:
        """A verification; one without draft tokens is none of speculative decoding."""
        if record.selected:
            self._accepted.append(record.accepted)
            self._drafted.append(record.selected)

    def note_result(self, result: GenerationResult) -> None:
        """Note the end of a prompt's generation."""
        self._results.append(result)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far; a prompt counts once for all its choices."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in self._results)},
        }

    def metrics(self) -> dict[str, Any]:
        """{"metrics": ...} where it was asked for; null where there is more than one stream of tokens."""
        if self._level == "none":
            return {}
        if len(self._requests) != 1 or self._requests[0].n != 1 or not self._results:
            return {"metrics": None}
        request, result = self._requests[0], self._results[0]
        generation_s, tokens = result.total_s - result.ttft_s, self.completion_tokens
        timings = {
            "time_to_first_token_ms": 1e3 * (result.ttft_s - result.queue_s),
            "generation_time_ms": 1e3 * generation_s,
            "queue_time_ms": 1e3 * result.queue_s,
            "mean_itl_ms": 1e3 * generation_s / (tokens - 1) if tokens > 1 else None,
            "tokens_per_second": tokens / generation_s if generation_s > 0 else None,
        }
        return {"metrics": timings | {"speculative_decoding": self._speculative_decoding(request.max_depth)}}

    def _speculative_decoding(self, max_depth: int) -> dict[str, Any]:
        steps, accepted, drafted = len(self._accepted), sum(self._accepted), sum(self._drafted)
        counts = Counter(self._accepted)
        # How many steps accepted just so many.
        histogram = [counts[depth] for depth in range(max(max_depth, *self._accepted, 0) + 1)]
        summary: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            # Readers hold the one against the other.
            "num_spec_tokens": len(histogram) - 1,
        }
        if self._level == "detailed":
            summary |= {"per_step_accepted": self._accepted, "per_step_drafted": self._drafted}
        return summary
