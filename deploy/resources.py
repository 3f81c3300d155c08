"""Shares of GPUs, cores and custom resources per worker (without Ray)."""

import math

from outrider.deploy.config import Bind, DeployConfig


def asked_draft_gpus(config: DeployConfig) -> float | None:
    """GPUs per draft worker that the configuration settles: n-grams need none."""
    return 0.0 if config.draft_gpus is None and config.draft_source == "ngram" else config.draft_gpus


def most_drafts(config: DeployConfig) -> int:
    """Draft workers that there may be at a time: what GPUs and cores are shared out for."""
    return config.draft_workers if config.max_drafts is None else config.max_drafts


def asked_target_gpus(config: DeployConfig) -> float | None:
    """GPUs per target worker that the configuration settles; None where what the cluster has is shared."""
    if config.target_gpus is None and config.tensor_parallel_size > 1:
        return float(config.tensor_parallel_size)
    return config.target_gpus


def target_threads(config: DeployConfig, cores: int) -> int:
    """CPU threads of a target worker on a machine with so many cores.

    What was configured, else an even part of what the drafts leave; with roles on many machines, all cores but one.
    """
    if config.target_threads is not None:
        return config.target_threads
    if config.bind is Bind.NODE:
        return max(1, cores - 1)
    return max(1, (cores - most_drafts(config) * config.draft_threads) // config.targets)


def shared_gpus(available: float, workers: int) -> float:
    """GPUs per worker when `workers` of them share `available`: a whole one where it suffices, else an even part.

    A part is rounded down so that as many as needed fit on one GPU: 2 GPUs for 3 workers give half a GPU each.
    """
    if workers == 0 or available < 1:
        return 0.0
    return 1.0 / math.ceil(workers / int(available))


def worker_gpus(config: DeployConfig, available: float) -> tuple[float, float]:
    """GPUs per target and per draft worker: as configured, else `available` ones, shared evenly."""
    sharing, asked, asked_draft = 0, asked_target_gpus(config), asked_draft_gpus(config)
    for named, count in ((asked, config.targets), (asked_draft, most_drafts(config))):
        if named is None:
            sharing += count
        else:
            available -= named * count
    even = shared_gpus(max(available, 0.0), sharing)
    return even if asked is None else asked, even if asked_draft is None else asked_draft
