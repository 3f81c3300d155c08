"""Logits over rows that a pool has packed, with padding and without, against a fresh forward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.outrider.engine.families import SIZES, VOCAB
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

from outrider.engine.config import EngineConfig
from outrider.engine.decoder import Decoder
from outrider.engine.decoder_loading import load_decoder
from outrider.engine.kv_memory import KvCaches
from outrider.engine.packed_forward import PackedForward
from outrider.engine.tensor_parallel_ranks import Ranks
from outrider.kernels.pool.append import append
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import ROOT, Packed, pack
from outrider.kernels.pool.re_root import re_root
from outrider.kernels.pool.records import Records
from outrider.kernels.pool.select import Selection, select
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention

SLOTS, CHILDREN, MAX_LEN, NODES = 256, 3, 96, 32
BUCKET = (40, 3, 24, 8)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


class Drafting:
    """A pool of three sessions whose trees grow by random children, step by step."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)
        self.pool = Pool.allocate(sessions=3, max_len=MAX_LEN, capacity=NODES, places=1, trail=2, node_slots=SLOTS)
        assert self.pool.nodes is not None
        self.pool.nodes.free[:] = torch.arange(SLOTS, dtype=torch.int32)
        self.pool.nodes.free_tail.fill_(SLOTS)
        self._selection = Selection.allocate(self.pool, [BUCKET])
        self.packed = Packed.allocate(self.pool, BUCKET, scrap_slot=SLOTS)
        records = Records()
        for row, length in enumerate((7, 20, 3)):
            self.pool.history[row, :length] = torch.from_numpy(self.random.integers(0, VOCAB, length))
            records.open(row, 1, length=length, cached=0, end=MAX_LEN, allow=MAX_LEN)
        self._apply(records)

    def commit(self) -> None:
        """Commit the token of one child of every root, if it has one, and perhaps another one."""
        records = Records()
        for row in range(3):
            count = int(self.pool.count[row])
            children = self.pool.token[row, :count][self.pool.depth[row, :count] == 1]
            tokens = children[:1].tolist() if self.random.random() < 0.7 else []
            tokens += [int(self.random.integers(VOCAB))] if self.random.random() < 0.4 else []
            if tokens:
                records.commit(row, 1, tokens)
        self._apply(records)

    def _apply(self, records: Records) -> None:
        words = torch.from_numpy(records.array())
        count, verdicts, commits, num_commits = torch.tensor([len(words)]).int(), ints(len(words)), ints(3, 8), ints(3)
        graft(self.pool, words, count, verdicts, commits, num_commits)
        re_root(self.pool, commits, num_commits)

    def select(self) -> list[tuple[int, list[int]]]:
        """Pack a step; the rows that bring children, each with the tokens up to its own."""
        pool, packed = self.pool, self.packed
        select(pool, self._selection, 0, children=CHILDREN, chunk=16)
        pack(pool, self._selection, packed)
        found = []
        for row in np.flatnonzero(packed.entries.numpy() >= ROOT).tolist():
            session, entry = int(packed.pool_rows[packed.sessions[row]]), int(packed.entries[row])
            path = list[int]()
            while entry >= 0:
                path.insert(0, int(pool.token[session, entry]))
                entry = int(pool.parent[session, entry])
            found.append((row, pool.history[session, : int(pool.length[session])].tolist() + path))
        return found

    def grow(self) -> None:
        """Give every row of the step children."""
        shape = (BUCKET[0], CHILDREN)
        tokens = torch.stack([torch.randperm(VOCAB)[:CHILDREN] for _ in range(BUCKET[0])]).int()
        append(self.pool, self.packed, tokens, torch.rand(shape), ints(*shape), ints(BUCKET[0]))


def caches() -> KvCaches:
    keys, values = ([torch.zeros(SLOTS, 2, 16) for _ in range(SIZES["num_hidden_layers"])] for _ in range(2))
    return KvCaches(keys=keys, values=values, positions=torch.zeros(SLOTS, dtype=torch.int32))


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=6)], ids=["full", "window"]
)
def test_logits_with_and_without_padding_are_those_of_a_fresh_forward(tmp_path: Path, config: PretrainedConfig):
    torch.manual_seed(3)
    own: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    own.save_pretrained(tmp_path)
    engine = EngineConfig(
        model_path=tmp_path, num_slots=SLOTS, max_num_seqs=3, max_model_len=MAX_LEN, max_tree_nodes=NODES,
        torch_threads=1,
    )  # fmt: skip
    decoder, _ = load_decoder(engine, None, Ranks(torch.device("cpu")))
    forwards = [
        PackedForward(
            decoder, caches(), sessions=3, row_len=MAX_LEN + NODES, ranks=Ranks(torch.device("cpu")), trims=trims
        )
        for trims in (False, True)
    ]
    drafting, checked = Drafting(), 0
    for step in range(14):
        rows = drafting.select()
        places = torch.tensor([row for row, _ in rows], dtype=torch.int64)
        found = [forward.logits(drafting.packed, drafting.pool, places, most=BUCKET[2]).float() for forward in forwards]
        for line, (_, context) in enumerate(rows):
            with torch.inference_mode():
                expected = own(torch.tensor([context])).logits[0, -1]
            for logits in found:
                torch.testing.assert_close(logits[line], expected, atol=2e-4, rtol=1e-3)
            checked += 1
        assert [logits.shape for logits in found] == [(len(rows), VOCAB)] * 2
        count = int(drafting.packed.query_start[-1])
        for forward, logits in zip(forwards, found, strict=True):
            again = forward.logits(drafting.packed, drafting.pool, places, most=BUCKET[2], count=count).float()
            torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-5)
        # A chunk of a prompt has no row whose logits are wanted.
        for forward in forwards:
            assert forward.logits(drafting.packed, drafting.pool, places[:0], most=BUCKET[2]).shape == (0, VOCAB)
        drafting.grow()
        if step % 3 == 2:
            drafting.commit()
    assert checked > 60


def test_deterministic_passes_name_paths_and_splits(tmp_path: Path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    batches = list[TreeAttentionBatch]()

    def attend(*tensors: Any, **numbers: Any) -> torch.Tensor:
        batches.append(tensors[3])
        return tree_attention(*tensors, **numbers)

    loaded, _ = load_decoder(EngineConfig(model_path=tmp_path), None, Ranks(torch.device("cpu")))
    forward = PackedForward(
        Decoder(loaded.spec, loaded.weights, attend=attend, fixed=True),
        caches(), sessions=3, row_len=20_000, ranks=Ranks(torch.device("cpu")), fixed=True,
    )  # fmt: skip
    drafting, nodes = Drafting(), 0
    assert drafting.pool.nodes is not None
    for step in range(14):
        drafting.select()
        forward.logits(drafting.packed, drafting.pool, torch.tensor([0]), most=1)
        batch, pool, packed = batches[-1], drafting.pool, drafting.packed
        # So many keys that no session has more than sixteen splits; rows enough for the largest tiles.
        assert (batch.split_keys, batch.max_query_len) == (1250, 64)
        assert batch.paths is not None
        for row in range(int(packed.query_start[-1])):
            session, entry, slots = int(packed.pool_rows[packed.sessions[row]]), int(packed.entries[row]), list[int]()
            while entry >= 0:
                slots.insert(0, int(drafting.pool.nodes.slot[session, entry]))
                entry = int(pool.parent[session, entry])
            nodes += len(slots) > 1
            assert batch.paths[row].tolist() == slots + [-1] * (batch.paths.shape[1] - len(slots))
        drafting.grow()
        if step % 3 == 2:
            drafting.commit()
    assert nodes > 10
