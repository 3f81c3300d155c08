"""A drafter in the target's rounds: the tokens of plain decoding, in fewer rounds, and both pools in step."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.target_worker.plain_decoding import check_logprobs, plain_decode
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    TARGET_ONLY,
    Driver,
    FixedSteps,
    make_runner,
    no_tree,
    open_request,
    random_tree,
    rounds_of,
)
from tests.target_worker.rounds.random_sessions import ROUNDS, live, random_cases
from tests.target_worker.tiny_head import write_tiny_head
from tests.tiny_llama import SIZES, write_llama
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafting import program
from outrider.drafting.config import GrowthConfig
from outrider.drafting.growth_source import GrowthSource
from outrider.kernels.pool.columns import Pool, RowState
from outrider.kernels.pool.re_root import TreeEnd
from outrider.sampling import SpeculationMode, VerificationRule
from outrider.target_worker.drafters.loading import load_draft
from outrider.target_worker.drafters.model import ResidentModel
from outrider.target_worker.rounds.draft_steps import MOST_STEPS, DraftSteps, Floats, RoundRates
from outrider.target_worker.rounds.growth import Growth

pytestmark = pytest.mark.usefixtures("device")
GREEDY, COUPLED = SPECS["greedy"], SPECS["coupled"]


@pytest.fixture(scope="module", params=["model", "head", "block"])
def draft_folder(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    reference_model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A drafter that is often right: the target with noise in its weights, or a head or block that knows the texts."""
    torch.manual_seed(9)
    folder = tmp_path_factory.mktemp("draft")
    if request.param != "model":
        texts = [[*PROMPT, *plain_decode(reference_model, PROMPT, spec).tokens] for spec in SPECS.values()]
        block_size = 4 if request.param == "block" else None
        return write_tiny_head(folder, checkpoint, reference_model, texts, block_size=block_size)
    draft = LlamaForCausalLM(reference_model.config)
    draft.load_state_dict(reference_model.state_dict())
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(0.1 * weights.std() * torch.randn_like(weights))
    draft.save_pretrained(folder)
    return folder


class Resident:
    """Rounds with a drafter beside the target."""

    def __init__(
        self,
        checkpoint: Path,
        draft_folder: Path,
        *,
        steps: int = 3,
        slots: int | None = None,
        prefill_tokens: int = GrowthConfig.max_step_tokens,
        **overrides: Any,
    ) -> None:
        runner = make_runner(checkpoint, **overrides)
        self.draft = load_draft(runner, draft_folder, prefill_tokens=prefill_tokens)
        self.draft = self.draft if slots is None else replace(self.draft, num_slots=slots)
        self.loop, self.program = rounds_of(runner, draft=self.draft, **overrides)
        self.drafter: ResidentModel = self.program.drafter
        self.drafter.pace = FixedSteps(steps)

    def check_pools(self) -> int:
        """Both pools know the same sessions; return the nodes of the drafter that the target has.

        What a draft model has dropped the target has dropped as well. A head grows a tree anew that the target keeps.
        """
        mine, theirs = self.drafter.pool, self.program.pool
        nodes = 0
        for row in range(mine.sessions):
            if mine.state[row] == RowState.EMPTY:
                continue
            assert mine.generation[row] == theirs.generation[row]
            length = int(mine.length[row])
            assert length == theirs.length[row]
            assert torch.equal(mine.history[row, :length], theirs.history[row, :length])
            own, known = tokens_by_id(mine, row, 0), tokens_by_id(theirs, row, self.drafter.place)
            shared = own.keys() & known.keys()
            assert all(own[number] == known[number] for number in shared)
            assert shared == known.keys() or self.drafter.source is GrowthSource.EAGLE
            nodes += len(known)
        return nodes

    def check_empty(self) -> None:
        """No session has left anything behind, on either side."""
        pool, nodes = self.drafter.pool, self.drafter.pool.nodes
        assert nodes is not None
        assert (pool.state == RowState.EMPTY).all() and (self.program.pool.state == RowState.EMPTY).all()
        assert int(nodes.free_tail - nodes.free_head) == self.draft.num_slots
        free = nodes.free[torch.arange(int(nodes.free_head), int(nodes.free_tail)) % len(nodes.free)]
        assert sorted(free.tolist()) == list(range(self.draft.num_slots))
        assert (self.loop.session_count, self.loop.kv.slots.used, self.loop.has_work) == (0, 0, False)


