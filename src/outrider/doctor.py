"""`outrider doctor`: what this machine has of what a service needs, a line each, with what to do where it lacks some.

Nothing is started, and torch is imported only where there is a GPU to ask it about.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import typer

from outrider import __version__
from outrider.errors import CheckpointError, OutriderError
from outrider.roles.awake import usable_cores
from outrider.roles.ports import check_free
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.tokenizer_hash import tokenizer_hash

# The usual ports of gRPC and of HTTP, with the options that say others.
PORTS: Mapping[int, str] = MappingProxyType({50051: "--port", 8000: "--http-port"})
_LEAST_FILES = 4096
_EXTRAS = ("dev", "kubernetes")


class Finding(StrEnum):
    """Severity of a finding."""

    GOOD = "ok"
    NOTE = "note"
    """It does no harm, or something goes without it."""
    BAD = "bad"


class Line(NamedTuple):
    """One thing that was looked at."""

    finding: Finding
    what: str
    text: str


def doctor(
    *,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder of a target, to look at as well.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Checkpoint folder of its draft.")] = None,
    certs: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of certificates, one set a role.")] = None,
) -> None:
    """Look at what a service needs here: a line each, with what to do. Exit code 1 where something has to be done."""
    found = [*versions(), *gpus(), *machine(), *ports(), *models(model, draft), *certificates(certs)]
    for line in found:
        typer.echo(f"{line.finding:<5} {line.what:<12} {line.text}")
    if any(line.finding is Finding.BAD for line in found):
        raise typer.Exit(1)


def versions() -> Iterator[Line]:
    """Python, and every package that is needed or that some part makes use of."""
    yield Line(Finding.GOOD, "outrider", f"{__version__} on Python {platform.python_version()}, {sys.executable}")
    from packaging.requirements import Requirement

    for text in metadata.requires("outrider") or ():
        need = Requirement(text)
        extra = next((extra for extra in _extras() if need.marker and need.marker.evaluate({"extra": extra})), "")
        if need.marker and not extra and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            has = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            to_do = (
                f"pip install 'outrider[{extra}]' to have it" if extra else f"pip install '{need.name}{need.specifier}'"
            )
            yield Line(Finding.NOTE if extra else Finding.BAD, need.name, f"not installed: {to_do}")
            continue
        if not need.specifier.contains(has, prereleases=True):
            yield Line(Finding.BAD, need.name, f"{has} is installed: pip install '{need.name}{need.specifier}'")
        elif need.name in {"torch", "transformers", "triton", "ray", "grpcio", "flashinfer-python", "llguidance"}:
            yield Line(Finding.GOOD, need.name, has)


def _extras() -> list[str]:
    return [extra for extra in metadata.metadata("outrider").get_all("Provides-Extra") or () if extra not in _EXTRAS]


def gpus() -> Iterator[Line]:
    """Cards, whether torch can use them, and who shares them."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Line(Finding.NOTE, "GPU", "no NVIDIA driver is installed: models run on the CPU")
        return
    query = [smi, "--query-gpu=index,name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode or not asked.stdout.strip():
        problem = " ".join((asked.stderr or asked.stdout).split()) or "it names no card"
        yield Line(Finding.BAD, "GPU", f"nvidia-smi: {problem}; look at the driver")
        return
    for card in asked.stdout.strip().splitlines():
        index, name, total, used, driver = (part.strip() for part in card.split(","))
        yield Line(Finding.GOOD, f"GPU {index}", f"{name}, {total}, {used} in use, driver {driver}")
    import torch

    if torch.cuda.is_available():
        yield Line(Finding.GOOD, "CUDA", f"{torch.version.cuda}, torch sees {torch.cuda.device_count()} cards")
    elif torch.version.cuda is None:
        yield Line(Finding.BAD, "CUDA", "this torch is a CPU build: install the one for CUDA (pytorch.org says how)")
    else:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"CUDA_VISIBLE_DEVICES={shown!r} hides them" if shown is not None else "is the driver new enough?"
        yield Line(Finding.BAD, "CUDA", f"torch for CUDA {torch.version.cuda} can use no card: {hidden}")


def machine() -> Iterator[Line]:
    """Cores, memory, open files, and whether a Ray runs that a service would join."""
    cores = usable_cores()
    few = cores < 2
    yield Line(Finding.NOTE if few else Finding.GOOD, "cores", f"{cores}" + (": roles take turns" if few else ""))
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= hard < _LEAST_FILES:
            to_do = f"`ulimit -n {_LEAST_FILES}` or more lets that many clients in"
            yield Line(Finding.NOTE, "open files", f"at most {hard}: {to_do}")
    address = os.environ.get("RAY_ADDRESS")
    running = Path("/tmp/ray/ray_current_cluster")
    if address:
        yield Line(Finding.NOTE, "Ray", f"RAY_ADDRESS={address}: `--address auto` means that cluster")
    elif running.is_file():
        text = running.read_text().strip()
        yield Line(Finding.NOTE, "Ray", f"a cluster runs here ({text}): `--address auto` joins it")
    else:
        yield Line(Finding.GOOD, "Ray", "no cluster runs here: a service starts its own")


def ports(usual: Mapping[int, str] = PORTS) -> Iterator[Line]:
    """Ports that a service would take, each with the option that gives it another one."""
    for port, option in usual.items():
        try:
            check_free(f"127.0.0.1:{port}")
        except OSError as error:
            yield Line(Finding.NOTE, f"port {port}", f"{error.strerror or error}: give another one with {option}")
        else:
            yield Line(Finding.GOOD, f"port {port}", "free")


def models(model: Path | None, draft: Path | None) -> Iterator[Line]:
    """Checkpoints, and whether draft and target have one tokenizer."""
    hashes = dict[str, str]()
    for what, folder in (("model", model), ("draft", draft)):
        if folder is None:
            continue
        try:
            if not (folder / "config.json").is_file():
                raise CheckpointError(f"{folder}: no config.json; give the folder of a Hugging Face checkpoint")
            hashes[what] = tokenizer_hash(folder)
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            if not size:
                raise CheckpointError(f"{folder}: no *.safetensors; save the model in this format")
            yield Line(Finding.GOOD, what, f"{folder}: {size / 1e9:.2f} GB")
        except (CheckpointError, OSError) as error:
            yield Line(Finding.BAD, what, str(error))
    if len(hashes) == 2:
        if hashes["model"] == hashes["draft"]:
            yield Line(Finding.GOOD, "tokenizer", "draft and model have the same")
        else:
            yield Line(Finding.BAD, "tokenizer", "draft and model have different ones: take a draft of the same family")


def certificates(folder: Path | None) -> Iterator[Line]:
    """The certificates that `outrider certs` writes, or others of the same names."""
    if folder is None:
        return
    for role in Role:
        try:
            TlsConfig.of_folder(folder, role).check(role)
            yield Line(Finding.GOOD, "TLS", f"{role}: certificate, key and authority fit")
        except (OutriderError, ValueError, OSError) as error:
            yield Line(Finding.BAD, "TLS", f"{role}: {error}; `outrider certs` writes a set")
