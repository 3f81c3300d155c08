"""EAGLE heads of both layouts against plain torch, path by path; what the loader refuses; on CUDA, also captured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.outrider.engine.families import SIZES, VOCAB
from tests.outrider.engine.plain_eagle import PlainHead
from tests.outrider.engine.random_eagle import write_random_eagle
from tests.outrider.engine.step_rows import StepBuilder, StepRows, ancestor_masks, node_depths
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import load_decoder_weights
from outrider.engine.eagle import BlockHead, EagleHead, load_eagle_head
from outrider.engine.eagle_spec import EagleLayout
from outrider.engine.kv_slots import SlotTable
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError

HIDDEN, SLOTS, DRAFT_VOCAB = 32, 96, 40
LAYOUTS: list[EagleLayout] = ["eagle1", "eagle3"]
# 0 is the root; two branches, one of them forking again. Levels are drafted one after the other.
PARENTS = [0, 0, 1, 1, 2, 3]
NODES = [11, 22, 33, 44, 55, 66]
LEVELS = [[1, 2], [3, 4, 5], [6]]
LENGTHS = [9, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 5})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load_head(folder: Path, target: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> EagleHead:
    spec = DecoderSpec.of(AutoConfig.from_pretrained(target).to_dict())
    weights = load_decoder_weights(SafetensorsSource(target), spec, device, dtype)
    return load_eagle_head(
        folder, embedding=weights.embedding, output=weights.head, target_layers=len(weights.layers),
        max_positions=weights.rotary_tables[0].shape[0],
    )  # fmt: skip


class Session:
    """A head with its caches, driven by batches as the target is."""

    def __init__(self, head: EagleHead) -> None:
        self.head, self.slots = head, SlotTable(num_slots=SLOTS, max_rows=4, max_row_len=SLOTS)
        embedding = head.weights.embedding
        self.device, shape = embedding.device, (SLOTS, head.kv_heads, head.head_dim)
        self.caches = [torch.zeros(shape, dtype=embedding.dtype, device=self.device) for _ in range(2)]
        self.rows = range(len(LENGTHS))

    def builder(self) -> StepBuilder:
        return StepBuilder(self.slots, self.device)

    def arguments(self, step: StepRows) -> dict[str, Any]:
        packed = step.packed
        return {
            "token_ids": packed.tokens,
            "positions": packed.positions,
            "write_slots": packed.slots,
            "batch": step.attention(),
            "key_cache": self.caches[0],
            "value_cache": self.caches[1],
        }

    def extend(self, features: Sequence[torch.Tensor], tokens: Sequence[list[int]], *, begin: int) -> torch.Tensor:
        """Rows with features from position `begin` on, of all sessions; hidden [rows, N]."""
        builder = self.builder()
        for row, ours, given in zip(self.rows, features, tokens, strict=True):
            if self.slots.length(row) < begin + len(ours):
                self.slots.extend(row, begin + len(ours) - self.slots.length(row))
            builder.add_chain(row, given[begin : begin + len(ours)], begin, False)
        return self.head.forward(self.head.fuse(torch.cat(list(features))), **self.arguments(builder.build()))

    def level_step(self, level: Sequence[int], lengths: Sequence[int]) -> StepRows:
        depths, masks = node_depths(PARENTS), ancestor_masks(PARENTS)
        builder = self.builder()
        for row, length in zip(self.rows, lengths, strict=True):
            builder.add_tree(
                row,
                [NODES[node - 1] for node in level],
                tree_start=length,
                positions=[length - 1 + depths[node] for node in level],
                masks=masks[level] >> 1,  # the root is no entry of its own: it is the last row before the tree
                write_indices=[length + node - 1 for node in level],
            )
        return builder.build()

    def draft(self, last: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Hidden [sessions, nodes, N] of the tree under each session's last row, level by level."""
        for row in self.rows:
            self.slots.extend(row, len(NODES))
        hidden = torch.empty((len(lengths), 1 + len(NODES), last.shape[1]), dtype=last.dtype, device=last.device)
        hidden[:, 0] = last
        for level in LEVELS:
            entering = hidden[:, [PARENTS[node - 1] for node in level]].flatten(0, 1)
            before = entering.clone()
            rows = self.head.forward(entering, **self.arguments(self.level_step(level, lengths)))
            assert torch.equal(entering, before)
            hidden[:, level] = rows.view(len(lengths), len(level), -1)
        return hidden[:, 1:]


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def path_to(node: int) -> list[int]:
    path = []
    while node:
        path.insert(0, NODES[node - 1])
        node = PARENTS[node - 1]
    return path


def random_texts(head: EagleHead) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return each session's features, of more positions than its length, and the tokens after them."""
    generator = torch.Generator().manual_seed(3)
    features = [torch.randn((length + 4, len(head.taps) * HIDDEN), generator=generator) for length in LENGTHS]
    tokens = [torch.randint(VOCAB, (length + 4,), generator=generator).tolist() for length in LENGTHS]
    return features, tokens