def tokens_by_id(pool: Pool, row: int, place: int) -> dict[int, list[int]]:
    """The tokens from the root to each node that a place has named, by its id there."""
    count, paths = int(pool.count[row]), list[list[int]]()
    for token, parent in zip(pool.token[row, :count].tolist(), pool.parent[row, :count].tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    ids = pool.ids[row, :count, place].tolist()
    return {number: path for number, path in zip(ids, paths, strict=True) if number}


@pytest.fixture(scope="module")
def resident(checkpoint: Path, draft_folder: Path) -> Iterator[Resident]:
    yield Resident(checkpoint, draft_folder)


def accepted(driver: Driver, number: int) -> int:
    return sum(result.accepted for result in driver.decoded[number].results)


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_of_plain_decoding(resident: Resident, reference_model, name: str):
    spec = SPECS[name]
    wanted = plain_decode(reference_model, PROMPT, spec)
    driver, before = Driver(resident.loop), resident.loop.rounds_read
    decoded = driver.open(1, spec, wanted.tokens, no_tree)
    driver.run()
    assert decoded.tokens == wanted.tokens
    results = decoded.results
    assert sum(result.selected for result in results) > 0
    # All that was verified has come from the drafter.
    own = sum(result.selected_by_kind[resident.drafter.source - 1] for result in results)
    assert own == sum(result.selected for result in results)
    grown = [sum(counts) for counts in zip(*(result.grown_by_kind for result in results), strict=True)]
    assert grown[resident.drafter.source - 1] == sum(grown) >= own
    drafters = [kinds for result in results for kinds in result.drafters]
    assert drafters == [1 << resident.drafter.source] * accepted(driver, 1)
    if spec in (GREEDY, COUPLED):
        assert len(drafters) > len(wanted.tokens) / 3
        assert resident.loop.rounds_read - before < len(wanted.tokens)
    if spec.logprobs is not None:
        check_logprobs(results, wanted, spec.logprobs)


def test_a_drafter_follows_the_processors_of_its_sessions(checkpoint: Path, reference_model):
    """The target drafts for itself: it is always right if both change the logits alike."""
    resident = Resident(checkpoint, checkpoint)
    for name in ("penalties", "greedy", "penalties-coupled", "bias", "allowed"):
        spec, driver = SPECS[name], Driver(resident.loop)
        driver.open(1, spec, plain_decode(reference_model, PROMPT, spec).tokens, no_tree)
        driver.run()
        # Three of four of the 23 tokens behind the first round's.
        assert accepted(driver, 1) == 17


def test_short_requests_teach_the_pace_nothing_wrong(checkpoint: Path, draft_folder: Path, reference_model):
    resident, counts = Resident(checkpoint, draft_folder), list[float]()
    resident.drafter.pace = DraftSteps()
    for number, tokens in enumerate([3] * 8 + [60]):
        spec = replace(GREEDY, max_new_tokens=tokens)
        driver, rounds, steps = Driver(resident.loop), resident.loop.rounds_read, resident.drafter.steps
        driver.open(number, spec, plain_decode(reference_model, PROMPT, spec).tokens, no_tree)
        driver.run()
        counts.append((resident.drafter.steps - steps) / (resident.loop.rounds_read - rounds))
    assert counts[-1] > 2


class WatchedPace(DraftSteps):
    """Steps and rounds of known times, and what is said of them.

    Attributes:
        counts: steps before each round.
        firsts: expanded values and sessions of first steps.
        bare: shares of sessions without a tree.
        prompt_ns: what prompts take for each committed token.
    """

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        self._steps = steps
        self.counts, self.firsts = list[int](), list[tuple[float, int]]()
        self.bare, self.prompt_ns = list[float](), list[float]()

    def choose(self, sessions: int, times_ns: Sequence[float], rates: RoundRates, *, prompt_ns: float) -> int:
        def known(gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
            return (sessions + gained) / (1e7 + drafted_ns)

        count = super().choose(sessions, [5e5] * MOST_STEPS, known, prompt_ns=prompt_ns)
        self.is_trial = False
        self.counts.append(count if self._steps is None else self._steps)
        self.prompt_ns.append(prompt_ns)
        return self.counts[-1]

    def note_step(self, number: int, *, expanded: float, sessions: int) -> None:
        super().note_step(number, expanded=expanded, sessions=sessions)
        if not number:
            self.firsts.append((expanded, sessions))

    def note_round(self, *, bare: float, hits: int, misses: int, time_ns: float) -> None:
        super().note_round(bare=bare, hits=hits, misses=misses, time_ns=1e7)
        self.bare.append(bare)


@pytest.mark.parametrize("steps", [0, 2])
def test_sessions_whose_prompts_are_not_computed_have_no_tree(steps: int, checkpoint: Path, reference_model):
    resident = Resident(checkpoint, checkpoint, prefill_tokens=32)
    resident.drafter.pace = pace = WatchedPace(steps)
    prompt, driver = [*PROMPT, *range(50)], Driver(resident.loop)
    for number in range(3):
        wanted = plain_decode(reference_model, prompt, GREEDY).tokens
        driver.open(number, GREEDY, wanted, no_tree, prompt=prompt)
    driver.run()
    # Three are verified from the first round on, and the drafter needs six to compute their prompts.
    assert pace.bare[:2] == [1, 1]
    assert min(pace.bare) == (0 if steps else 1)


def test_a_tree_that_was_wrong_is_no_tree(checkpoint: Path, draft_folder: Path, reference_model):
    resident = Resident(checkpoint, draft_folder)
    resident.drafter.pace = pace = WatchedPace(2)
    driver = Driver(resident.loop)
    driver.open(1, GREEDY, plain_decode(reference_model, PROMPT, GREEDY).tokens, no_tree)
    driver.run()
    ends = [result.tree_end for result in driver.decoded[1].results if result.tokens]
    assert TreeEnd.MISSED in ends or resident.drafter.source is GrowthSource.EAGLE
    assert pace.bare == [float(end in (TreeEnd.MISSED, TreeEnd.STARVED)) for end in ends]


def test_sessions_that_begin_behind_rounds_without_drafts_have_no_tree(checkpoint: Path):
    resident = Resident(checkpoint, checkpoint)
    resident.drafter.pace = pace = WatchedPace(2)
    resident.loop.open(replace(open_request(1, replace(GREEDY, max_new_tokens=4)), mode=SpeculationMode.OFF))
    while resident.loop.has_work:
        resident.loop.turn()
    assert set(pace.bare) == {1}


def test_no_steps_run_for_sessions_that_have_outgrown_the_drafters_slots(checkpoint: Path):
    resident = Resident(checkpoint, checkpoint)
    draft = replace(resident.draft, growth=replace(resident.draft.growth, max_live_nodes=8), num_slots=60)
    resident.loop, program = rounds_of(make_runner(checkpoint), draft=draft)
    program.drafter.pace = pace = WatchedPace()
    for number in range(2):
        resident.loop.open(open_request(number, replace(GREEDY, max_new_tokens=85), prompt=[number + 1, *PROMPT]))
    while resident.loop.has_work:
        resident.loop.turn()
    assert max(pace.counts[:20]) > 2
    # Now and then it is tried again.
    assert sum(pace.counts[-20:]) <= 6


def test_sessions_that_are_too_long_for_the_drafter_do_not_count(checkpoint: Path):
    resident = Resident(checkpoint, checkpoint)
    draft = replace(resident.draft, growth=replace(resident.draft.growth, max_model_len=len(PROMPT) + 2))
    loop, program = rounds_of(make_runner(checkpoint), draft=draft)
    program.drafter.pace = pace = WatchedPace(1)
    loop.open(open_request(1, replace(GREEDY, max_new_tokens=20), prompt=[*PROMPT, *PROMPT]))
    while loop.has_work:
        loop.turn()
    # None is drafted: whoever begins next has no tree, and no prompt was computed.
    assert set(pace.bare) == {1}
    assert not pace.counts
    assert not program.drafter.steps


def test_sessions_that_wait_for_their_turn_alone_make_no_step_worth_more(checkpoint: Path):
    resident = Resident(checkpoint, checkpoint)
    resident.drafter.pace = pace = WatchedPace()
    for number in range(6):
        request = open_request(number, replace(GREEDY, max_new_tokens=30))
        resident.loop.open(replace(request, is_alone=number == 0))
    while resident.loop.has_work:
        resident.loop.turn()
    assert any(sessions == 1 for _, sessions in pace.firsts)
    assert all(expanded <= sessions for expanded, sessions in pace.firsts)


def test_prompts_of_drafted_sessions_are_shared_by_what_is_committed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    resident = Resident(checkpoint, checkpoint)
    resident.drafter.pace = pace = WatchedPace(1)
    monkeypatch.setattr(resident.drafter, "_prompt_row_ns", lambda: 512.0)
    for number, mode in enumerate((SpeculationMode.ASYNC, SpeculationMode.OFF)):
        resident.loop.open(replace(open_request(number, replace(GREEDY, max_new_tokens=40)), mode=mode))
    while resident.loop.has_work:
        resident.loop.turn()
    # One prompt, and a token of one session a round to begin with.
    assert pace.prompt_ns[0] == pytest.approx(len(PROMPT), rel=0.01)
    # More than one is committed.
    assert pace.prompt_ns[-1] < pace.prompt_ns[0]


def test_a_session_that_finds_no_room_is_not_drafted_and_takes_none(
    checkpoint: Path, draft_folder: Path, reference_model
):
    resident = Resident(checkpoint, draft_folder, slots=len(PROMPT) + 150)
    wanted, driver = plain_decode(reference_model, PROMPT, GREEDY).tokens, Driver(resident.loop)
    long = [*PROMPT, *wanted, *PROMPT, *wanted][:60]
    driver.open(1, replace(GREEDY, max_new_tokens=40), [], no_tree, prompt=long)
    driver.open(2, GREEDY, wanted, no_tree)
    driver.run()
    assert driver.decoded[2].tokens == wanted
    assert accepted(driver, 1) == 0 < accepted(driver, 2)
    resident.check_empty()


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": SpeculationMode.OFF},
        {"sources": [GrowthSource.NGRAM]},
        {"sampling": TARGET_ONLY},
    ],
    ids=["off", "n-grams", "target_only"],
)
def test_sessions_that_are_not_drafted_have_plain_rounds(resident: Resident, changes: dict[str, Any]):
    resident.loop.open(replace(open_request(1, replace(GREEDY, max_new_tokens=6)), **changes))
    steps, results = resident.drafter.steps, []
    while resident.loop.has_work:
        results += resident.loop.turn()
        assert resident.check_pools() == 0
    assert results and all(result.selected == 0 for result in results)
    assert resident.drafter.steps == steps


