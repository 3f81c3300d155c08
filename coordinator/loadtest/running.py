"""The runs of a load test, one after the other: what is asked, what came of it, in figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outrider import __version__
from outrider.client import AsyncClient
from outrider.coordinator.loadtest import metrics
from outrider.coordinator.loadtest.client_process import Access, Watch, drive
from outrider.coordinator.loadtest.driving import Driven, Job, split
from outrider.coordinator.loadtest.lag import client_figures
from outrider.coordinator.loadtest.options import DEFAULT_PROMPTS, LoadtestConfig, Point
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.workload_files import read_jsonl, read_sharegpt, read_trace
from outrider.coordinator.loadtest.workloads import FromFile, PythonPrompts, RandomLengths, Workload
from outrider.models import embedded_target_path


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its figures, what they were made of, and whether it was ended before its time."""

    point: Point
    figures: dict[str, Any]
    records: Sequence[RequestRecord]
    is_interrupted: bool = False


async def run_all(
    config: LoadtestConfig,
    access: Access,
    *,
    begin: Callable[[Point, int | None], Watch],
    on_run: Callable[[Sequence[Run]], None] = lambda runs: None,
) -> list[Run]:
    """All runs of a load test.

    Args:
        begin: called before each run with its point and its number of requests (None where nobody knows it); gives
            what shows its progress.
        on_run: called after each run with all that there are by then: a later one may fail.

    Raises:
        LoadtestFailed: the service is not there.
        InvalidRequest: a data set cannot be read.
    """
    workload = await load_workload(config, access)
    runs: list[Run] = []
    for point in config.points():
        watch = begin(point, total_requests(config, workload))
        runs.append(await run_point(config, point, workload, access, watch=watch))
        on_run(runs)
        if runs[-1].is_interrupted:
            break
    return runs


async def run_point(config: LoadtestConfig, point: Point, workload: Workload, access: Access, *, watch: Watch) -> Run:
    """One run."""
    job = Job(config=config, point=point, workload=workload, traced=traced_numbers(config, workload))
    date = datetime.now(UTC)
    warmups = config.num_warmups
    driven = await drive(split(job, config.client_processes), access, warmups=warmups, watch=watch)
    is_interrupted = any(each.is_interrupted for each in driven)
    figures = figures_of(job, driven, date) | ({"interrupted": True} if is_interrupted else {})
    return Run(point=point, figures=figures, records=_records(driven), is_interrupted=is_interrupted)


def _records(driven: Sequence[Driven]) -> list[RequestRecord]:
    records = [record for each in driven for record in each.records]
    return sorted(records, key=lambda record: (record.index, record.turn))


def figures_of(job: Job, driven: Sequence[Driven], date: datetime) -> dict[str, Any]:
    """All figures of a run that began at that date, of what its processes have noted."""
    config, point, records = job.config, job.point, _records(driven)
    duration_s = max((record.left_s for record in records), default=0.0)
    head = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.protocol,
        "backend": f"outrider {__version__}",
        "label": point.label,
        "num_prompts": len(records),
        "request_rate": point.schedule or point.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": point.max_concurrency,
        "speculation": point.speculation,
        "temperature": config.temperature,
        "seed": config.seed,
        "dataset_name": config.dataset_name,
        "latency_from": "sending" if job.is_closed_loop else "intended arrival",
    }
    slos = metrics.parse_slos(config.goodput)
    figures = metrics.summarise(records, slos=slos, duration_s=duration_s)
    client = client_figures(
        [each.load for each in driven], [record.start_lag_s for record in records], figures["median_ttft_ms"]
    )
    return head | ({"goodput_slos_ms": slos} if slos else {}) | figures | client


def total_requests(config: LoadtestConfig, workload: Workload) -> int | None:
    """Return the request count of a run; None if it is not known beforehand."""
    if config.duration is not None:
        return None
    if isinstance(workload, FromFile) and workload.arrivals_s is not None:
        count = min(len(workload.arrivals_s), config.num_prompts or len(workload.arrivals_s))
    else:
        count = config.num_prompts or DEFAULT_PROMPTS
    if isinstance(workload, FromFile):
        return sum(len(workload.conversation(number).turns) for number in range(count))
    return count * workload.turns_each


def traced_numbers(config: LoadtestConfig, workload: Workload) -> frozenset[int]:
    """Return the numbers of traced conversations, evenly spread; the first ones if the count is unknown."""
    if config.protocol != "grpc" or not config.traced_requests:
        return frozenset()
    total = total_requests(config, workload)
    if total is None:
        return frozenset(range(config.traced_requests))
    step = max(1, total // workload.turns_each // config.traced_requests)
    return frozenset(range(0, step * config.traced_requests, step))


async def load_workload(config: LoadtestConfig, access: Access) -> Workload:
    """Load the workload that the options name.

    Raises:
        InvalidRequest: the file of a data set cannot be used.
        OutriderError: the service, asked for its vocabulary, says no.
    """
    path, seed, name = config.dataset_path, config.seed, config.dataset_name
    if name in {"python", "multi-turn"}:
        return PythonPrompts(
            max_new_tokens=config.max_new_tokens, seed=seed, turns_each=config.turns if name == "multi-turn" else 1
        )
    if name in {"random", "shared-prefix"}:
        return RandomLengths(
            input_len=config.random_input_len,
            output_len=config.random_output_len,
            range_ratio=config.random_range_ratio,
            vocab_size=await _vocab_size(config, access),
            prefix_len=config.random_prefix_len if name == "shared-prefix" else 0,
            prefixes=config.num_prefixes,
            seed=seed,
        )
    assert path is not None
    if name == "jsonl":
        return read_jsonl(path, max_new_tokens=config.max_new_tokens, seed=seed)
    if name == "sharegpt":
        from outrider.coordinator.sessions.tokenizer import TextTokenizer

        tokenizer = TextTokenizer.load(config.tokenizer or embedded_target_path())
        return read_sharegpt(
            path, count_tokens=lambda text: len(tokenizer.encode(text)), output_len=config.output_len, seed=seed
        )
    return read_trace(
        path,
        max_new_tokens=config.max_new_tokens,
        vocab_size=await _vocab_size(config, access),
        speed=config.trace_speed,
        seed=seed,
    )


async def _vocab_size(config: LoadtestConfig, access: Access) -> int:
    if config.vocab_size is not None:
        return config.vocab_size
    if config.protocol == "openai":
        from outrider.coordinator.sessions.tokenizer import TextTokenizer

        return TextTokenizer.load(config.tokenizer or embedded_target_path()).vocab_size
    async with AsyncClient(config.endpoint, tls=access.tls, token=access.token) as client:
        return (await client.model_info()).model.vocab_size
