"""Options of `outrider loadtest`."""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from outrider.config_checks import check_at_least_one, check_not_negative, check_positive
from outrider.coordinator.loadtest.arrivals import Arrivals
from outrider.drafting.growth_source import WORDS

Mode = Literal["async", "sync", "off"]
Dataset = Literal["python", "random", "shared-prefix", "multi-turn", "jsonl", "sharegpt", "trace"]
DEFAULT_PROMPTS, DEFAULT_OUTPUT = 100, 128
_NEED_PATH = ("jsonl", "sharegpt", "trace")
_MODES = ("async", "sync", "off")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a load test.

    Attributes:
        schedule: what arrivals follow instead of a rate: a trace's times or a ramp.
    """

    request_rate: float
    max_concurrency: int | None
    speculation: Mode
    schedule: Literal["trace", "linear", "exponential"] | None = None

    @property
    def label(self) -> str:
        """Name in tables."""
        cap = "" if self.max_concurrency is None else f", at most {self.max_concurrency} at a time"
        if self.schedule is not None:
            rate = "at the trace's times" if self.schedule == "trace" else f"{self.schedule} ramp"
        else:
            rate = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g}/s"
        return f"{self.speculation}, {rate}{cap}"


@dataclass(frozen=True, kw_only=True)
class LoadtestConfig:
    """One load test.

    Attributes:
        endpoint: HOST:PORT of the service, or several with commas between them: requests take them in turn.
        protocol: grpc is the service's own, openai its HTTP door's /v1/completions (or any other server's).
        local: start a service of its own with the embedded pair, and end it afterwards.
        drafts: draft workers of --local.
        model: that openai requests name; default the first that /v1/models has.
        dataset_name: python are the embedded pair's held-out prompts, multi-turn conversations of them; random and
            shared-prefix make up token ids; jsonl, sharegpt and trace read --dataset-path.
        dataset_path: file of the data set.
        num_prompts: requests (of multi-turn: conversations); default 100, of a trace all, with --duration no bound.
        duration: no request (of multi-turn: no conversation) is begun after so many seconds.
        request_rate: arrivals a second; inf sends everything at once, with --max-concurrency whenever a place is free.
            Several with commas between them are one run each, as are several of --max-concurrency and --speculation:
            every combination.
        arrivals: what passes between two: gamma (see --burstiness), or always the same.
        burstiness: 1 is a Poisson process, less comes in bursts, more is steadier.
        ramp_up_strategy: how the rate grows; goes before --request-rate.
        ramp_up_start_rps: arrivals a second at first.
        ramp_up_end_rps: and at last.
        max_concurrency: most requests under way; others wait here, which their latency counts.
        num_warmups: requests before it begins, which are not counted.
        output_len: most tokens of output where the data set does not say, default 128; of sharegpt instead of the
            answers' lengths.
        random_input_len: mean tokens of a prompt that is made up.
        random_output_len: mean tokens of its output.
        random_range_ratio: lengths lie within this share of their mean.
        random_prefix_len: tokens that shared-prefix prompts begin with, beside random_input_len.
        num_prefixes: how many such beginnings there are.
        turns: requests of a multi-turn conversation.
        think_time: seconds between an answer and the next turn.
        trace_speed: replays a trace so many times as fast.
        vocab_size: made-up token ids are below it; default the served model's, with openai the embedded pair's.
        tokenizer: folder with tokenizer.json, to count sharegpt's tokens; default the embedded pair's.
        temperature: 0 is greedy.
        ignore_eos: go on after end-of-sequence, so that outputs are as long as asked for.
        speculation: how drafts are used: async, sync or off; servers other than this project's ignore it.
        sources: what may draft: model, ngram, eagle, with commas between them; default all that there are.
        seed: of arrivals, prompts and sampling: the same seed sends the same.
        timeout: seconds after which a request has failed.
        goodput: service level objectives in ms, such as "ttft:500 tpot:50 e2el:2000"; may be repeated.
        client_processes: that send; one event loop is not enough for thousands of streams.
        connections: gRPC connections a process; default one for 128 requests under way.
        traced_requests: so many have every verification reported (grpc), which shows where a round's time goes.
        output_json: file for the figures, named as vLLM's `bench serve` names them.
        save_detailed: put every request's figures into it, too.
        html: file for a report that needs nothing beside it; its pictures need the extra plots.

    Raises:
        ValueError: a value out of range, with the value.
    """

    endpoint: str = field(default="127.0.0.1:50051", metadata={"envvar": "OUTRIDER_ENDPOINT"})
    protocol: Literal["grpc", "openai"] = "grpc"
    local: bool = False
    drafts: int = 1
    model: str | None = None
    dataset_name: Dataset = "python"
    dataset_path: Path | None = None
    num_prompts: int | None = None
    duration: float | None = None
    request_rate: str = "inf"
    arrivals: Literal["gamma", "fixed"] = "gamma"
    burstiness: float = 1.0
    ramp_up_strategy: Literal["none", "linear", "exponential"] = "none"
    ramp_up_start_rps: float = 1.0
    ramp_up_end_rps: float = 10.0
    max_concurrency: str | None = None
    num_warmups: int = 4
    output_len: int | None = None
    random_input_len: int = 256
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 256
    num_prefixes: int = 8
    turns: int = 3
    think_time: float = 0.0
    trace_speed: float = 1.0
    vocab_size: int | None = None
    tokenizer: Path | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    speculation: str = "async"
    sources: str | None = None
    seed: int = 0
    timeout: float = 600.0
    goodput: tuple[str, ...] = ()
    client_processes: int = 1
    connections: int | None = None
    traced_requests: int = 16
    output_json: Path | None = None
    save_detailed: bool = False
    html: Path | None = None

    def __post_init__(self) -> None:
        check_at_least_one(self, *_AT_LEAST_ONE)
        check_not_negative(self, *_NOT_NEGATIVE)
        check_positive(self, "duration", "timeout", "trace_speed")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio: {self.random_range_ratio} given, 0 to less than 1 needed")
        if self.dataset_name in _NEED_PATH and self.dataset_path is None:
            raise ValueError(f"dataset_path: none given, --dataset-name {self.dataset_name} needs one")
        points = self.points()
        has_times = self.dataset_name == "trace" or self.ramp_up_strategy != "none"
        if self.duration is not None and self.num_prompts is None and not has_times:
            for point in points:
                if math.isinf(point.request_rate) and point.max_concurrency is None:
                    raise ValueError(
                        f"duration: {self.duration:g} given, which needs a rate, --max-concurrency or --num-prompts"
                    )
        if wrong := [word for word in self.source_words if word not in WORDS]:
            raise ValueError(f"sources: {wrong[0]!r} given, {', '.join(WORDS)} needed, with commas between several")
        # What is wrong with them is told before anything is started.
        self.arrivals_of(points[0])

    def points(self) -> list[Point]:
        """The runs: all combinations of rates, caps and modes, rates changing quickest."""
        rates = _listed("request_rate", self.request_rate, float)
        caps = [None] if self.max_concurrency is None else _listed("max_concurrency", self.max_concurrency, int)
        modes = self.speculation.split(",")
        for mode in modes:
            if mode not in _MODES:
                raise ValueError(f"speculation: {mode!r} given, one of {', '.join(_MODES)} needed")
        ramp = None if self.ramp_up_strategy == "none" else self.ramp_up_strategy
        schedule = "trace" if self.dataset_name == "trace" else ramp
        return [
            Point(request_rate=rate, max_concurrency=cap, speculation=cast("Mode", mode), schedule=schedule)
            for mode, cap, rate in itertools.product(modes, caps, rates)
        ]

    @property
    def source_words(self) -> tuple[str, ...]:
        """`sources`, each once; none are all."""
        return () if self.sources is None else tuple(dict.fromkeys(self.sources.split(",")))

    @property
    def max_new_tokens(self) -> int:
        """`output_len` with its default filled in."""
        return self.output_len or DEFAULT_OUTPUT

    def arrivals_of(self, point: Point) -> Arrivals:
        """Return the arrival process of a run; a trace has its own times."""
        count = self.num_prompts
        if count is None and self.duration is None:
            count = DEFAULT_PROMPTS
        return Arrivals(
            rate=point.request_rate,
            shape=self.arrivals,
            burstiness=self.burstiness,
            ramp=self.ramp_up_strategy,
            ramp_start=self.ramp_up_start_rps,
            ramp_end=self.ramp_up_end_rps,
            count=count,
            duration_s=self.duration,
            seed=self.seed,
        )


def _listed(name: str, text: str, kind: type) -> list:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if not all(value > 0 for value in values):
        raise ValueError(f"{name}: {text!r} given, numbers above 0 with commas between them needed")
    return values


_AT_LEAST_ONE = (
    "num_prompts",
    "output_len",
    "random_input_len",
    "random_output_len",
    "num_prefixes",
    "turns",
    "vocab_size",
    "client_processes",
    "connections",
)
_NOT_NEGATIVE = (
    "drafts",
    "num_warmups",
    "random_prefix_len",
    "think_time",
    "temperature",
    "seed",
    "traced_requests",
)