def test_in_sync_mode_every_round_verifies_a_whole_tree(checkpoint: Path, draft_folder: Path, reference_model):
    """Also of a session that waits for a draft worker's tree beside another's rounds, and if no step pays."""
    resident = Resident(checkpoint, draft_folder, steps=0)
    wanted = plain_decode(reference_model, PROMPT, GREEDY).tokens
    tokens, turns = dict[int, list[int]]({1: [], 2: []}), 0
    for number in tokens:
        request = open_request(number, GREEDY)
        resident.loop.open(replace(request, mode=SpeculationMode.SYNC, max_depth=2, sync_wait_ms=3_600_000))
    resident.loop.forget((7, 2), 1, 0)
    while resident.loop.session_count or resident.loop.has_work:
        turns += 1
        if turns % 4 == 0 and (7, 2) in resident.loop.keys:
            length = len(PROMPT) + len(tokens[2])
            resident.loop.grow(Growth.of_session((7, 2), 1, 0, length, [], [], [], [], is_complete=True))
        for result in resident.loop.turn():
            left = len(wanted) - len(tokens[result.key[1]])
            tokens[result.key[1]] += result.tokens
            # The root's children and, of one of them at least, its own.
            assert result.selected > 4 or left <= 2
    assert tokens == {1: wanted, 2: wanted}
    resident.check_empty()


