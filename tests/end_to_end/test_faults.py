"""Processes die and clients leave: the output stays what it is and nothing is left behind."""

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
from tests.polling import wait_until

from outrider.client import Client
from outrider.errors import OutriderError
from outrider.local import LocalService

from .conftest import PATIENT_WITH_WORKERS

Rule = Literal["coupled", "target_only", "rejection"]


def is_quiet(client: Client) -> bool:
    """No session anywhere, no slot held at any worker."""
    info = client.server_info()
    if info.running_sessions or info.waiting_requests:
        return False
    return all(not worker.load.sessions and not worker.load.slots_used for worker in info.workers)


def test_a_draft_killed_in_the_middle_changes_nothing(prompts):
    """Under the rules with coins other tokens may come, but none is lost or comes twice."""
    rules: tuple[Rule, ...] = ("coupled", "target_only", "rejection")
    service = LocalService(drafts=1, coordinator_args=PATIENT_WITH_WORKERS)
    with service, Client(service.endpoint) as client:
        settings = {"max_new_tokens": 160, "temperature": 1.0, "seed": 9, "ignore_eos": True}
        wanted = client.generate(prompts[0], speculation="off", **settings)
        # Not async: on a busy machine a rule may find that trees do not pay.
        settings |= {"speculation": "sync"}
        draft = service.processes["draft-0"]

        reached = dict.fromkeys(rules, 0)

        def generate(rule: Rule) -> tuple[list[int], int]:
            tokens: list[int] = []
            with client.stream(prompts[0], verification=rule, **settings) as stream:
                for delta in stream:
                    assert delta.offset == len(tokens)
                    tokens.extend(delta.token_ids)
                    reached[rule] = len(tokens)
                    # Not before each has had its share of the draft.
                    if min(reached.values()) > 40:
                        draft.kill()
            return tokens, stream.result.speculation.accepted_tokens

        with ThreadPoolExecutor(len(rules)) as pool:
            outputs = list(pool.map(generate, rules))
        assert draft.wait(timeout=60) == -signal.SIGKILL
        assert outputs[0][0] == list(wanted.token_ids)
        assert [len(tokens) for tokens, _ in outputs] == [160] * len(rules)
        assert any(accepted for _, accepted in outputs)
        # And with no draft at all.
        wait_until(lambda: len(client.server_info().workers) == 1)
        output = client.generate(prompts[0], **settings)
        assert list(output.token_ids) == list(wanted.token_ids)
        assert output.speculation.drafted_tokens == 0


def test_targets_that_stop_hand_over_and_the_last_one_killed_ends_the_stream(prompts):
    """Told to stop, a worker drains and exits 0; the tokens delivered stay valid when nobody is left."""
    service = LocalService(drafts=1, targets=2, coordinator_args=PATIENT_WITH_WORKERS)
    with service, Client(service.endpoint, max_resumes=0) as client:
        wanted = client.generate(prompts[2], max_new_tokens=200, speculation="off", ignore_eos=True)
        tokens: list[int] = []
        going = ("target-0", "draft-0")
        with client.stream(prompts[2], max_new_tokens=200, ignore_eos=True) as stream:
            for delta in stream:
                assert delta.offset == len(tokens)
                tokens.extend(delta.token_ids)
                for name in going if len(tokens) > 20 else ():
                    service.processes[name].terminate()
                    going = ()
        assert tokens == list(wanted.token_ids)
        assert [service.processes[name].wait(timeout=60) for name in ("target-0", "draft-0")] == [0, 0]
        assert [worker.state for worker in client.server_info().workers] == ["serving"]
        tokens.clear()
        # So many that this process may stand still for a while before it kills.
        with (
            pytest.raises(OutriderError, match="target"),
            client.stream(prompts[2], max_new_tokens=1800, ignore_eos=True) as stream,
        ):
            for delta in stream:
                tokens.extend(delta.token_ids)
                if len(tokens) > 20:
                    service.processes["target-1"].send_signal(signal.SIGKILL)
        assert 20 < len(tokens) < 1800
        assert tokens[:200] == list(wanted.token_ids)[: len(tokens)]
        coordinator = service.processes["coordinator"]
        coordinator.terminate()
        assert coordinator.wait(timeout=60) == 0


def test_leaving_early_frees_everything(one_draft, prompts):
    with Client(one_draft.endpoint) as client:
        for _ in range(3):
            with client.stream(prompts[3], max_new_tokens=800, ignore_eos=True) as stream:
                next(iter(stream))
        wait_until(lambda: is_quiet(client))


def test_abort_ends_a_request_of_another_client(one_draft, prompts):
    with Client(one_draft.endpoint) as client, Client(one_draft.endpoint) as other:
        with (
            pytest.raises(OutriderError, match="abort"),
            client.stream(prompts[3], max_new_tokens=1800, ignore_eos=True, request_id="long") as stream,
        ):
            for _ in stream:
                other.abort("long")
        wait_until(lambda: is_quiet(client))
