"""A widened head drafts what the small one does on the widened target's features; the check sees what differs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.outrider.engine.random_eagle import write_random_eagle
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider import cli
from outrider.engine.eagle import EagleHead, load_eagle_head
from outrider.engine.eagle_spec import EagleLayout
from outrider.errors import CheckpointError
from outrider.kernels.tree_attention import tree_attention_reference
from outrider.models import embedded_draft_path, widen
from outrider.models.widen import load_small, plan_checkpoint, write_checkpoint
from outrider.models.widen_eagle_check import check_eagle, drafting_steps, target_streams
from outrider.models.widened_eagle import WidenedEagle
from outrider.models.widened_weights import LlamaShape, WidenedLlama

WIDE = LlamaShape(hidden=64, layers=5, heads=8, kv_heads=4, intermediate=80, vocab=160)
WIDE_PAIR = LlamaShape(hidden=768, layers=6, heads=6, kv_heads=6, intermediate=2400, vocab=8400)
SMALL_VOCAB, DRAFT_VOCAB = 96, 120


@pytest.fixture(params=["head", "block"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A target of three layers with loud weights, and a head or a block drafter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, vocab_size=SMALL_VOCAB, rms_norm_eps=1e-2, initializer_range=0.5,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_draft_path() / name, tmp_path / "target")
    block_size = 4 if request.param == "block" else None
    head = write_random_eagle(tmp_path / "head", tmp_path / "target", taps=(0, 2, 3), block_size=block_size)
    return tmp_path / "target", head


def widened(
    small: tuple[Path, Path], folder: Path, *, dtype: torch.dtype = torch.float32, fill_seed: int | None = 0
) -> WidenedLlama:
    """Writes both widened models into `folder`; the target's tensors."""
    target, head = small
    config, weights = load_small(target)
    options = {"dtype": dtype, "fill_seed": fill_seed}
    wide = WidenedLlama(config, weights, WIDE, **options)
    embedding = weights["model.embed_tokens.weight"]
    eagle = WidenedEagle(
        *load_small(head), target=config, embedding=embedding, shape=WIDE, draft_vocab=DRAFT_VOCAB, **options
    )
    folder.mkdir(exist_ok=True)
    for model, source, name in ((wide, target, "target"), (eagle, head, "head")):
        plan = plan_checkpoint(model, source, max_shard_bytes=2_000_000)
        write_checkpoint(
            model, source, folder / name, plan, before_publishing=lambda _: None, on_written=lambda _: None
        )
    return wide


