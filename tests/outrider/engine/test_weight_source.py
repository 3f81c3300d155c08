"""Weights from mapped files: one file or shards, parts of tensors, and files that are damaged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.engine.weight_source import INDEX_FILE, SafetensorsSource
from outrider.errors import CheckpointError

TENSORS = {
    "first": torch.arange(12.0).reshape(4, 3),
    "second": torch.arange(8, dtype=torch.bfloat16),
    "third": torch.arange(12.0).reshape(3, 4).half(),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
SHARDS = {"a.safetensors": ["first"], "b.safetensors": ["second", "third"]}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for file, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    files = {name: file for file, names in SHARDS.items() for name in names}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    return tmp_path


def test_one_file_and_shards_give_the_same(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    single = tmp_path_factory.mktemp("single")
    save_file(TENSORS, single / "model.safetensors")
    for source in (SafetensorsSource(shards), SafetensorsSource(single)):
        source.check(SHAPES)
        for name, tensor in TENSORS.items():
            assert torch.equal(source.tensor(name), tensor)
            assert source.tensor(name).dtype == tensor.dtype
            assert torch.equal(source.rows(name, 1, 3), tensor[1:3])
        assert torch.equal(source.columns("first", 1, 3), TENSORS["first"][:, 1:3])


def test_parts_are_views_of_the_mapped_file(shards: Path) -> None:
    source = SafetensorsSource(shards)
    for part in (source.rows("first", 1, 2), source.columns("first", 1, 2)):
        assert part.untyped_storage().nbytes() == TENSORS["first"].nbytes


def test_what_is_stored_is_known(shards: Path) -> None:
    source = SafetensorsSource(shards)
    assert source.stores("first")
    assert not source.stores("lm_head.weight")


def truncate(folder: Path) -> None:
    content = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(content[:-4])


def swap(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "b.safetensors").unlink(), r"b\.safetensors: missing.*copy this file again"),
        (truncate, r"b\.safetensors: cannot load it, it is truncated or corrupt.*copy this file again"),
        (lambda folder: (folder / "b.safetensors").write_bytes(b"x" * 99), r"b\.safetensors: cannot load it"),
        (swap, r"b\.safetensors: second is not in it"),
        (lambda folder: (folder / INDEX_FILE).write_text("{"), "index.json: no index of shards"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": {"first": "../a"}}'), "files of this folder"),
        (lambda folder: (folder / INDEX_FILE).unlink(), "neither model.safetensors nor"),
    ],
)
def test_damaged_folders(shards: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(shards)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(shards).check(SHAPES)


def test_tensors_that_are_not_what_the_config_says(shards: Path) -> None:
    source = SafetensorsSource(shards)
    with pytest.raises(CheckpointError, match="1 weights are missing, fourth first"):
        source.check({**SHAPES, "fourth": (2,)})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: second has shape \[8\], \[9\] needed"):
        source.check({**SHAPES, "second": (9,)})
    with pytest.raises(CheckpointError, match="fourth is missing"):
        source.rows("fourth", 0, 1)


def test_weights_that_are_no_floats(tmp_path: Path) -> None:
    save_file({"first": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="first is I8; give the float or bfloat16 checkpoint"):
        SafetensorsSource(tmp_path).check({"first": (2,)})


@pytest.fixture
def shared(tmp_path: Path) -> Callable[..., SafetensorsSource]:
    """Saves a matrix whose equal rows are stored once."""

    def save(rows: torch.Tensor, stored: torch.Tensor = TENSORS["first"]) -> SafetensorsSource:
        save_file({"matrix": stored, "matrix_rows": rows}, tmp_path / "model.safetensors")
        return SafetensorsSource(tmp_path)

    return save


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_are_stored_once(shared: Callable[..., SafetensorsSource], dtype: torch.dtype) -> None:
    row_of = torch.tensor([3, 0, 2, 2, 1, 2, 0, 0])
    source, whole = shared(row_of.to(dtype)), TENSORS["first"][row_of]
    source.check({"matrix": (8, 3)})
    assert torch.equal(source.tensor("matrix"), whole)
    assert torch.equal(source.rows("matrix", 1, 5), whole[1:5])
    assert torch.equal(source.columns("matrix", 1, 3), whole[:, 1:3])
    assert source.names == {"matrix"}
    assert source.number_count == whole.numel()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 1, 2], r"matrix has shape \[3, 3\], \[4, 3\] needed after config.json"),
        ([[0, 1, 2, 3]], r"matrix_rows is I32 of shape \[1, 4\], a list of whole numbers needed"),
        ([0.0, 1.0, 2.0, 3.0], r"matrix_rows is F32 of shape \[4\], a list of whole numbers needed"),
        ([0, 1, 4, 3], r"model.safetensors: matrix_rows names row 4, and matrix has 4"),
        ([0, -1, 4, 3], "matrix_rows names row -1, and matrix has 4"),
    ],
)
def test_rows_that_are_not_there(shared: Callable[..., SafetensorsSource], rows: list[int], message: str) -> None:
    given = torch.tensor(rows)
    with pytest.raises(CheckpointError, match=message):
        shared(given if given.is_floating_point() else given.int()).check({"matrix": (4, 3)})


def test_rows_of_eight_bits_are_all_stored(shared: Callable[..., SafetensorsSource]) -> None:
    with pytest.raises(CheckpointError, match="matrix is F8_E4M3 and has matrix_rows, for which floats are needed"):
        shared(torch.zeros(6, dtype=torch.int32), TENSORS["first"].to(torch.float8_e4m3fn)).check({"matrix": (6, 3)})


def test_rows_of_another_width(shared: Callable[..., SafetensorsSource]) -> None:
    with pytest.raises(CheckpointError, match=r"matrix has shape \[6, 3\], \[6, 5\] needed after config.json"):
        shared(torch.zeros(6, dtype=torch.int32)).check({"matrix": (6, 5)})
