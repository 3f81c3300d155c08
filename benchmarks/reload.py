"""What changing a target's weights costs: reading and checking a checkpoint, the swap, and the memory beside it.

    python benchmarks/reload.py                                        # the embedded target, on the CPU
    python benchmarks/reload.py --model FOLDER --device cuda           # FOLDER: `outrider widen target 8b FOLDER`, say

The same folder is read, checked and put in its own place: numbers are copied whatever they are. The first check may
come from the disk, the second finds the files in memory.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.weight_reload import check_weights
from outrider.models import embedded_target_path


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(embedded_target_path()), help="checkpoint folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = EngineConfig(
        model_path=options.model,
        device=options.device,
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel_size,
        num_slots=4096,
        max_num_seqs=8,
    )
    total = sum(file.stat().st_size for file in options.model.glob("*.safetensors"))
    begin = time.perf_counter()
    runner = ModelRunner(config)
    say(f"loaded {total / 1e9:.2f} GB in {time.perf_counter() - begin:.2f} s")
    try:
        for repeat in range(options.repeats):
            begin = time.perf_counter()
            version = check_weights(runner.running(), options.model).version
            check_s = time.perf_counter() - begin
            beside = swap_memory(runner, options.model) if options.device != "cpu" else None
            begin = time.perf_counter()
            runner.refill(options.model)
            swap_s = time.perf_counter() - begin
            told = "" if beside is None else f", {beside / 1e9:.2f} GB beside the model"
            say(
                f"{repeat}: {version}: check {check_s:.2f} s ({total / check_s / 1e9:.1f} GB/s), "
                f"swap {swap_s:.3f} s ({total / swap_s / 1e9:.1f} GB/s){told}"
            )
    finally:
        runner.close()


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def swap_memory(runner: ModelRunner, folder: Path) -> int:
    """Bytes that a swap takes for a while on the GPU."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.refill(folder)
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