def run_trees(session: Session, features: Sequence[torch.Tensor], tokens: Sequence[list[int]]) -> torch.Tensor:
    """Logits [sessions, nodes, V] of the tree under texts that came in two chunks."""
    put = [ours.to(session.device, session.caches[0].dtype) for ours in features]
    session.extend([ours[:5] for ours in put], tokens, begin=0)
    # The second chunk differs in length, so it comes session by session in one batch.
    builder, parts = session.builder(), []
    for row, ours, given, length in zip(session.rows, put, tokens, LENGTHS, strict=True):
        session.slots.extend(row, length - 5)
        builder.add_chain(row, given[5:length], 5, False)
        parts.append(ours[5:length])
    hidden = session.head.forward(session.head.fuse(torch.cat(parts)), **session.arguments(builder.build()))
    ends = np.cumsum([length - 5 for length in LENGTHS]) - 1
    nodes = session.draft(hidden[ends.tolist()], LENGTHS)
    return session.head.logits(nodes.flatten(0, 1)).view(*nodes.shape[:2], -1)


KINDS = {
    "eagle1": ("eagle1", None, {}),
    "eagle3": ("eagle3", None, {}),
    "eagle3, fewer tokens": ("eagle3", DRAFT_VOCAB, {}),
    "eagle3, normed stream": ("eagle3", None, {"norm_before_residual": True}),
}


def test_a_head_whose_weights_do_not_fit_says_what_to_change(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_eagle(tmp_path, target)

    def full(*_arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "to", full)
    embedding = torch.zeros(VOCAB, HIDDEN)
    with pytest.raises(CheckpointError, match=r"do not fit on cpu beside the target: lower kv_cache_memory_fraction"):
        load_eagle_head(tmp_path, embedding=embedding, output=embedding, target_layers=5, max_positions=16)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_trees_equal_every_path_alone(kind: str, target: Path, tmp_path: Path) -> None:
    layout, draft_vocab, more = KINDS[kind]
    write_random_eagle(tmp_path, target, layout=layout, draft_vocab_size=draft_vocab)
    change_config(tmp_path, more)
    session, plain = Session(load_head(tmp_path, target)), PlainHead(tmp_path, target)
    features, tokens = random_texts(session.head)
    logits = run_trees(session, features, tokens)
    for place, length in enumerate(LENGTHS):
        for node in range(1, len(NODES) + 1):
            expected = plain.path(features[place][:length], tokens[place][:length], path_to(node))
            torch.testing.assert_close(logits[place, node - 1].double(), expected, rtol=1e-4, atol=1e-4)
    assert int((logits > float("-inf")).sum(-1).unique()) == (draft_vocab or VOCAB)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefixed_and_older_names_load_as_well(layout: EagleLayout, target: Path, tmp_path: Path) -> None:
    write_random_eagle(tmp_path, target, layout=layout)
    expected = load_head(tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.{name}".replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    save_file({**renamed, "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}, tmp_path / "model.safetensors")
    head = load_head(tmp_path, target)
    assert torch.equal(head.weights.qkv, expected.weights.qkv)
    assert torch.equal(head.weights.embedding, expected.weights.embedding)


def test_a_vocabulary_cut_at_its_end_needs_no_map(target: Path, tmp_path: Path) -> None:
    write_random_eagle(tmp_path, target, draft_vocab_size=DRAFT_VOCAB)
    rows = torch.randn(3, HIDDEN)
    mapped = load_head(tmp_path, target)
    assert mapped.target_ids is not None
    assert torch.equal(mapped.logits(rows)[:, mapped.target_ids], mapped.draft_logits(rows))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "d2t": torch.zeros_like(tensors["d2t"])}, tmp_path / "model.safetensors")
    head = load_head(tmp_path, target)
    assert head.target_ids is None
    assert torch.equal(head.logits(rows)[:, :DRAFT_VOCAB], mapped.draft_logits(rows))
    assert (head.logits(rows)[:, DRAFT_VOCAB:] == float("-inf")).all()


def test_taps(target: Path, tmp_path: Path) -> None:
    write_random_eagle(tmp_path, target, taps=(1, 3, 5))
    head = load_head(tmp_path, target)
    assert (head.taps, head.weights.fc.shape[1]) == ((1, 3, 5), 3 * HIDDEN)
    change_config(tmp_path, {"eagle_config": None})
    assert load_head(tmp_path, target).taps == (2, 2, 2)
    change_config(tmp_path, {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})
    with pytest.raises(CheckpointError, match=r"is \[1, 3, 6\], layers 0 to 5 needed"):
        load_head(tmp_path, target)
    change_config(tmp_path, {"eagle_aux_hidden_state_layer_ids": 3})
    with pytest.raises(CheckpointError, match="is 3, a list of layers needed"):
        load_head(tmp_path, target)


