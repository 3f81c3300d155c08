"""Widened checkpoints: the same logits in a larger shape, written in shards, all or nothing."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider import cli
from outrider.errors import CheckpointError
from outrider.models import embedded_draft_path, widen
from outrider.models.widen import load_small, plan_checkpoint, write_checkpoint
from outrider.models.widen_check import check_checkpoint, check_tokens
from outrider.models.widened_weights import LlamaShape, WidenedLlama, place_heads
from outrider.tokenizer_hash import tokenizer_hash

TINY = LlamaShape(hidden=48, layers=4, heads=8, kv_heads=4, intermediate=80, vocab=160)
WIDE_DRAFT = LlamaShape(hidden=192, layers=3, heads=6, kv_heads=6, intermediate=800, vocab=8200)
SHARD_BYTES = 20_000


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Makes a random Llama with loud weights, so that every part of it matters to its logits."""

    def make(heads: int = 3, kv_heads: int = 1) -> Path:
        torch.manual_seed(heads)
        config = LlamaConfig(
            hidden_size=27 if heads == 9 else 24,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=16,
            intermediate_size=32,
            vocab_size=96,
            rms_norm_eps=1e-2,
            initializer_range=0.5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, -1, 2)
        model.save_pretrained(tmp_path / "small")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded_draft_path() / name, tmp_path / "small")
        return tmp_path / "small"

    return make


def write(
    source: Path,
    folder: Path,
    shape: LlamaShape,
    *,
    dtype: torch.dtype = torch.float32,
    fill_seed: int | None = 0,
    before_publishing: Callable[[Path], None] = lambda _: None,
    max_positions: int | None = None,
) -> Path:
    model = WidenedLlama(
        *load_small(source), shape, dtype=dtype, fill_seed=fill_seed, max_position_embeddings=max_positions
    )
    plan = plan_checkpoint(model, source, max_shard_bytes=SHARD_BYTES)
    write_checkpoint(model, source, folder, plan, before_publishing=before_publishing, on_written=lambda _: None)
    return folder


