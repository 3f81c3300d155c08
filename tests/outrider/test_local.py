"""A service of child processes: it serves, survives what happens to its workers, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from tests.byte_tokenizer import byte_tokenizer
from tests.polling import is_running, wait_until
from tests.tiny_llama import write_llama

from outrider.client import Client
from outrider.errors import WorkerUnavailable
from outrider.local import LocalService


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama over bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_llama(folder, vocab_size=256, max_position_embeddings=128, bos_token_id=0, eos_token_id=1)
    return folder


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[LocalService]:
    with LocalService(drafts=1, target_model=checkpoint, draft_model=checkpoint, target_threads=1) as service:
        yield service
    assert {name: process.returncode for name, process in service.processes.items()} == dict.fromkeys(
        service.processes, 0
    )


def test_every_mode_gives_the_same_tokens_and_a_lost_draft_changes_nothing(service: LocalService) -> None:
    assert set(service.processes) == {"coordinator", "target-0", "draft-0"}
    with Client(service.endpoint) as client:
        roles = sorted(worker.introduction.role for worker in client.server_info().workers)
        assert roles == [1, 2]

        def tokens(speculation: Literal["async", "sync", "off"]) -> list[int]:
            output = client.generate(
                "hello", max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True, speculation=speculation
            )
            return list(output.token_ids)

        wanted = tokens("off")
        assert len(wanted) == 24
        assert tokens("sync") == tokens("async") == wanted
        draft = service.processes["draft-0"]
        draft.kill()
        draft.wait()
        assert tokens("async") == wanted
        service.start_worker("draft-0")
        service.wait_for_workers()
        assert service.processes["draft-0"].pid != draft.pid
        assert tokens("sync") == wanted
    assert "serving" in service.stderr("draft-0")


def test_a_worker_that_still_runs_is_not_started_twice(service: LocalService) -> None:
    with pytest.raises(ValueError, match="target-0 is still running"):
        service.start_worker("target-0")
    with pytest.raises(ValueError, match="'judge-0' given"):
        service.start_worker("judge-0")


def test_a_process_that_cannot_start_is_told_with_its_words(tmp_path: Path) -> None:
    service = LocalService(target_model=tmp_path)
    with pytest.raises(WorkerUnavailable, match=r"coordinator ended with exit code 1: .*config\.json"):
        service.start()
    assert all(process.poll() is not None for process in service.processes.values())


def test_children_end_with_a_parent_that_is_killed(checkpoint: Path) -> None:
    code = (
        "import sys, time; from outrider.local import LocalService\n"
        "service = LocalService(drafts=0, targets=0, target_model=sys.argv[1]); service.start()\n"
        "print(service.processes['coordinator'].pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(checkpoint)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate(timeout=60)
    wait_until(lambda: not is_running(child))