def test_a_session_without_speculation_is_not_drafted_beside_one_with(resident: Resident):
    for number, mode in enumerate((SpeculationMode.OFF, SpeculationMode.ASYNC)):
        resident.loop.open(replace(open_request(number, GREEDY), mode=mode))
    selected, open_rows = [0, 0], set[int]()
    while resident.loop.has_work:
        for result in resident.loop.turn():
            selected[result.key[1]] += result.selected
        resident.check_pools()
        open_rows.add(int((resident.drafter.pool.state != RowState.EMPTY).sum()))
    assert selected[0] == 0 < selected[1]
    assert max(open_rows) == 1


def test_growth_of_others_joins_the_same_trees(resident: Resident, reference_model):
    wanted = plain_decode(reference_model, PROMPT, GREEDY).tokens
    driver = Driver(resident.loop, seed=4)
    decoded = driver.open(1, GREEDY, wanted, random_tree)
    driver.run()
    assert decoded.tokens == wanted
    drafters = {kinds for result in decoded.results for kinds in result.drafters}
    assert 1 << resident.drafter.source in drafters
    # The driver's nodes are of kind 0.
    assert any(kinds & 1 for kinds in drafters)


@pytest.fixture
def gpu_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a GPU, on whatever device steps run."""
    buckets_of = program.growth_buckets
    monkeypatch.setattr(
        program, "growth_buckets", lambda *args, **options: buckets_of(*args, **options | {"on_gpu": True})
    )


@pytest.mark.usefixtures("gpu_buckets")
def test_a_prompt_gets_a_bucket_that_holds_it(checkpoint: Path, reference_model):
    resident = Resident(checkpoint, checkpoint)
    wanted = plain_decode(reference_model, PROMPT, replace(GREEDY, max_new_tokens=60)).tokens
    driver = Driver(resident.loop)
    # The second begins while steps are small, with more rows than the smallest bucket has; the third with many.
    for number, known in enumerate((0, 8, 40)):
        spec = replace(GREEDY, max_new_tokens=16)
        decoded = driver.open(number, spec, wanted[known:], no_tree, prompt=[*PROMPT, *wanted[:known]])
        driver.run()
        assert decoded.tokens == wanted[known:][:16]
        assert accepted(driver, number) > 8
    resident.check_empty()


@pytest.mark.usefixtures("gpu_buckets")
def test_a_prompt_gets_no_larger_bucket_than_it_needs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "_PROMPT_RUNGS", (32, 64))
    resident, for_prompts = Resident(checkpoint, checkpoint), list[int]()
    steps, launch = resident.drafter._program, resident.drafter._program.launch

    def noted(bucket: int, *, processes: bool, is_first: bool) -> None:
        if steps.buckets[bucket].holds_prompts:
            for_prompts.append(steps.buckets[bucket].rows)
        launch(bucket, processes=processes, is_first=is_first)

    monkeypatch.setattr(steps, "launch", noted)
    driver = Driver(resident.loop)
    for number, length in enumerate((20, 50, 80)):
        driver.open(number, replace(GREEDY, max_new_tokens=12), [], no_tree, prompt=[7] * length)
        driver.run()
        assert accepted(driver, number) > 2
    assert for_prompts == [32, 64, steps.buckets[-1].rows]


@pytest.mark.usefixtures("gpu_buckets")
def test_where_one_rests_prompts_of_many_are_computed(checkpoint: Path, reference_model):
    """One takes turns with the others, so that now one and now seven of them go on."""
    resident = Resident(checkpoint, checkpoint)
    wanted = plain_decode(reference_model, PROMPT, replace(GREEDY, max_new_tokens=90)).tokens
    driver, spec = Driver(resident.loop), replace(GREEDY, max_new_tokens=24)
    for number in range(7):
        driver.open(number, spec, wanted[60:], no_tree, prompt=[*PROMPT, *wanted[:60]])
    resident.loop.separate((7, 0), 1, is_alone=True)
    driver.run()
    assert all(accepted(driver, number) > 12 for number in range(7))


class CountedHits(FixedSteps):
    """Keeps what it is told of rounds."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.hits = self.misses = 0

    def note_round(self, *, bare: float, hits: int, misses: int, time_ns: float) -> None:
        self.hits, self.misses = self.hits + hits, self.misses + misses


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_what_coins_reject_is_no_hit(rate, checkpoint: Path):
    resident = Resident(checkpoint, checkpoint)
    pace = resident.drafter.pace = CountedHits(3)
    rule = {"verification": VerificationRule.SYNTHETIC, "synthetic_rates": (rate,)}
    driver = Driver(resident.loop)
    for number in range(4):
        driver.open(number, replace(COUPLED, seed=number, max_new_tokens=40, **rule), [], no_tree)
    driver.run()
    # The drafter is always right, but for what a coin says.
    if rate:
        assert pace.hits > 100 and pace.misses < 10
    else:
        assert pace.hits == 0 and pace.misses > 100


