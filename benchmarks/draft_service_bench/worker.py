"""The draft worker's process: `outrider draft-worker`, with the model that is measured, and its steps counted.

Told by lines on standard input: `begin` a measurement, `end` it, which prints one line of JSON. Ends with the input.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvloop
from benchmarks.draft_service_bench.coordinator import LIVE_NODES
from benchmarks.function_source import FunctionSource

from outrider.draft_worker import server
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import LoadedDrafters
from outrider.draft_worker.drafters.model.drafter import ModelDrafter
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.engine.model_runner import ModelRunner
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.models.widen import SHAPES, load_small
from outrider.models.widened_weights import WidenedLlama
from outrider.roles.awake import cores_awake
from outrider.roles.worker import model_info
from outrider.roles.worker_service import serve_worker

# Most tokens of a session; the embedded draft takes no more on a CPU.
_MAX_LEN = {"cpu": 2048, "cuda": 8192}
# Estimates stay those of the prior, so that trees are as wide in one measurement as in the next.
_UNLEARNING = 1e9


@dataclass(kw_only=True)
class Counts:
    """Counts over one measurement.

    Attributes:
        began_ns: when it began.
        steps: read.
        rows: of all steps.
        nodes: new ones.
        device_ns: of all steps, by the device's clock.
        growing_ns: from report to report, where the drafter did not rest between the two.
        growing_device_ns: of the steps at the end of these times.
    """

    began_ns: int = field(default_factory=time.perf_counter_ns)
    steps: int = 0
    rows: int = 0
    nodes: int = 0
    device_ns: int = 0
    growing_ns: int = 0
    growing_device_ns: int = 0


class CountedDrafter(ModelDrafter):
    """A drafter that counts its steps.

    Attributes:
        counts: of the measurement; replaced by whoever begins one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counts = Counts()
        # When the last report was read; 0 while the drafter rests.
        self._read_ns = 0

    def advance(self) -> list[Growth]:
        """See `ModelDrafter`."""
        growths, counts, now = super().advance(), self.counts, time.perf_counter_ns()
        for growth in growths:
            counts.steps += 1
            counts.rows += growth.rows
            counts.nodes += len(growth.node_ids)
            counts.device_ns += growth.forward_ns
            if self._read_ns:
                counts.growing_ns += now - max(self._read_ns, counts.began_ns)
                counts.growing_device_ns += growth.forward_ns
            self._read_ns = now
        if not growths and not self.is_busy:
            self._read_ns = 0
        return growths


@contextmanager
def _widened(shape: str) -> Iterator[tuple[Path, FunctionSource]]:
    """The embedded target in a larger shape: a folder without weights, and what makes them on the GPU."""
    large = WidenedLlama(
        *load_small(embedded_target_path()), SHAPES[shape], dtype=torch.bfloat16, fill_seed=0,
        max_position_embeddings=_MAX_LEN["cuda"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(large.config()), encoding="utf-8")
        # Checkpoint folders are known by it.
        (folder / "model.safetensors").touch()
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(embedded_target_path() / file, folder / file)
        yield folder, FunctionSource(lambda tensor: large.tensor(tensor).cuda(), f"widened weights, shape {shape}")


def _loader(source: FunctionSource | None) -> server.Loader:
    def load(config: DraftWorkerConfig) -> LoadedDrafters:
        runner = ModelRunner(config.engine(), source=source)
        drafter = CountedDrafter(
            runner.packed_forward(sessions=config.max_num_seqs),
            config.growth(max_model_len=runner.info.max_model_len),
            max_sessions=config.max_num_seqs,
            num_slots=runner.slots.num_slots,
            vocab_size=runner.vocab_size,
            device=runner.device,
            captures=runner.device.type == "cuda",
            calibration=AcceptanceCalibration(branching=max(config.branching, 2), prior_strength=_UNLEARNING),
        )
        drafter.warm_up()
        threading.Thread(target=_obey, args=(drafter,), daemon=True).start()
        return LoadedDrafters(drafters=Drafters(drafter, None), model=model_info(runner.info))

    return load


def _obey(drafter: CountedDrafter) -> None:
    for line in sys.stdin:
        if line.strip() == "begin":
            drafter.counts = Counts()
        else:
            counts = drafter.counts
            _say(asdict(counts) | {"ns": time.perf_counter_ns() - counts.began_ns})
    os._exit(0)


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        settle = stack.enter_context(cores_awake(options["keep_cores_awake"]))
        folder, source = embedded_draft_path(), None
        if options["device"] == "cuda":
            folder, source = stack.enter_context(_widened(options["shape"]))
        sessions, max_len = max(options["sessions"]), _MAX_LEN[options["device"]]
        config = DraftWorkerConfig(
            model_path=folder,
            device=options["device"],
            max_num_seqs=sessions,
            max_model_len=max_len,
            max_live_nodes=LIVE_NODES,
            num_slots=sessions * (max_len + LIVE_NODES),
        )
        device = "CPU" if options["device"] == "cpu" else torch.cuda.get_device_name()
        vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]

        def ready(address: str) -> None:
            # Not before, for it compiles on all cores.
            settle()
            _say({"address": address, "vocab_size": vocab_size, "max_len": max_len, "device": device})

        make_worker = functools.partial(server.DraftWorker, loader=_loader(source))
        uvloop.run(serve_worker(make_worker, config, ready=ready))


if __name__ == "__main__":
    main()
