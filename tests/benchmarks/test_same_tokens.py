"""The count of differing choices: what is compared, what is found, and what fails the run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.target_bench import same_tokens_command
from benchmarks.target_bench.forced import MIXES, Difference, Teacher, Text, _Follower, ranked_scores
from benchmarks.target_bench.models import folder_model
from benchmarks.target_bench.worker import Worker, worker_config

from outrider.models import embedded_draft_path
from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import TreeRequest
from outrider.target_worker.verifier import Verifier

COUNT = 20


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    model = folder_model(embedded_draft_path())
    limits = {"max_num_seqs": 24, "max_model_len": 160, "max_step_tokens": 64, "num_slots": 2000}
    return Worker(model, worker_config(model, "cpu", **limits)).verifier()


def texts() -> list[Text]:
    return [
        Text(
            prompt=[40 + number, *range(100, 120)],
            sampling=SamplingSpec(temperature=float(number % 2), seed=7 + number, max_new_tokens=1000),
            output=[],
        )
        for number in range(3)
    ]


class Forgetful(Teacher):
    """Changes a token of the answers now and then, as an unstable product would."""

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier, lambda: None, seed=0)
        self.changed: list[tuple[int, int]] = []
        self.active = False

    def _step(self, trees: Sequence[TreeRequest]) -> list:
        results = super()._step(trees)
        for place, result in enumerate(results):
            if self.active and result.token_ids and (len(self.changed) * 5 + place) % 3 == 0:
                *rest, last = result.token_ids
                if trees[place].length + len(rest) < 21 + COUNT:
                    self.changed.append((trees[place].length + len(rest) - 21, last))
                    results[place] = replace(result, token_ids=[*rest, (last + 1) % 8192])
                    self._verifier._sessions[trees[place].key].tokens[-1] = (last + 1) % 8192
        return results


def test_every_position_is_compared_once_and_float32_stays_the_same(verifier: Verifier) -> None:
    teacher, some = Teacher(verifier, lambda: None, seed=0), texts()
    assert teacher.plain(some, COUNT) >= COUNT
    assert [len(text.output) for text in some] == [COUNT] * 3
    assert len({tuple(text.output) for text in some}) > 1
    for mix in MIXES:
        found = teacher.follow(some, mix)
        assert found.compared == {0.0: 2 * COUNT, 1.0: COUNT}
        assert found.differences == []
    # Trees emit several tokens a step: the true branch was there.
    assert teacher.follow(some, MIXES[0]).steps < COUNT
    assert verifier.session_count == 0


def test_differences_are_found_where_they_are(verifier: Verifier) -> None:
    teacher, some = Forgetful(verifier), texts()
    teacher.plain(some, COUNT)
    teacher.active = True
    found = teacher.follow(some, MIXES[2])
    teacher.active = False
    assert found.compared.total() == 3 * COUNT
    assert len(teacher.changed) > 3
    assert [(one.place, one.plain) for one in found.differences] == teacher.changed
    assert all(one.chosen == (one.plain + 1) % 8192 for one in found.differences)
    assert all(gap > 1e-4 for gap in teacher.gaps(some, found.differences))


def test_the_best_score_is_the_plain_choice(verifier: Verifier) -> None:
    teacher, some = Teacher(verifier, lambda: None, seed=0), texts()
    teacher.plain(some, COUNT)
    for text in some:
        looker = _Follower(teacher, text)
        looker.place = 9
        looker.open(all_scores=True)
        results = teacher._step([looker.root()])
        while not results[0].token_ids:
            results = teacher._step([looker.root()])
        ids, scores = ranked_scores(text, 9, results[0])
        assert len(ids) == 8192 and ids[0] == text.output[9] and scores[0] >= scores[1]
        looker.close()


def test_trees_hold_the_truth_and_nothing_else_that_is_true(verifier: Verifier) -> None:
    teacher, some = Teacher(verifier, lambda: None, seed=3), texts()
    teacher.plain(some, COUNT)
    follower = _Follower(teacher, some[0])
    for _ in range(20):
        tree = follower.tree(MIXES[1], teacher._random)
        children: dict[int, list[int]] = {}
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            children.setdefault(parent, []).append(token)
        assert all(len(set(tokens)) == len(tokens) for tokens in children.values())
        assert all(0 <= token < 8192 for token in tree.tokens)
        assert all(parent < number for number, parent in enumerate(tree.parents, start=1))


@pytest.mark.parametrize(
    ("options", "gap", "counts"),
    [
        (["--device", "cpu"], 1e-5, False),
        (["--device", "cpu"], 1e-3, True),
        (["--device", "cpu"], float("nan"), True),
        (["--device", "cuda"], 1e-3, False),
        (["--device", "cuda", "--dtype", "float32"], 1e-3, True),
        (["--device", "cuda", "--deterministic"], 1e-5, True),
    ],
)
def test_what_fails_the_run(options: list[str], gap: float, counts: bool) -> None:
    difference = Difference(text=0, place=0, chosen=1, plain=2, gap=gap)
    assert same_tokens_command._counts(difference, same_tokens_command._parse(options)) is counts


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    line = ["--model", str(embedded_draft_path()), "--device", "cpu", "--sessions", "2", "--tokens", "24"]
    assert same_tokens_command.run([*line, "--output-json", str(file)]) == 0
    lines = json.loads(file.read_text())["lines"]
    assert [(entry["mix"], entry["temperature"], entry["compared"]) for entry in lines] == [
        (mix.name, temperature, 12) for mix in MIXES for temperature in (0.0, 1.0)
    ]
    assert "chunked prefill" in capsys.readouterr().err
    monkeypatch.setattr(same_tokens_command, "_counts", lambda *_: True)
    monkeypatch.setattr(same_tokens_command, "_look", lambda *_: [Difference(text=0, place=0, chosen=1, plain=2)])
    assert same_tokens_command.run([*line, "--output-json", str(file)]) == 1


@pytest.mark.gpu
def test_deterministic_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    file = tmp_path / "report.json"
    line = ["--device", "cuda", "--deterministic", "--sessions", "16", "--tokens", "1600", "--output-json", str(file)]
    assert same_tokens_command.run(line) == 0
    assert sum(entry["compared"] for entry in json.loads(file.read_text())["lines"]) == 4800
