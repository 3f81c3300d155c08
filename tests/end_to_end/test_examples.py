"""Every example runs against a real service, and prints what it is there to show."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.local import LocalService

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# What each one prints; examples of other doors are run by those doors' tests.
SHOWN = {
    "complete.py": ["tokens a verification", "--- first token after"],
    "many_requests.py": ["def add(", "def save("],
    "watch_rounds.py": ["nodes verified", "tokens a round over"],
    "plain_grpc.py": ["--- request ", " tokens, finish reason "],
}


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_as_its_first_lines_say(one_draft: LocalService, name: str):
    command = [sys.executable, str(EXAMPLES / name), one_draft.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for words in SHOWN[name]:
        assert words in done.stdout
    assert f"python examples/{name} [ENDPOINT]" in (EXAMPLES / name).read_text()