REFUSED: dict[str, tuple[dict[str, torch.Tensor | None], dict[str, Any], str]] = {
    "a missing norm": ({"midlayer.hidden_norm.weight": None}, {}, r"midlayer\.hidden_norm\.weight first"),
    "a missing fc": ({"fc.weight": None}, {}, r"fc\.weight first"),
    "a narrow attention": (
        {"midlayer.self_attn.q_proj.weight": torch.zeros(64, HIDDEN)},
        {},
        r"midlayer\.self_attn\.q_proj\.weight has shape \[64, 32\], \[64, 64\] needed",
    ),
    "no output layer": ({"lm_head.weight": None}, {}, r"lm_head\.weight first"),
    "no map": ({"d2t": None}, {}, "d2t is missing: 40 of 97 tokens"),
    "a short map": ({"d2t": torch.zeros(7, dtype=torch.int64)}, {}, r"d2t: \[7\] torch.int64 given, \[40\]"),
    "a map to nowhere": ({"d2t": torch.full((40,), 90)}, {}, "outside the 97"),
    "a block of one": ({}, {"block_size": 1}, "block_size is 1, a whole number of at least 2 needed"),
    "a block without a rank": ({}, {"block_size": 4}, "block_rank is None, a whole number of at least 1 needed"),
    "a block without masks": ({}, {"block_size": 4, "block_rank": 6}, r"previous\.weight first"),
    "a block of another size": (
        {
            "previous.weight": torch.zeros(6, HIDDEN),
            "following.weight": torch.zeros(HIDDEN, 6),
            "mask_embedding.weight": torch.zeros(3, HIDDEN),
        },
        {"block_size": 4, "block_rank": 6},
        r"mask_embedding\.weight has shape \[3, 32\], \[4, 32\] needed",
    ),
    "another vocabulary": ({}, {"vocab_size": 96}, "vocab_size is 96, the target has 97"),
    "two layers": ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2, 1 needed"),
    "another family": ({}, {"model_type": "mixtral"}, "model_type is 'mixtral'"),
    "some biases": (
        {"midlayer.self_attn.q_proj.bias": torch.zeros(64)},
        {},
        "biases of some of q_proj, k_proj and v_proj are missing",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_by_name(fault: str, target: Path, tmp_path: Path) -> None:
    tensors, config, message = REFUSED[fault]
    write_random_eagle(tmp_path, target, draft_vocab_size=DRAFT_VOCAB)
    file = tmp_path / "model.safetensors"
    held = {**load_file(file), **tensors}
    save_file({name: value for name, value in held.items() if value is not None}, file)
    change_config(tmp_path, config)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, target)


def test_only_a_head_of_the_third_layout_has_a_block(target: Path, tmp_path: Path) -> None:
    write_random_eagle(tmp_path, target, layout="eagle1")
    change_config(tmp_path, {"block_size": 4, "block_rank": 6})
    with pytest.raises(CheckpointError, match="block_size is given, which a head of the eagle3 layout alone has"):
        load_head(tmp_path, target)


def test_a_block_s_bias_follows_the_weights_of_its_target(target: Path, tmp_path: Path) -> None:
    write_random_eagle(tmp_path, target, block_size=4)
    embedding, output = torch.randn(2, VOCAB, HIDDEN).unbind()

    def load() -> BlockHead:
        head = load_eagle_head(tmp_path, embedding=embedding, output=output, target_layers=5, max_positions=16)
        assert isinstance(head, BlockHead)
        return head

    block, tokens = load(), torch.arange(VOCAB)
    first = block.bias(tokens)
    for weights in (embedding, output):
        weights.normal_()
    block.refill()
    assert torch.equal(block.bias(tokens), load().bias(tokens))
    assert not torch.allclose(block.bias(tokens), first, atol=0.1)


def test_folders_without_a_head_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load_head(tmp_path, target)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_head(tmp_path, target)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_head(tmp_path, target)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_on_cuda_directly_and_captured(kind: str, target: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layout, draft_vocab, more = KINDS[kind]
    write_random_eagle(tmp_path, target, layout=layout, draft_vocab_size=draft_vocab)
    change_config(tmp_path, more)
    session = Session(load_head(tmp_path, target, device="cuda", dtype=torch.bfloat16))
    features, tokens = random_texts(session.head)
    logits = run_trees(session, features, tokens).float()
    exact = run_trees(Session(load_head(tmp_path, target)), features, tokens).cuda()
    real = exact > float("-inf")
    assert torch.equal(real, logits > float("-inf"))
    difference = (logits - exact)[real].norm() / exact[real].norm()
    assert difference < 0.03
    arguments = session.arguments(session.level_step(LEVELS[0], LENGTHS))
    hidden = torch.randn(len(arguments["token_ids"]), HIDDEN, device="cuda", dtype=torch.bfloat16)
    head = session.head
    expected = head.logits(head.forward(hidden, **arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = head.logits(head.forward(hidden, **arguments))
    with torch.inference_mode():
        captured.fill_(float("nan"))
        session.caches[0][arguments["write_slots"].long()] = float("nan")  # the replay has to write them
    graph.replay()
    assert torch.equal(captured, expected)