def test_a_draft_with_a_shorter_context_rests_beyond_it(checkpoint: Path, reference_model, tmp_path: Path):
    sizes: dict[str, Any] = SIZES | {"max_position_embeddings": 20}
    short = LlamaForCausalLM(LlamaConfig(**sizes))
    short.load_state_dict(reference_model.state_dict())
    short.save_pretrained(tmp_path)
    resident = Resident(checkpoint, tmp_path)
    spec = replace(GREEDY, max_new_tokens=50)
    wanted = plain_decode(reference_model, PROMPT, spec).tokens
    driver = Driver(resident.loop)
    decoded = driver.open(1, spec, wanted, no_tree)
    # Its prompt is longer than all that the draft takes.
    prompt = [*PROMPT, *wanted[:30]]
    longer = driver.open(2, replace(spec, max_new_tokens=20), wanted[30:], no_tree, prompt=prompt)
    driver.run()
    assert (decoded.tokens, longer.tokens) == (wanted, wanted[30:])
    assert accepted(driver, 1) > 6
    assert sum(result.selected for result in longer.results) == 0
    resident.check_empty()


def test_a_draft_may_have_a_narrower_vocabulary(checkpoint: Path, reference_model, tmp_path: Path):
    write_llama(tmp_path, seed=2, vocab_size=40)
    resident = Resident(checkpoint, tmp_path)
    wanted = plain_decode(reference_model, PROMPT, COUPLED).tokens
    assert max(PROMPT) >= 40 and max(wanted) >= 40
    driver = Driver(resident.loop)
    decoded = driver.open(1, COUPLED, wanted, no_tree)
    driver.run()
    assert decoded.tokens == wanted
    assert sum(result.selected for result in decoded.results) > 0
    resident.check_empty()


