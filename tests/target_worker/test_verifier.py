"""The verifier against a plain loop over transformers' own forward with the same choice rule."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.target_worker.plain_decoding import Plain, plain_decode
from transformers import PreTrainedModel

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import Code, OpenRequest, Outcome, SessionFault, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier

PROMPT = [5, 9, 33, 2, 17, 40, 8]
Tree = tuple[list[int], list[int]]
NO_TREE: Tree = ([], [])
TARGET_ONLY = SamplingSpec(temperature=1.0, verification=VerificationRule.TARGET_ONLY)


def make_verifier(checkpoint: Path, **overrides: Any) -> Verifier:
    steps: dict[str, Any] = {"max_step_tokens": 64}
    steps |= {name: overrides.pop(name) for name in ("max_step_tokens", "max_prefill_tokens") if name in overrides}
    config: dict[str, Any] = {"num_slots": 512, "max_num_seqs": 8, "max_tree_nodes": 16, "torch_threads": 1} | overrides
    return Verifier(ModelRunner(EngineConfig(model_path=checkpoint, **config)), **steps)


def open_request(
    number: int, spec: SamplingSpec, *, epoch: int = 1, prompt: Sequence[int] = PROMPT, output: Sequence[int] = ()
) -> OpenRequest:
    return OpenRequest(key=(7, number), epoch=epoch, prompt=prompt, output=output, sampling=spec)


def tree_request(number: int, length: int, tree: Tree = NO_TREE, *, epoch: int = 1) -> TreeRequest:
    return TreeRequest(key=(7, number), epoch=epoch, length=length, tokens=tree[0], parents=tree[1])


def random_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """Nodes anywhere, half of them with the token that plain decoding has at that depth."""
    tokens, parents, depths = [], [], [0]
    for number in range(rng.randint(0, 12)):
        parent = rng.randint(0, number)
        depth = depths[parent] + 1
        depths.append(depth)
        right = expected[depth - 1] if depth <= len(expected) else rng.randrange(61)
        tokens.append(right if rng.random() < 0.5 else rng.randrange(61))
        parents.append(parent)
    return tokens, parents


def oracle_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """The continuation itself, a wrong sibling before each right node, beyond the end of the output as well."""
    tokens, parents, last = [], [], 0
    for token in [*expected[:6], 1, 2]:
        tokens += [(token + 1) % 61, token]
        parents += [last, last]
        last = len(tokens)
    return tokens, parents


def adversarial_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """The right first token twice, one of them under the wrong parent, and a right chain below a wrong node."""
    right = [*expected[:3], 4, 4, 4]
    wrong = (right[0] + 1) % 61
    return [wrong, right[0], right[1], right[0], right[1], wrong, right[2]], [0, 1, 1, 0, 4, 4, 5]


def no_tree(_rng: random.Random, _expected: Sequence[int]) -> Tree:
    return NO_TREE


@dataclass
class Decoded:
    tokens: list[int] = field(default_factory=list)
    results: list[TreeResult] = field(default_factory=list)


def decode(
    verifier: Verifier,
    number: int,
    spec: SamplingSpec,
    expected: Sequence[int],
    make_tree: Callable[[random.Random, Sequence[int]], Tree],
) -> Decoded:
    rng, out = random.Random(number), Decoded()
    while len(out.tokens) < spec.max_new_tokens and not (out.tokens and out.tokens[-1] in spec.stop_token_ids):
        tree = make_tree(rng, expected[len(out.tokens) :])
        result = verifier.step([tree_request(number, len(PROMPT) + len(out.tokens), tree)]).results[0]
        if result.outcome is Outcome.DEFERRED:
            continue
        assert result.outcome is Outcome.ACCEPTED, result.fault
        check_path(tree, result)
        out.tokens += result.token_ids
        out.results.append(result)
    return out


def check_path(tree: Tree, result: TreeResult) -> None:
    tokens, parents = tree
    assert [tokens[node - 1] for node in result.accepted_nodes] == result.token_ids[: len(result.accepted_nodes)]
    assert [parents[node - 1] for node in result.accepted_nodes] == [0, *result.accepted_nodes[:-1]][
        : len(result.accepted_nodes)
    ]
    assert len(result.token_ids) - len(result.accepted_nodes) in (0, 1)


SPECS = {
    "greedy": SamplingSpec(max_new_tokens=24),
    "coupled": SamplingSpec(temperature=1.0, seed=2**63 + 11, max_new_tokens=24),
    "coupled-filters": SamplingSpec(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5, choice_index=2, max_new_tokens=24
    ),
    "penalties": SamplingSpec(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, max_new_tokens=24),
    "penalties-coupled": SamplingSpec(
        temperature=1.0, seed=3, repetition_penalty=0.8, frequency_penalty=-0.5, max_new_tokens=24
    ),
    "bias": SamplingSpec(logit_bias={3: 2.5, 40: -100.0, 11: 2.0}, temperature=0.7, seed=9, max_new_tokens=24),
    "allowed": SamplingSpec(allowed_token_ids=(4, 8, 15, 16, 23, 42), temperature=1.0, seed=1, max_new_tokens=24),
    "stop": SamplingSpec(temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 9)), max_new_tokens=40),
    "min-new": SamplingSpec(
        temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 3)), min_new_tokens=9, max_new_tokens=40
    ),
    "short": SamplingSpec(max_new_tokens=3),
    "logprobs": SamplingSpec(temperature=1.0, seed=8, logprobs=4, repetition_penalty=1.5, max_new_tokens=16),
}
TREES = [random_tree, oracle_tree, adversarial_tree, no_tree]


@pytest.fixture(scope="module")
def verifier(checkpoint: Path) -> Verifier:
    return make_verifier(checkpoint)


@pytest.mark.parametrize("name", SPECS)
def test_any_tree_gives_plain_decoding(name: str, verifier: Verifier, reference_model: PreTrainedModel) -> None:
    spec = SPECS[name]
    plain = plain_decode(reference_model, PROMPT, spec)
    steps = {}
    for make_tree in TREES:
        verifier.open(open_request(1, spec))
        decoded = decode(verifier, 1, spec, plain.tokens, make_tree)
        verifier.close((7, 1), 1)
        assert decoded.tokens == plain.tokens, make_tree.__name__
        steps[make_tree] = len(decoded.results)
        if spec.logprobs is not None:
            check_logprobs(decoded, plain, spec.logprobs)
    assert steps[no_tree] == len(plain.tokens)
    assert steps[oracle_tree] <= -(-len(plain.tokens) // 5), "the oracle's nodes were not accepted"
    assert verifier.session_count == 0


def check_logprobs(decoded: Decoded, plain: Plain, count: int) -> None:
    got = [result.logprobs for result in decoded.results]
    expected = torch.stack(plain.logprobs)
    best = expected.topk(count)
    for name, values in (
        ("token_logprobs", expected.gather(1, torch.tensor(plain.tokens)[:, None]).squeeze(1)),
        ("top_logprobs", best.values),
    ):
        actual = np.concatenate([getattr(part, name) for part in got])
        np.testing.assert_allclose(actual, values.numpy(), rtol=1e-4, atol=1e-4)
    assert np.concatenate([part.top_token_ids for part in got if part is not None]).tolist() == best.indices.tolist()


def test_specs_meet_what_they_are_for(reference_model: PreTrainedModel) -> None:
    """Stop tokens occur before the limit, min_new_tokens changes something, penalties too."""
    outputs = {name: plain_decode(reference_model, PROMPT, spec).tokens for name, spec in SPECS.items()}
    assert len(outputs["stop"]) < 40
    assert 9 < len(outputs["min-new"]) < 40 or outputs["min-new"][9] % 3 == 0
    assert outputs["penalties"] != outputs["greedy"]


def test_sessions_of_one_batch_are_independent(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=40)
    specs = list(SPECS.values())[:5]
    plain = [plain_decode(reference_model, PROMPT, spec).tokens for spec in specs]
    for number, spec in enumerate(specs):
        verifier.open(open_request(number, spec))
    rng, outputs = random.Random(0), [[] for _ in specs]
    while live := [number for number, spec in enumerate(specs) if len(outputs[number]) < spec.max_new_tokens]:
        batch = [n for n in live if rng.random() < 0.7]
        trees = [random_tree(rng, plain[n][len(outputs[n]) :]) for n in batch]
        requests = [tree_request(n, len(PROMPT) + len(outputs[n]), tree) for n, tree in zip(batch, trees, strict=True)]
        step = verifier.step(requests)
        assert step.tokens <= 40
        for number, result in zip(batch, step.results, strict=True):
            outputs[number] += result.token_ids
    assert outputs == plain
    for number in range(len(specs)):
        verifier.close((7, number), 1)
    assert verifier.slots_used == 0


def test_first_token_shares_the_forward_of_the_last_prefill_chunk(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=4)
    verifier.open(open_request(1, SamplingSpec()))
    outcomes = [verifier.step([tree_request(1, 7)]) for _ in range(2)]
    # 6 tokens before the root: 4, then 2 and the root.
    assert [step.results[0].outcome for step in outcomes] == [Outcome.DEFERRED, Outcome.ACCEPTED]
    assert [step.tokens for step in outcomes] == [4, 3]


def test_prefill_goes_on_without_a_batch(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=16)
    verifier.open(open_request(1, SamplingSpec()))
    assert verifier.has_pending_prefill
    assert [verifier.prefill(), verifier.prefill(), verifier.prefill()] == [4, 2, 0]
    assert not verifier.has_pending_prefill
    assert verifier.step([tree_request(1, 7)]).tokens == 1


def test_trees_are_cut_to_their_root_before_a_session_waits(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=14, max_tree_nodes=8, enable_prefix_caching=False)
    spec = SamplingSpec(max_new_tokens=8)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec))
    first = verifier.step([tree_request(1, 7)])
    assert list(first.results[0].token_ids) == plain[:1]
    verifier.open(open_request(2, spec))
    # 7 rows of the new session and 1 root leave 6: a tree of 6 fits, one of 7 is cut, and both sessions emit.
    chain = [*plain[1:], 0]
    for count, emitted in ((7, 1), (6, 7)):
        tree = (chain[:count], list(range(count)))
        step = verifier.step([tree_request(1, 8, tree), tree_request(2, 7)])
        assert [len(result.token_ids) for result in step.results] == [emitted, 1]
        verifier.close((7, 2), 1)
        verifier.open(open_request(2, spec))
    oversized = (list(range(9)), [0] * 9)
    assert [len(r.token_ids) for r in verifier.step([tree_request(1, 8, oversized)]).results] == [1]


def test_out_of_slots_preempts_the_youngest_and_loses_nothing(
    checkpoint: Path, reference_model: PreTrainedModel
) -> None:
    verifier = make_verifier(checkpoint, num_slots=60)
    spec = SamplingSpec(temperature=1.0, seed=6, max_new_tokens=30)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    outputs: list[list[int]] = [[] for _ in range(4)]
    for number in range(4):
        verifier.open(open_request(number, spec))
    deferred = 0
    for _ in range(400):
        live = [number for number in range(4) if len(outputs[number]) < 30]
        if not live:
            break
        requests = [
            tree_request(n, 7 + len(outputs[n]), (plain[len(outputs[n]) :][:2], [0, 1]))
            if len(outputs[n]) < 28
            else tree_request(n, 7 + len(outputs[n]))
            for n in live
        ]
        for number, result in zip(live, verifier.step(requests).results, strict=True):
            deferred += result.outcome is Outcome.DEFERRED
            outputs[number] += result.token_ids
            if len(outputs[number]) >= 30:
                verifier.close((7, number), 1)
    assert outputs == [plain] * 4
    assert deferred > 0
    assert verifier.preemptions > 0
    assert verifier.slots_used == 0


def test_a_shorter_length_truncates_and_a_longer_one_asks_to_reopen(
    verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(temperature=1.0, seed=12, repetition_penalty=1.4, max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec))
    verifier.step([tree_request(1, 7, (plain[:6], list(range(6))))])
    again = verifier.step([tree_request(1, 9, ([plain[2]], [0]))]).results[0]
    assert list(again.token_ids) == plain[2:4]
    ahead = verifier.step([tree_request(1, 40)]).results[0]
    assert ahead.fault is not None
    assert ahead.fault.code is Code.FAILED_PRECONDITION
    assert "open the session again" in ahead.fault.message
    assert verifier.session_count == 0


def test_truncating_forgets_what_penalties_counted(verifier: Verifier, reference_model: PreTrainedModel) -> None:
    spec = SamplingSpec(repetition_penalty=2.0, frequency_penalty=2.0, max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec))
    verifier.step([tree_request(1, 7, (plain[:8], list(range(8))))])
    verifier.step([tree_request(1, 16)])
    again = [
        token for length in range(8, 18) for token in verifier.step([tree_request(1, length)]).results[0].token_ids
    ]
    verifier.close((7, 1), 1)
    assert again == plain[1:11]


def test_reopening_with_other_tokens_recomputes_what_differs(
    verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(max_new_tokens=20)
    other = [(token + 1) % 61 for token in plain_decode(reference_model, PROMPT, spec).tokens[:3]]
    verifier.open(open_request(1, spec))
    verifier.step([tree_request(1, 7)])
    verifier.step([tree_request(1, 8)])
    verifier.step([tree_request(1, 9)])
    verifier.open(open_request(1, spec, epoch=2, output=other))
    step = verifier.step([tree_request(1, 10, epoch=2)])
    verifier.close((7, 1), 2)
    expected = plain_decode(reference_model, [*PROMPT, *other], replace(spec, max_new_tokens=1)).tokens
    assert list(step.results[0].token_ids) == expected
    assert step.tokens == 3, "the prompt's KV was not kept"


def test_reopening_keeps_the_shared_prefix_and_refuses_older_epochs(
    verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec, epoch=2))
    verifier.step([tree_request(1, 7, (plain[:6], list(range(6))), epoch=2)])
    verifier.open(open_request(1, spec, epoch=3, output=plain[:4]))
    step = verifier.step([tree_request(1, 11, ([plain[4]], [0]), epoch=3)])
    assert list(step.results[0].token_ids) == plain[4:6]
    assert step.tokens == 2, "KV of the shared tokens was recomputed"
    with pytest.raises(Exception, match="epoch 2 is over"):
        verifier.open(open_request(1, spec, epoch=2))
    ghost = verifier.step([tree_request(1, 13, epoch=2)]).results[0]
    assert ghost.fault is not None
    assert ghost.fault.code is Code.FAILED_PRECONDITION
    verifier.close((7, 1), 2)
    assert verifier.session_count == 1, "a ghost closed a session that was reopened"
    verifier.close((7, 1), 3)
    assert verifier.slots_used == 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (tree_request(9, 7), Code.NOT_FOUND),
        (tree_request(1, 7, epoch=2), Code.NOT_FOUND),
        (tree_request(1, 7, ([61], [0])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([-1], [0])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([1, 2], [0, 2])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([1], [-1])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([1], [0, 0])), Code.INVALID_ARGUMENT),
        (tree_request(1, 6), Code.INVALID_ARGUMENT),
        (tree_request(1, 8), Code.FAILED_PRECONDITION),
    ],
)
def test_a_fault_is_its_own_sessions(
    request_: TreeRequest, code: Code, verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(max_new_tokens=4)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    for number in (1, 2):
        verifier.open(open_request(number, spec))
    step = verifier.step([request_, tree_request(2, 7, (plain[:2], [0, 1]))])
    assert step.results[0].fault is not None
    assert step.results[0].fault.code is code
    assert list(step.results[1].token_ids) == plain[:3]
    for number in (1, 2):
        verifier.close((7, number), 9)
    assert (verifier.session_count, verifier.slots_used) == (0, 0)


def test_a_repeated_session_is_a_fault_of_both_entries(verifier: Verifier) -> None:
    verifier.open(open_request(1, SamplingSpec()))
    step = verifier.step([tree_request(1, 7), tree_request(1, 7)])
    assert [result.outcome for result in step.results] == [Outcome.ERROR] * 2
    assert verifier.session_count == 0


def test_the_end_of_a_session_is_a_fault_not_a_token(verifier: Verifier) -> None:
    verifier.open(open_request(1, SamplingSpec(max_new_tokens=1)))
    assert len(verifier.step([tree_request(1, 7)]).results[0].token_ids) == 1
    over = verifier.step([tree_request(1, 8)]).results[0]
    assert over.fault is not None
    assert "ends at 8" in over.fault.message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (open_request(1, SamplingSpec(), prompt=[]), "prompt: empty"),
        (open_request(1, SamplingSpec(), prompt=[61]), "token ids from 0 to 60"),
        (open_request(1, SamplingSpec(), output=[99]), "token ids from 0 to 60"),
        (open_request(1, SamplingSpec(), prompt=[1] * 97), "the model takes 96"),
        (open_request(1, SamplingSpec(logit_bias={61: 1.0})), "sampling: token ids"),
        (open_request(1, replace(TARGET_ONLY, threshold_single=0.0)), "thresholds: .0.0, 1.0. given"),
        (open_request(1, replace(TARGET_ONLY, threshold_acc=1.5)), "thresholds"),
        (open_request(1, SamplingSpec(choice_index=2**31)), "choice_index: 2147483648 given"),
        (open_request(1, SamplingSpec(min_new_tokens=1, allowed_token_ids=(3,), stop_token_ids=(3, 4))), "leaves no"),
    ],
)
def test_opens_that_cannot_be_served(request_: OpenRequest, message: str, verifier: Verifier) -> None:
    with pytest.raises(Exception, match=message):
        verifier.open(request_)
    assert verifier.session_count == 0


def test_more_sessions_than_rows_are_refused(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, max_num_seqs=1)
    verifier.open(open_request(1, SamplingSpec()))
    with pytest.raises(Exception, match="max_num_seqs"):
        verifier.open(open_request(2, SamplingSpec()))


def test_output_ends_where_the_model_does(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, max_model_len=12)
    spec = SamplingSpec(max_new_tokens=50)
    plain = plain_decode(reference_model, PROMPT, replace(spec, max_new_tokens=5)).tokens
    verifier.open(open_request(1, spec))
    tree = ([*plain, 1, 2, 3], list(range(8)))
    result = verifier.step([tree_request(1, 7, tree)]).results[0]
    assert list(result.token_ids) == plain
    assert list(result.accepted_nodes) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("chunk", [1, 3, 16, None])
@pytest.mark.parametrize("caching", [True, False])
def test_the_same_tokens_whatever_the_chunks_the_cache_and_preemption(
    chunk: int | None, caching: bool, checkpoint: Path, reference_model: PreTrainedModel
) -> None:
    """Sessions that begin alike, end and come again, in a KV cache that is too small for them all."""
    rng = random.Random(1)
    shared = [rng.randrange(61) for _ in range(20)]
    prompts = [[*shared[: rng.choice([8, 14, 20])], *(rng.randrange(61) for _ in range(4))] for _ in range(3)]
    prompts += [prompts[0], prompts[1]]
    specs = [SamplingSpec(temperature=1.0, seed=number, max_new_tokens=24) for number in range(5)]
    plain = [plain_decode(reference_model, prompt, spec).tokens for prompt, spec in zip(prompts, specs, strict=True)]
    verifier = make_verifier(
        checkpoint, num_slots=56, max_step_tokens=chunk or 64, max_prefill_tokens=chunk or 64,
        enable_prefix_caching=caching,
    )  # fmt: skip
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting, live, cached = list(range(5)), [], 0
    while waiting or live:
        if waiting and rng.random() < 0.8:
            live.append(waiting.pop(0))
            verifier.open(open_request(live[-1], specs[live[-1]], prompt=prompts[live[-1]]))
        trees = [
            tree_request(
                number,
                len(prompts[number]) + len(outputs[number]),
                (plain[number][len(outputs[number]) :][:2], [0, 1]) if len(outputs[number]) < 22 else NO_TREE,
            )
            for number in live
        ]
        for number, result in zip(list(live), verifier.step(trees).results, strict=True):
            outputs[number] += result.token_ids
            cached += result.cached_tokens
            if len(outputs[number]) >= 24:
                verifier.close((7, number), 1)
                live.remove(number)
    assert outputs == plain
    assert (cached > 0) == caching
    assert verifier.slots_used == 0
    assert (verifier.slots_cached > 0) == caching
    # With few rows a step, one session ends before the next gets far.
    assert verifier.preemptions > 0 or chunk in (1, 3)


def test_kv_outlives_its_session_and_its_stream(verifier: Verifier) -> None:
    prompt = [*range(40, 60), 3]
    verifier.open(open_request(1, SamplingSpec(), prompt=prompt))
    first = verifier.step([tree_request(1, 21)]).results[0]
    again = verifier.step([tree_request(1, 22)]).results[0]
    verifier.close((7, 1), 1)
    assert (first.cached_tokens, verifier.slots_used) == (0, 0)
    # All of the prompt but its last token, and for a conversation that goes on the output as well.
    longer = [*prompt, *first.token_ids, *again.token_ids, 9]
    verifier.open(open_request(2, SamplingSpec(), prompt=prompt))
    verifier.open(open_request(3, SamplingSpec(), prompt=longer))
    step = verifier.step([tree_request(2, 21), tree_request(3, 24)])
    assert [result.cached_tokens for result in step.results] == [20, 22]
    assert step.tokens == 1 + 2
    assert list(step.results[0].token_ids) == list(first.token_ids)
    # What a session computed is its own when it comes again, and it finds what others have added.
    verifier.open(open_request(2, SamplingSpec(), epoch=2, prompt=prompt, output=[*first.token_ids, *again.token_ids]))
    reopened = verifier.step([tree_request(2, 23, epoch=2)])
    assert (reopened.results[0].cached_tokens, reopened.tokens) == (20, 1)
    for number in (2, 3):
        verifier.close((7, number), 2)
    assert verifier.slots_used == 0


def test_steps_of_different_sessions_overlap(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, num_slots=40)
    spec = SamplingSpec(max_new_tokens=12)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8]]
    plain = [plain_decode(reference_model, prompt, spec).tokens for prompt in prompts]
    outputs: list[list[int]] = [[], []]
    for number, prompt in enumerate(prompts):
        verifier.open(open_request(number, spec, prompt=prompt))

    def begin(number: int) -> Any:
        return verifier.begin([tree_request(number, len(prompts[number]) + len(outputs[number]))])

    first = verifier.step([tree_request(n, len(prompts[n])) for n in (0, 1)])
    outputs = [list(result.token_ids) for result in first.results]
    pending = begin(0)
    for turn in range(1, 22):
        number = turn % 2
        following = begin(number)
        assert verifier.is_in_flight((7, 0)) and verifier.is_in_flight((7, 1))
        # A tree for a session in flight is put off, and its end waits.
        late = verifier.finish(begin(1 - number)).results[0]
        assert late.outcome is Outcome.DEFERRED
        if turn == 21:
            verifier.close((7, 1 - number), 1)
            assert verifier.session_count == 2
        outputs[1 - number] += verifier.finish(pending).results[0].token_ids
        pending = following
    outputs[1] += verifier.finish(pending).results[0].token_ids
    assert verifier.session_count == 1
    verifier.close((7, 1), 1)
    assert verifier.slots_used == 0
    assert outputs == plain


def test_a_prompt_longer_than_the_cache_says_what_to_raise(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, num_slots=10)
    with pytest.raises(SessionFault, match=r"11 tokens given, the KV cache holds 10: raise num_slots, kv_bytes or"):
        verifier.open(open_request(1, SamplingSpec(), prompt=[1] * 11))
    verifier.open(open_request(1, SamplingSpec(), prompt=[1] * 10))
    assert len(verifier.step([tree_request(1, 10)]).results[0].token_ids) == 1
    fault = verifier.step([tree_request(1, 11)]).results[0].fault
    assert fault is not None
    assert (fault.code, "the KV cache holds 10" in fault.message) == (Code.INVALID_ARGUMENT, True)


def test_prefill_waits_for_those_who_were_just_verified(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint)
    assert verifier.prefill_due_s == 0.0
    verifier.open(open_request(1, SamplingSpec()))
    assert verifier.prefill_due_s == 0.0
    verifier.step([tree_request(1, 7)])
    verifier.open(open_request(2, SamplingSpec(), prompt=[60, *PROMPT]))
    assert 0.0 < verifier.prefill_due_s <= 0.1
    verifier.close((7, 1), 1)
    assert verifier.prefill_due_s == 0.0
