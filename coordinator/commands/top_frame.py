"""One frame of `outrider top`, for 80 columns and more."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.coordinator.commands.top_sample import Figures, WorkerFigures, all_workers

_BAR = 8
_STATE_STYLES = {"serving": "green", "connecting": "yellow", "preparing": "yellow", "draining": "yellow"}
_NOTHING = "-"
_UNITS = "kMGT"


def frame_of(frame: Sequence[Figures], *, note: str = "") -> RenderableType:
    """Coordinators above, their workers below; brackets in what others name are no markup."""
    parts: list[RenderableType] = [_coordinators(frame), Text()]
    workers = all_workers(frame)
    if workers:
        parts.append(_workers(workers))
    elif any(each.answers for each in frame):
        parts.append(Text("no worker is registered", style="yellow"))
    if note:
        parts += [Text(), Text(note, style="dim")]
    return Group(*parts)


def _table(*columns: tuple[str, bool]) -> Table:
    """Columns that are shortened rather than wrapped; `True` stands to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, (name, to_right) in enumerate(columns):
        table.add_column(
            name,
            justify="right" if to_right else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=22 if number == 0 else None,
        )
    return table


def _coordinators(frame: Sequence[Figures]) -> Table:
    table = _table(
        ("coordinator", False), ("up", True), ("run", True), ("wait", True), ("tok/s", True), ("req/s", True),
        ("tok/step", True), ("accept", True), ("refused", True),
    )  # fmt: skip
    for each in frame:
        if not each.answers:
            table.add_row(Text(each.endpoint), Text("down", style="red"))
            continue
        table.add_row(
            Text(each.endpoint),
            Text(duration(each.uptime_s), style="yellow" if each.is_restarted else ""),
            short(each.running),
            Text(short(each.waiting), style="yellow" if each.waiting else ""),
            _number(each.tokens_per_s, 0),
            _number(each.requests_per_s, 1),
            _number(each.acceptance_length, 2),
            _NOTHING if each.accepted_share is None else f"{each.accepted_share:.0%}",
            Text(short(each.refused), style="red" if each.refused_per_s else ""),
        )
    return table


def _workers(workers: Sequence[WorkerFigures]) -> Table:
    table = _table(
        ("worker", False), ("role", False), ("state", False), ("sess", True), ("KV", True), ("steps/s", True),
        ("step ms", True), ("busy", False),
    )  # fmt: skip
    for worker in workers:
        style = _STATE_STYLES.get(worker.state, "red")
        table.add_row(
            Text(worker.worker_id),
            worker.role,
            Text(worker.state, style=style),
            short(worker.sessions),
            f"{worker.slots_used / worker.slots_total:.0%}" if worker.slots_total else _NOTHING,
            _number(worker.steps_per_s, 0),
            _number(worker.step_ms, 2),
            _bar(worker.busy),
        )
    return table


def _bar(share: float) -> Text:
    filled = round(min(1.0, max(0.0, share)) * _BAR)
    return Text.assemble(("█" * filled, "cyan"), ("░" * (_BAR - filled), "dim"), f" {share:.0%}")


def _number(value: float | None, places: int) -> str:
    return _NOTHING if value is None else short(value, places)


def short(value: float, places: int = 0) -> str:
    """A number in six characters at most: 0.25, 812, 9,999, 12.3k, 4.57M."""
    if value < 10_000:
        return f"{value:,.{places if value < 1000 else 0}f}"
    power = 1
    while value / 1000**power >= 999.5 and power < len(_UNITS):
        power += 1
    return f"{value / 1000**power:.3g}{_UNITS[power - 1]}"


def duration(seconds: float) -> str:
    """Format seconds in a few characters: 41s, 3m12s, 5h02m, 4d11h."""
    whole = int(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= large:
            return f"{whole // large}{unit}{whole % large // small:02d}{part}"
    return f"{whole}s"
