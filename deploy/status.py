"""A deployment's state as plain values, and as the tables that `outrider status` shows."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from outrider.deploy.coordinator_view import CoordinatorView
from outrider.deploy.health import RoleHandle
from outrider.security.roles import Role

SHOWN_DECISIONS = 5


def worker_status(handle: RoleHandle, view: CoordinatorView) -> dict[str, Any]:
    """One actor of a deployment, as `outrider status --json` has it; the keys stay.

    States: starting (loading, or being started anew), connecting (it listens, not every coordinator uses it yet),
    serving, draining, and whatever else a coordinator says of it (quarantined, lost).
    """
    report = handle.report
    address = None if report is None else report.address
    known = view.of(address)
    return {
        "name": handle.name,
        "role": str(handle.role),
        "node": None if report is None else report.node,
        "node_id": handle.node_id,
        "pid": None if report is None else report.pid,
        "address": address,
        "state": _state(handle, view),
        "reason": handle.failure,
        "model": known[0].introduction.model.name if known else None,
        "weights": (known[0].introduction.model.weights.version or None) if known else None,
        "sessions": view.sessions(handle),
        "busy": max((status.load.busy for status in known), default=0.0),
        "restarts": handle.restarts,
    }


def _state(handle: RoleHandle, view: CoordinatorView) -> str:
    if handle.is_draining:
        return "draining"
    if handle.report is None or handle.report.address is None:
        return "starting"
    if handle.role is Role.COORDINATOR:
        return "serving" if view.answers(handle.endpoint) else "connecting"
    address = handle.report.address
    if view.is_everywhere(address):
        return "serving"
    others = [status.state for status in view.of(address) if status.state != "serving"]
    return others[0] if others else "connecting"


def status_tables(status: Mapping[str, Any]) -> Iterable[Table]:
    """The tables that `outrider status` prints."""
    yield _summary(status)
    yield _workers(status["workers"])
    if late := [own for own in status["workers"] if own["reason"] is not None]:
        yield _reasons(late)
    if status["autoscaler"]["decisions"]:
        yield _decisions(status["autoscaler"]["decisions"][-SHOWN_DECISIONS:])


def _summary(status: Mapping[str, Any]) -> Table:
    table = Table(title=f"deployment {status['name']}", title_justify="left", show_header=False)
    scaler, coordinators = status["autoscaler"], status["coordinators"]
    drafts = f"{scaler['min_drafts']} to {scaler['max_drafts']} by demand" if scaler["enabled"] else "as asked for"
    running, waiting, tokens = (
        sum(own[key] for own in coordinators)
        for key in ("running_sessions", "waiting_requests", "emitted_tokens_total")
    )
    table.add_row("state", f"{status['state']}, up for {status['uptime_s']:.0f} s")
    table.add_row("coordinators", ",".join(status["endpoints"]))
    if status["shared_endpoints"]:
        table.add_row("together at", ",".join(status["shared_endpoints"]))
    table.add_row("wanted", ", ".join(f"{count} {role}" for role, count in status["wanted"].items()))
    table.add_row("drafts", drafts if scaler["latest"] is None else f"{drafts}: {scaler['latest']['reason']}")
    table.add_row("sessions", f"{running} running, {waiting} waiting")
    table.add_row("tokens", str(tokens))
    return table


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Within 80 columns where names are of usual length; `--json` has the rest."""
    machines = len({own["node"] for own in workers} - {None}) > 1
    names = ("worker", "state", *(("machine",) if machines else ()), "address", "model")
    # What commands are given has to be readable on a narrow terminal, too.
    columns = [Column(name, no_wrap=name in {"worker", "state"}, overflow="fold") for name in names]
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("sessions", "busy", "restarts")]
    table = Table(*columns, *numbers, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for own in workers:
        cells = (own["name"], own["state"], *((own["node"],) if machines else ()), own["address"], own["model"])
        table.add_row(
            *("" if cell is None else escape(str(cell)) for cell in cells),
            str(own["sessions"]),
            f"{own['busy']:.0%}",
            str(own["restarts"]),
        )
    return table


def _reasons(late: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="not serving, because", title_justify="left", show_header=False, box=None, pad_edge=False)
    for own in late:
        table.add_row(escape(own["name"]), escape(own["reason"]))
    return table


def _decisions(decisions: Iterable[Mapping[str, Any]]) -> Table:
    table = Table("at", "drafts", "because", title="scaled by itself", title_justify="left")
    for own in decisions:
        at = time.strftime("%H:%M:%S", time.localtime(own["at_s"]))
        table.add_row(at, f"{own['before']} to {own['drafts']}", own["reason"])
    return table
