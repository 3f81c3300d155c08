"""What a run has shown, as figures; times in milliseconds.

tokens_per_s       tokens that clients got
acceptance_length  tokens a verification of one session, the target's own one included
tpot_ms            of each session, (time between its first and last delta) / (tokens after the first delta): mean, p50
                   and p99 over sessions
exposed_ms         between a step's end and the beginning of the next at the target: what a round costs beyond the
                   target's own step, the injected round trip to the target and deliberate waits for growth included
target_busy        share of the time in which a target is in a step, mean over targets
nodes_per_step     drafted nodes in a batch of all sessions
scheduling_ms      from the reading of a result to the writing of the next batch, in the coordinator
held_ms            what of that it chose to wait: for growth, or, where the batch goes ahead of the step that runs, for
                   its time to go. Until the batch was decided on, or was due: a timer that is late is not chosen
own_scheduling_ms  the rest: the coordinator's own delay, whatever it did or waited for without having chosen to
waited_ms          the time for which a free target was held for growth
scheduling_cpu_ms  what the coordinator's thread used of a core in all of scheduling_ms, growth that came meanwhile and
                   what clients were told in a wait included. Where nothing is held, the own delay is longer by what the
                   coordinator waited for a core, or for the threads of gRPC
coordinator_cpu    CPU seconds a second of the coordinator's process, its clients included
cpu_ms_per_round   the same a step of a target
worker_late_ms     how much longer the fake steps took than they should have: the simulator's own error
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from benchmarks.simulation.drive import Client, RunTraces
from benchmarks.simulation.fake_workers import StepTrace

Figures = dict[str, Any]


def figures_of(run: RunTraces) -> Figures:
    """All figures of one run, and its settings."""
    window_s = (run.ended_ns - run.began_ns) / 1e9
    targets = [_within(run, steps) for steps in run.targets]
    drafts = [_within(run, steps) for steps in run.drafts]
    steps = [step for steps in targets for step in steps]
    if not steps:
        raise ValueError(f"no step of a target in {window_s:g} s: a longer --duration is needed")
    tokens = sum(count for client in run.clients for at, count in client.deltas if run.began_ns <= at <= run.ended_ns)
    verifications = sum(step.sessions for step in steps)
    gaps = [after.began_ns - before.ended_ns for steps in targets for before, after in pairwise(steps)]
    busy_ns = sum(step.ended_ns - step.began_ns for step in steps)
    late = [step.ended_ns - step.began_ns - step.planned_ns for step in steps]
    late_drafts = [step.ended_ns - step.began_ns - step.planned_ns for steps in drafts for step in steps]
    return {
        "settings": asdict(run.settings),
        "seconds": window_s,
        "rounds": len(steps),
        "tokens_per_s": tokens / window_s,
        "acceptance_length": sum(step.tokens for step in steps) / verifications,
        "tpot_ms": _spread(_tpots_ns(run)),
        "exposed_ms": _spread(gaps),
        "target_step_ms": _spread(step.ended_ns - step.began_ns for step in steps),
        "target_busy": busy_ns / (run.ended_ns - run.began_ns) / len(targets),
        "nodes_per_step": sum(step.nodes for step in steps) / len(steps),
        "sessions_per_step": verifications / len(steps),
        **_scheduling(run),
        "coordinator_cpu": run.cpu_ns / (run.ended_ns - run.began_ns),
        "cpu_ms_per_round": run.cpu_ns / 1e6 / len(steps),
        "draft_steps": sum(map(len, drafts)),
        "dropped_nodes": run.dropped_nodes,
        "wrong_tokens": run.wrong_tokens,
        "worker_late_ms": {"target": _spread(late), "draft": _spread(late_drafts)},
    }


def _within(run: RunTraces, steps: Sequence[StepTrace]) -> list[StepTrace]:
    return [step for step in steps if run.began_ns <= step.began_ns and step.ended_ns <= run.ended_ns]


def _tpots_ns(run: RunTraces) -> list[float]:
    return [tpot for client in run.clients if (tpot := _tpot_ns(run, client)) is not None]


def _tpot_ns(run: RunTraces, client: Client) -> float | None:
    deltas = [delta for delta in client.deltas if run.began_ns <= delta[0] <= run.ended_ns]
    tokens = sum(count for _, count in deltas[1:])
    return (deltas[-1][0] - deltas[0][0]) / tokens if tokens else None


def _scheduling(run: RunTraces) -> Figures:
    held_of = {(client.session_id, step): held for client in run.clients for step, held in client.held_ns.items()}
    delays, own, held, used = [], [], [], []
    for departure in (departure for departures in run.departures for departure in departures):
        if not departure.result_ns or not run.began_ns <= departure.left_ns <= run.ended_ns:
            continue
        delays.append(departure.left_ns - departure.result_ns)
        used.append(departure.cpu_ns)
        held_ns = held_of.get((departure.first_session, departure.step))
        if held_ns is not None:
            held.append(held_ns)
            own.append(delays[-1] - held_ns)
    return {
        "scheduling_ms": _spread(delays),
        "held_ms": _spread(held),
        "own_scheduling_ms": _spread(own),
        "waited_ms": _spread(waited for client in run.clients for waited in client.waited_ns.values()),
        "scheduling_cpu_ms": _spread(used),
    }


def _spread(values_ns: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    values = [value / 1e6 for value in values_ns]
    if not values:
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": fmean(values), "p50": float(p50), "p99": float(p99)}