def random_tokens() -> torch.Tensor:
    return torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(random_tokens()).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("own", "wide"),
    [
        ((3, 1), (8, 2)),  # a group with room to spare
        ((4, 1), (6, 6)),  # the key/value head four times
        ((9, 3), (16, 4)),  # SmolLM2's in the 8B shape's proportion: groups of 3 into groups of 4
        ((6, 2), (8, 4)),  # groups of 3 into groups of 2: twice each, the second half empty
        ((4, 4), (8, 4)),  # groups of 1 into groups of 2
        ((4, 2), (4, 2)),  # nothing to place
    ],
)
@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_logits_are_equal_for_every_grouping(
    small: Callable[..., Path], tmp_path: Path, own: tuple[int, int], wide: tuple[int, int], layer_by_layer: bool
) -> None:
    source = small(*own)
    folder = write(source, tmp_path / "wide", replace(TINY, heads=wide[0], kv_heads=wide[1]))
    report = check_checkpoint(folder, source, random_tokens(), layer_by_layer=layer_by_layer)
    report.raise_if_wrong()
    assert report.largest_difference < 3e-4  # float32 sums in another order
    assert report.padding_logit < -50
    assert report.same_choice == 1
    torch.testing.assert_close(logits(folder)[..., :96], logits(source), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_tokens_that_share_a_row(small: Callable[..., Path], tmp_path: Path, layer_by_layer: bool) -> None:
    """The small checkpoint stores their row once, the large one has as many as any."""
    source = small()
    name = "model.embed_tokens.weight"
    weights, row_of = tensors(source), torch.arange(96).clamp(max=30)
    whole = Path(shutil.copytree(source, tmp_path / "whole"))
    save_file(weights | {name: weights[name][row_of]}, whole / "model.safetensors", metadata={"format": "pt"})
    stored = {name: weights[name][:31].contiguous(), f"{name}_rows": row_of.int()}
    save_file(weights | stored, source / "model.safetensors")
    folder = write(source, tmp_path / "wide", TINY)
    check_checkpoint(folder, source, random_tokens(), layer_by_layer=layer_by_layer).raise_if_wrong()
    torch.testing.assert_close(logits(folder)[..., :96], logits(whole), rtol=0, atol=1e-4)


def test_places_of_heads() -> None:
    places = place_heads(replace(TINY, heads=6, kv_heads=2), replace(TINY, heads=10, kv_heads=5))
    assert places.query == (0, 1, 2, 4, 5, 6)
    assert places.kv == ((0, 0), (1, 0), (2, 1), (3, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 2, "heads": 2}, "kv_heads: 2 given, 3 needed"),
        ({"heads": 9}, "heads: 9 given, a multiple of 4"),
        ({"hidden": 50}, "hidden: 50 given, a multiple of 8 heads"),
        ({"hidden": 24}, "hidden: 24 given, at least 25"),
        ({"layers": 1}, "layers: 1 given, at least 2"),
        ({"intermediate": 31}, "intermediate: 31 given, at least 32"),
        ({"vocab": 96}, "vocab: 96 given, at least 97"),
    ],
)
def test_shapes_that_do_not_fit(small: Callable[..., Path], change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WidenedLlama(*load_small(small()), replace(TINY, **change), dtype=torch.float32, fill_seed=0)


@pytest.mark.parametrize("given", [{"model_type": "qwen2"}, {"tie_word_embeddings": False}, {"attention_bias": True}])
def test_other_architectures_are_refused(small: Callable[..., Path], given: dict[str, object]) -> None:
    config, weights = load_small(small())
    with pytest.raises(ValueError, match=f"{next(iter(given))}.* given, .* needed"):
        WidenedLlama(config | given, weights, TINY, dtype=torch.float32, fill_seed=0)


def test_shards_index_and_settings(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    folder = write(source, tmp_path / "wide", TINY, dtype=torch.bfloat16)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["weight_map"] == {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(folder).values())
    assert all(sum(t.nbytes for t in load_file(shard).values()) <= SHARD_BYTES for shard in shards)
    assert {tensor.dtype for tensor in tensors(folder).values()} == {torch.bfloat16}
    config, own = LlamaConfig.from_pretrained(folder), LlamaConfig.from_pretrained(source)
    assert LlamaShape.of(config.to_dict()) == TINY
    assert config.dtype == torch.bfloat16
    for kept in ("head_dim", "rope_parameters", "max_position_embeddings", "eos_token_id", "tie_word_embeddings"):
        assert getattr(config, kept) == getattr(own, kept)
    assert not (folder / "chat_template.jinja").exists()
    assert (folder / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert tokenizer_hash(folder) == tokenizer_hash(source)
    assert {file.stat().st_mode for file in folder.iterdir()} == {(source / "tokenizer.json").stat().st_mode}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_chat_template_goes_along(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    folder = write(source, tmp_path / "wide", TINY)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_random_weights_leave_every_bit_of_the_logits(small: Callable[..., Path], tmp_path: Path) -> None:
    source = small()
    zeros, filled, again, other = (
        write(source, tmp_path / name, TINY, fill_seed=seed)
        for name, seed in (("zeros", None), ("filled", 0), ("again", 0), ("other", 1))
    )
    assert torch.equal(logits(zeros), logits(filled))
    assert torch.equal(logits(zeros), logits(other))
    assert all(torch.equal(tensor, tensors(again)[name]) for name, tensor in tensors(filled).items())
    assert not torch.equal(tensors(filled)["model.layers.1.mlp.gate_proj.weight"],
                           tensors(other)["model.layers.1.mlp.gate_proj.weight"])  # fmt: skip
    share = {name: (tensor == 0).float().mean().item() for name, tensor in tensors(filled).items()}
    for layer in range(TINY.layers):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
            assert share[f"model.layers.{layer}.{part}.weight"] == 0
    # Extra layers: only what would write to the hidden state, or read it on the way there, is zero.
    assert share["model.layers.1.self_attn.o_proj.weight"] == 1
    assert share["model.layers.1.mlp.up_proj.weight"] == pytest.approx(24 / 48)
    assert share["model.layers.1.mlp.down_proj.weight"] == 0
    assert sum((tensor == 0).sum().item() for tensor in tensors(zeros).values()) > 2 * sum(
        (tensor == 0).sum().item() for tensor in tensors(filled).values()
    )


def test_any_length_can_be_promised(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small()
    folder = write(source, tmp_path / "wide", TINY, max_positions=100_000)
    assert LlamaConfig.from_pretrained(folder).max_position_embeddings == 100_000
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer == json.loads((source / "tokenizer_config.json").read_text()) | {"model_max_length": 100_000}
    seen: list[torch.Tensor] = []
    forward = LlamaRotaryEmbedding.forward

    def record(self: LlamaRotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor) -> object:
        seen.append(position_ids)
        return forward(self, x, position_ids)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", record)
    report = check_checkpoint(folder, source, random_tokens(), layer_by_layer=True)
    report.raise_if_wrong()
    # Both models ran at both ends of what the checkpoint promises.
    assert [(int(positions.min()), int(positions.max())) for positions in seen] == [(0, 99_999)] * 2
    with pytest.raises(ValueError, match="max_position_embeddings: 0 given"):
        write(source, tmp_path / "none", TINY, max_positions=0)


def test_the_embedded_draft_in_bfloat16(tmp_path: Path) -> None:
    source = embedded_draft_path()
    folder = write(source, tmp_path / "wide", WIDE_DRAFT, dtype=torch.bfloat16)
    report = check_checkpoint(folder, source, check_tokens(source), layer_by_layer=True)
    report.raise_if_wrong()
    assert report.same_choice > 0.98
    assert report.padding_mass == 0
    assert "at 192 positions" in str(report)


def test_padding_holds_no_mass_where_hidden_states_are_large(small: Callable[..., Path], tmp_path: Path) -> None:
    """SmolLM2's root mean square reaches 256 at the first token."""
    source = small()
    damage(source, "model.layers.1.mlp.down_proj.weight", lambda t: t.mul_(11))
    rms: list[float] = []
    model = LlamaForCausalLM.from_pretrained(source)
    model.model.norm.register_forward_pre_hook(lambda _, given: rms.append(given[0].square().mean(-1).sqrt().max()))
    model(random_tokens())
    assert rms[0] > 256
    report = check_checkpoint(write(source, tmp_path / "wide", TINY), source, random_tokens(), layer_by_layer=True)
    assert report.padding_mass == 0
    assert report.padding_logit < -50


def damage(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    content = load_file(file)
    change(content[name])
    save_file(content, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.self_attn.o_proj.weight", lambda t: t[:, -1].fill_(0.1), "logits differ"),
        ("model.layers.0.mlp.up_proj.weight", lambda t: t[-1].fill_(0.5), "logits differ"),
        ("model.norm.weight", lambda t: t.fill_(float("nan")), "logits differ by nan"),
        ("model.embed_tokens.weight", lambda t: t[-1, 24].fill_(0), "padding entries reach logit 0.0"),
    ],
)
def test_the_check_sees_a_wrong_weight(
    small: Callable[..., Path], tmp_path: Path, name: str, change: Callable[[torch.Tensor], object], message: str
) -> None:
    source = small()
    folder = write(source, tmp_path / "wide", TINY)
    damage(folder, name, change)
    for layer_by_layer in (False, True):
        with pytest.raises(CheckpointError, match=message):
            check_checkpoint(folder, source, random_tokens(), layer_by_layer=layer_by_layer).raise_if_wrong()


def test_refuses_an_existing_folder(small: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    with pytest.raises(FileExistsError, match="wide exists already"):
        write(small(), tmp_path / "wide", TINY)
    assert list((tmp_path / "wide").iterdir()) == []


def test_says_what_the_disk_lacks(small: Callable[..., Path], tmp_path: Path) -> None:
    source, folder = small(), tmp_path / "wide"
    model = WidenedLlama(*load_small(source), TINY, dtype=torch.float32, fill_seed=0)
    plan = plan_checkpoint(model, source, max_shard_bytes=SHARD_BYTES)
    plan = replace(plan, disk_bytes=10**18)
    with pytest.raises(OSError, match=r"needs 1000000000.00 GB, [\d.]+ GB are free"):
        write_checkpoint(model, source, folder, plan, before_publishing=lambda _: None, on_written=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_nothing_is_left_of_a_failure(small: Callable[..., Path], tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def fail(partial: Path) -> None:
        seen.append({file.name for file in partial.iterdir()})
        raise CheckpointError("wrong")

    with pytest.raises(CheckpointError, match="wrong"):
        write(small(), tmp_path / "wide", TINY, before_publishing=fail)
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= seen[0]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_folder_that_appears_meanwhile_is_kept(small: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        write(small(), tmp_path / "wide", TINY, before_publishing=lambda _: (tmp_path / "wide").mkdir())
    assert list((tmp_path / "wide").iterdir()) == []


def test_sizes_of_the_shapes_on_disk() -> None:
    """Shapes alone: no tensor is made."""
    source = embedded_draft_path()
    billions = {}
    for name, shape in widen.SHAPES.items():
        model = WidenedLlama(*load_small(source), shape, dtype=torch.bfloat16, fill_seed=None)
        plan = plan_checkpoint(model, source, max_shard_bytes=2 * 10**9)
        assert shape.vocab == 128_256
        assert sum(map(len, plan.shards)) == 2 + 9 * shape.layers
        billions[name] = round(plan.weight_bytes / 2e9, 2)
    # With an output layer of their own the last two have 8.03 and 70.55.
    assert billions == {"160m": 0.21, "1b": 1.24, "1b-deep": 1.24, "8b": 7.5, "70b": 69.5}


@pytest.mark.parametrize(("name", "heads"), [("1b", (32, 8)), ("1b-deep", (32, 8)), ("8b", (64, 16))])
def test_shapes_with_smaller_heads_have_matrices_of_the_same_sizes(name: str, heads: tuple[int, int]) -> None:
    shape = widen.shape_with_heads_of(name, 64)
    assert (shape.heads, shape.kv_heads) == heads
    assert replace(shape, heads=0, kv_heads=0) == replace(widen.SHAPES[name], heads=0, kv_heads=0)
    assert widen.shape_with_heads_of(name, 128) == widen.SHAPES[name]
    # Nine query heads in three groups, as SmolLM2's.
    assert len(place_heads(replace(shape, heads=9, kv_heads=3), shape).kv) == 3
    with pytest.raises(ValueError, match="head_dim: 96 given"):
        widen.shape_with_heads_of(name, 96)


def test_the_command_widens_any_llama(
    small: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight times as many heads, as these are of 16 channels."""
    monkeypatch.setitem(widen.SHAPES, "1b-deep", replace(TINY, hidden=64, heads=2, kv_heads=1, vocab=8200))
    source = small(9, 3)
    line = ["widen", "target", "1b-deep", str(tmp_path / "wide"), "--source", str(source), "--dtype", "float32"]
    assert cli.run([*line, "--check", "none"]) == 0
    config = LlamaConfig.from_pretrained(tmp_path / "wide")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 8, 16)
    # float32 sums in another order
    torch.testing.assert_close(logits(tmp_path / "wide")[..., :96], logits(source), rtol=0, atol=3e-4)
    assert cli.run([*line, "--of-target", str(source)]) == 2
    assert "needed with eagle or block and --source" in capsys.readouterr().err


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(widen.SHAPES, "160m", WIDE_DRAFT)
    folder = tmp_path / "wide"
    line = ["widen", "draft", "160m", str(folder)]
    assert cli.run([*line, "--check", "whole", "--dtype", "float32", "--max-position-embeddings", "8192"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder}\n"
    assert "GB on disk in 1 files" in err
    assert "checked as a whole: at 192 positions" in err
    model = LlamaForCausalLM.from_pretrained(folder)
    assert (len(model.model.layers), model.config.max_position_embeddings) == (3, 8192)
    assert cli.run(line) == 1
    assert f"error: {folder} exists already" in capsys.readouterr().err
    assert cli.run(["widen", "draft", "160m", str(tmp_path / "no" / "where")]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert cli.run(["widen", "draft", "9b", str(tmp_path / "other")]) == 2