def random_tokens() -> torch.Tensor:
    return torch.randint(SMALL_VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def load(folder: Path, table: torch.Tensor, layers: int) -> EagleHead:
    return load_eagle_head(
        folder, embedding=table, output=table, target_layers=layers, max_positions=64, attend=tree_attention_reference
    )


def drafted(target: Path, head: Path) -> tuple[torch.Tensor, EagleHead]:
    """[rows, V] of both steps, on what the target's own layers say."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    loaded = load(head, model.get_input_embeddings().weight.detach(), model.config.num_hidden_layers)
    with torch.inference_mode():
        streams = target_streams(model, random_tokens(), loaded.taps)
    return torch.cat([logits for stream in streams for logits in drafting_steps(loaded, *stream)]), loaded


def test_both_widened_together_draft_the_same(small: tuple[Path, Path], tmp_path: Path) -> None:
    widened(small, tmp_path / "wide")
    expected, _ = drafted(*small)
    found, head = drafted(tmp_path / "wide" / "target", tmp_path / "wide" / "head")
    assert head.taps == (0, 3, 5)
    torch.testing.assert_close(found[:, :SMALL_VOCAB], expected, rtol=0, atol=2e-4)
    assert found[:, SMALL_VOCAB:DRAFT_VOCAB].max() < -50
    assert (found[:, DRAFT_VOCAB:] == float("-inf")).all()


def test_the_check_agrees_and_random_weights_do_not_matter(small: tuple[Path, Path], tmp_path: Path) -> None:
    reports = []
    for name, seed in (("zeros", None), ("filled", 3)):
        wide = widened(small, tmp_path / name, fill_seed=seed)
        reports.append(check_eagle(tmp_path / name / "head", small[1], small[0], wide, random_tokens()))
        reports[-1].raise_if_wrong()
    assert reports[0] == reports[1]
    assert reports[0].same_choice == 1
    filled = load_file(tmp_path / "filled" / "head" / "model-00001-of-00001.safetensors")
    assert (filled["midlayer.self_attn.q_proj.weight"] == 0).float().mean() == 0
    wide = widened(small, tmp_path / "rounded", dtype=torch.bfloat16)
    check_eagle(tmp_path / "rounded" / "head", small[1], small[0], wide, random_tokens()).raise_if_wrong()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", lambda t: t[30, 3].fill_(1.0), "logits differ"),
        ("midlayer.hidden_norm.weight", lambda t: t.mul_(1.05), "logits differ"),
        ("midlayer.self_attn.o_proj.weight", lambda t: t[:, -1].fill_(0.5), "logits differ"),
        ("norm.weight", lambda t: t.fill_(float("nan")), "logits differ by nan"),
        ("lm_head.weight", lambda t: t[-1].fill_(0), r"padding entries reach logit 0\.0"),
    ],
)
def test_the_check_sees_a_wrong_weight(
    small: tuple[Path, Path], tmp_path: Path, name: str, change: Callable[[torch.Tensor], object], message: str
) -> None:
    wide = widened(small, tmp_path / "wide")
    file = tmp_path / "wide" / "head" / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        check_eagle(tmp_path / "wide" / "head", small[1], small[0], wide, random_tokens()).raise_if_wrong()


def test_heads_that_cannot_be_widened(small: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = small
    config, weights = load_small(target)
    kinds: list[tuple[EagleLayout, int | None]] = [("eagle1", None), ("eagle3", 40)]
    for layout, vocab in kinds:
        head = write_random_eagle(tmp_path / f"{layout}-{vocab}", target, layout=layout, draft_vocab_size=vocab)
        with pytest.raises(ValueError, match="an EAGLE-3 head with the target's whole vocabulary"):
            WidenedEagle(
                *load_small(head), target=config, embedding=weights["model.embed_tokens.weight"], shape=WIDE,
                dtype=torch.float32, fill_seed=0,
            )  # fmt: skip


def test_published_sizes(small: tuple[Path, Path]) -> None:
    """Shapes alone: the head of an 8B target has as many weights as the published ones."""
    config, weights = load_small(small[0])
    options: dict[str, Any] = {"target": config, "embedding": weights["model.embed_tokens.weight"], "fill_seed": None}
    options |= {"shape": widen.SHAPES["8b"], "dtype": torch.bfloat16}
    shapes = WidenedEagle(*load_small(small[1]), **options).tensor_shapes()
    assert shapes["fc.weight"] == (4096, 12288)
    # head_dim is the small model's: 16 instead of 128 channels for each of 32 query and 8 key and value heads
    assert shapes["midlayer.self_attn.q_proj.weight"] == (32 * 16, 8192)
    assert shapes["midlayer.self_attn.v_proj.weight"] == (8 * 16, 8192)
    assert shapes["midlayer.mlp.down_proj.weight"] == (4096, 14336)
    assert shapes["lm_head.weight"] == (32_000, 4096)
    assert (shapes["d2t"], shapes["t2d"]) == ((32_000,), (128_256,))
    larger = WidenedEagle(*load_small(small[1]), **options, draft_vocab=SMALL_VOCAB)
    assert larger.tensor_shapes()["lm_head.weight"] == (128, 4096)


@pytest.mark.parametrize("role", ["eagle", "block"])
def test_the_command(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(widen.SHAPES, "160m", WIDE_PAIR)
    folder = tmp_path / "wide"
    assert cli.run(["widen", role, "160m", str(folder), "--max-position-embeddings", "8192"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder}\n"
    assert "checked: at " in err
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"], config["max_position_embeddings"]) == (8400, 8400, 8192)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