def test_lost_growth_makes_the_drafter_begin_anew(checkpoint: Path, reference_model):
    # A drafter that is always right never begins anew by itself.
    sizes = {"capacity": 32, "max_session_rows": 4, "max_step_rows": 32}
    resident = Resident(checkpoint, checkpoint, steps=8, **sizes)
    spec = replace(GREEDY, max_new_tokens=80)
    wanted = plain_decode(reference_model, PROMPT, spec).tokens
    driver = Driver(resident.loop)
    decoded = driver.open(1, spec, wanted, no_tree)
    lost, was_lost = resident.program.pool.lost, False
    while resident.loop.has_work:
        if not was_lost:
            # Another's nodes below a path that takes several rounds: no room for what the drafter grows there.
            known = len(decoded.tokens)
            path = wanted[known : known + 12]
            filling = [token for token in range(61) if [token] != wanted[known + 12 : known + 13]][:30]
            driver.grow(1, (path + filling, [*range(12), *[12] * 30]), as_of=len(PROMPT) + known)
        driver.turn()
        was_lost |= bool(lost[:, resident.drafter.place].any())
    assert decoded.tokens == wanted
    assert was_lost and not lost[:, resident.drafter.place].any()
    assert sum(result.accepted for result in decoded.results[-8:]) >= 12
    resident.check_empty()


def test_other_weights_close_the_sessions_of_both(resident: Resident, checkpoint: Path, reference_model):
    driver = Driver(resident.loop)
    driver.open(1, GREEDY, [], no_tree)
    for _ in range(4):
        driver.turn()
    resident.loop.reload(checkpoint)
    driver.run()
    resident.check_empty()
    wanted = plain_decode(reference_model, PROMPT, GREEDY).tokens
    decoded = driver.open(2, GREEDY, wanted, no_tree)
    driver.run()
    assert decoded.tokens == wanted
    assert accepted(driver, 2) > 0


def test_random_opens_closes_and_holds_keep_both_pools_in_step(checkpoint: Path, draft_folder: Path, reference_model):
    rng = random.Random(17)
    resident = Resident(checkpoint, draft_folder, num_slots=150, chunk=9, max_step_rows=24, max_session_rows=8)
    shared = 0

    def turned() -> None:
        nonlocal shared
        shared += resident.check_pools()
        resident.drafter.pace = FixedSteps(rng.choice([0, 1, 3, 8]))

    driver = Driver(resident.loop, seed=3)
    makers = [no_tree, no_tree, random_tree]
    accepted = live(driver, random_cases(reference_model, rng), rng, makers=makers, turned=turned)
    resident.check_empty()
    assert shared > ROUNDS and accepted > ROUNDS / 4
