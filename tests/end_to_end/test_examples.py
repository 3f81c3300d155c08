"""Every example runs against a real service, and prints what it is there to show.

Those of clients that the project does not depend on get an environment of their own, out of PyPI: `make clients`.
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from outrider.local import LocalService
from outrider.models import embedded_target_path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# What each one prints. The first ones run in the project's own environment.
SHOWN = {
    "complete.py": ["tokens a verification", "--- first token after"],
    "many_requests.py": ["def add(", "def save("],
    "watch_rounds.py": ["nodes verified", "tokens a round over"],
    "plain_grpc.py": ["--- request ", " tokens, finish reason "],
    "clients/reflection.py": ["outrider.v1.GenerationService", "finish_reason: FINISH_REASON_LENGTH"],
    "clients/openai_sync.py": ["--- equal: True", "--- what is wrong is named: temperature: "],
    "clients/openai_async.py": ["def add(", "def save("],
    "clients/openai_streaming.py": ["--- 48 tokens, "],
    "clients/openai_json_schema.py": ["'is_even': "],
    "clients/openai_tools.py": ["get_weather {'city': "],
    "clients/curl.sh": ["data: [DONE]"],
}
CLIENTS = {
    "clients/litellm_chat.py": ["a prompt beyond the context is told as one"],
    "clients/langchain_tools.py": ["It is sunny in "],
    "clients/instructor_tools.py": ["Number(is_even="],
    "clients/pydantic_ai_agent.py": ["Number(is_even="],
    "clients/llm_prompt.sh": ["fib"],
    "clients/aiperf.sh": ["Request Throughput", "Time to First Token"],
    "clients/lm_eval.sh": ["next_line"],
}


def run(name: str, argument: Sequence[str], *, folder: Path, python: str, **environment: str) -> str:
    program = "sh" if name.endswith(".sh") else python
    known: Mapping[str, str] = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [program, str(EXAMPLES / name), *argument],
        capture_output=True, text=True, timeout=250, check=False, cwd=folder, env={**known, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def argument_of(name: str, service: LocalService) -> list[str]:
    """The arguments that an example's first lines name."""
    text = (EXAMPLES / name).read_text()
    found = re.search(rf"^#? ?(?:python|sh) examples/{name} (\S.*)$", text, re.MULTILINE)
    assert found, f"examples/{name} does not say how it is run"
    return {
        "[ENDPOINT]": [service.endpoint],
        "[BASE_URL]": [f"{service.http_url}/v1"],
        "URL TOKENIZER": [service.http_url, str(embedded_target_path())],
    }[found[1]]


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_as_its_first_lines_say(one_draft: LocalService, name: str, tmp_path: Path):
    shown = run(name, argument_of(name, one_draft), folder=tmp_path, python=sys.executable)
    for words in SHOWN[name]:
        assert words in shown


@pytest.mark.clients
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_out_of_pypi_runs_as_it_is(one_draft: LocalService, name: str, tmp_path: Path):
    shown = run(name, argument_of(name, one_draft), folder=tmp_path, python=environment_of(name, tmp_path))
    for words in CLIENTS[name]:
        assert words in shown


def environment_of(name: str, folder: Path) -> str:
    """Install what an example needs, and return the interpreter."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *needs_of(name)], check=True, timeout=280)
    return python


def needs_of(name: str) -> list[str]:
    text = (EXAMPLES / name).read_text()
    if script := re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE):
        return tomllib.loads(re.sub(r"^# ?", "", script[1], flags=re.MULTILINE))["dependencies"]
    found = re.search(r"Needs: pip install '?([^'\s]+)'?$", text, re.MULTILINE)
    assert found, f"examples/{name} does not say what it needs"
    return [found[1]]


def test_every_example_is_run():
    programs = [path for kind in ("py", "sh") for path in EXAMPLES.rglob(f"*.{kind}")]
    assert {str(path.relative_to(EXAMPLES)) for path in programs} == SHOWN.keys() | CLIENTS.keys()
    assert all("==" in need for name in CLIENTS for need in needs_of(name))
