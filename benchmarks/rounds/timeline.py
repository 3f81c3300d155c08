"""Twenty rounds drawn: stages on the device, the host's, growth that is written, and the round that selects it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rounds.driving import BenchSession, Recorder, Round, Written

from outrider.kernels.verification.report import RoundTime

_ROUNDS = 20
LEAD_NS = 200_000
"""Growth that is written so long before a round begins is to be selected in it."""

# Of the device, with the moments between which they lie.
_DEVICE_LANES = {
    "graft .. pack": (RoundTime.BEGAN, RoundTime.PACKED),
    "forward": (RoundTime.PACKED, RoundTime.FORWARDED),
    "choose, walk": (RoundTime.FORWARDED, RoundTime.WALKED),
    "re-root, report": (RoundTime.WALKED, RoundTime.ENDED),
}
_HOST_STAGES = {"read": "#4c78a8", "plan": "#f58518", "launch": "#54a24b"}
_GREY, _BLACK, _RED = "#9aa5b1", "#222222", "#e45756"


class Selected(NamedTuple):
    """Outcome of a message of growth.

    Attributes:
        written: the message.
        due: index of the first round that begins `LEAD_NS` or more behind it; None where none of its nodes could be
            accepted in that round, or a round that began less behind it has accepted one.
        round: index of the first round that has accepted a node of it; None if none has.
    """

    written: Written
    due: int | None
    round: int | None


def follow(
    recorder: Recorder, sessions: Sequence[BenchSession], *, generation: int, offset_ns: int
) -> tuple[list[Round], list[Selected]]:
    """Return a generation's rounds, and what became of the growth written in it.

    A node is known to have been selected where it was accepted: its message is told by its kind.

    Args:
        recorder: that has kept commits and growth of this generation alone.
        sessions: of it, with what they have put out.
        generation: its number.
        offset_ns: what the device's clock is ahead of the host's.
    """
    rounds = [round_ for round_ in recorder.rounds if round_.generation == generation]
    began = [round_.times_ns[RoundTime.BEGAN] - offset_ns for round_ in rounds]
    # By session: index of each of its rounds, its length before it, and the kinds of the accepted nodes.
    steps = defaultdict[int, list[tuple[int, int, Sequence[int]]]](list)
    lengths = {session.number: len(session.prompt) for session in sessions}
    for index, round_ in enumerate(rounds):
        for commit in round_.commits:
            steps[commit.number].append((index, lengths[commit.number], commit.kinds))
            lengths[commit.number] += len(commit.tokens)
    texts = {session.number: [*session.prompt, *session.output] for session in sessions}
    # By session and node: the position of its token if the output has the node's path.
    places = defaultdict[int, dict[int, int]](dict)
    found = list[Selected]()
    for written in recorder.written:
        number = written.grown.number
        right = _right_places(written, texts[number], places[number])
        due = accepted = None
        for index, before, kinds in steps[number]:
            ahead = [place - before for place in right if place >= before]
            if began[index] < written.at_ns - LEAD_NS or not ahead:
                continue
            if due is None and began[index] >= written.at_ns + LEAD_NS:
                due = index
            if any(place < len(kinds) and kinds[place] >> written.kind & 1 for place in ahead):
                accepted = index
                break
        found.append(Selected(written, due, accepted))
    return rounds, found


def _right_places(written: Written, text: Sequence[int], places: dict[int, int]) -> list[int]:
    """Positions of the message's nodes whose paths the output has; `places` has those of earlier messages too."""
    grown, right = written.grown, list[int]()
    for node, parent, token in zip(grown.node_ids, grown.parents, grown.tokens, strict=True):
        place = grown.as_of if parent == 0 else places.get(parent, len(text)) + 1
        if place < len(text) and text[place] == token:
            places[node] = place
            right.append(place)
    return right


def check(found: Sequence[Selected]) -> tuple[int, int]:
    """Return how many messages were selected in the round in which they were due, and how many were due in one."""
    due = [selected for selected in found if selected.due is not None]
    return sum(selected.round == selected.due for selected in due), len(due)


def data_of(
    recorder: Recorder, rounds: Sequence[Round], found: Sequence[Selected], *, offset_ns: int, title: str
) -> dict[str, Any]:
    """Return what `draw` draws: the last rounds but a few of those that count."""
    indices = [index for index, round_ in enumerate(rounds) if round_.measured][-_ROUNDS - 2 :][:_ROUNDS]
    if not indices:
        return {"title": title, "rounds": [], "host": [], "inbox": []}
    shown = {index: place for place, index in enumerate(range(indices[0], indices[-1] + 1))}
    first = rounds[indices[0]].times_ns[RoundTime.BEGAN] - offset_ns
    last = rounds[indices[-1]].times_ns[RoundTime.ENDED] - offset_ns
    host = [
        (span.stage, _ms(span.begin_ns - first), _ms(span.end_ns - first))
        for span in recorder.spans
        if first <= span.end_ns and span.begin_ns <= last
    ]
    inbox = [
        (_ms(selected.written.at_ns - first), shown.get(selected.round) if selected.round is not None else None)
        for selected in found
        if first <= selected.written.at_ns <= last
    ]
    return {
        "title": title,
        "rounds": [[_ms(time - offset_ns - first) for time in rounds[index].times_ns] for index in shown],
        "host": host,
        "inbox": inbox,
    }


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 4)


def draw(data: Mapping[str, Any], file: Path) -> None:
    """Write the picture as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # pyright: ignore[reportMissingImports] an extra

    mpl.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports] as above

    lanes = [*_DEVICE_LANES, "host", "inbox"]
    heights = {lane: len(lanes) - place for place, lane in enumerate(lanes)}
    figure, axis = pyplot.subplots(figsize=(20, 4.5))
    for number, times in enumerate(data["rounds"]):
        for lane, (begin, end) in _DEVICE_LANES.items():
            color = _BLACK if lane == "forward" else _GREY
            axis.broken_barh(
                [(times[begin], times[end] - times[begin])], (heights[lane] - 0.35, 0.7), color=color, lw=0.2
            )
        axis.axvline(times[RoundTime.BEGAN], color=_GREY, linewidth=0.4, zorder=0)
        axis.text(times[RoundTime.BEGAN], len(lanes) + 0.5, str(number + 1), fontsize=7)
    for place, (stage, color) in enumerate(_HOST_STAGES.items()):
        spans = [(begin, end - begin) for name, begin, end in data["host"] if name == stage]
        axis.broken_barh(spans, (heights["host"] + 0.15 - 0.25 * place, 0.22), color=color, lw=0.2, label=stage)
    for at, number in data["inbox"]:
        color = _GREY if number is None else _RED
        axis.plot(at, heights["inbox"], marker="^", markersize=5, color=color)
        if number is not None:
            begun = data["rounds"][number][RoundTime.BEGAN]
            axis.plot([at, begun], [heights["inbox"], heights["graft .. pack"]], color=_RED, linewidth=0.6)
            axis.plot(begun, heights["graft .. pack"], marker="o", markersize=3, color=_RED)
    axis.plot([], [], marker="^", linestyle="none", color=_RED, label="growth, to the round that selected it")
    axis.plot([], [], marker="^", linestyle="none", color=_GREY, label="growth, none of it accepted here")
    axis.set_yticks([heights[lane] for lane in lanes], lanes)
    axis.set(xlabel="ms", ylim=(0.4, len(lanes) + 1), title=data["title"])
    axis.margins(x=0.005)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
