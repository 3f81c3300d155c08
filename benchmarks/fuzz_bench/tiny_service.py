"""A whole service in this process, of a model so small that a step costs a millisecond: real servers, real streams."""

import asyncio
import gc
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.client import AsyncClient
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.server import serve as serve_draft
from outrider.kernels.linear.packed_weight import ROW_SIZES, PackedWeight, can_pack
from outrider.kernels.noise import gumbel_noise_reference
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.server import serve as serve_target

VOCAB_SIZE, MODEL_LEN = 256, 96
PROMPT, PROBE_TOKENS = (10, 20, 30, 40, 50), 24
_HIDDEN, _INNER, _HEAD = 32, 48, 16
_LINEAR_SHAPES = ((_HIDDEN, _HIDDEN), (_HIDDEN, _HEAD), (_HIDDEN, _INNER), (_INNER, _HIDDEN), (_HIDDEN, VOCAB_SIZE))
# More than are remembered of so small a vocabulary.
_NOISE_ROWS, _NOISE_AT_ONCE = 20 << 10, 1 << 10
# The event loop's own, for what it does beside; they are kept once they were needed.
_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
_START_S, _QUIET_S, _POLL_S = 60.0, 15.0, 0.02


def write_checkpoint(folder: Path) -> None:
    """A tiny random Llama with a tokenizer of bytes."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=_HEAD,
        max_position_embeddings=MODEL_LEN,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({}), encoding="utf-8")


def fill_caches() -> None:
    """Fill what a process caches beyond any request, up to its bounds: rows of noise, and kernels for products."""
    for first in range(0, _NOISE_ROWS, _NOISE_AT_ONCE):
        positions = torch.arange(first, first + _NOISE_AT_ONCE)
        gumbel_noise_reference(torch.zeros_like(positions), positions, VOCAB_SIZE)
    with torch.inference_mode():
        for inputs, outputs in _LINEAR_SHAPES if can_pack(torch.float32) else ():
            weight = PackedWeight(torch.zeros(outputs, inputs), torch.float32)
            for rows in ROW_SIZES:
                weight.product(torch.zeros(rows, inputs))


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """Gauges that must be equal before and after the fuzzing.

    Attributes:
        sessions: of the coordinator, running, waiting or known.
        at_workers: sessions and slots that the workers hold.
        workers: that are registered.
        tasks: of the event loop.
        files: descriptors that are open.
        threads: of this process, alive.
    """

    sessions: int
    at_workers: int
    workers: int
    tasks: int
    files: int
    threads: int


class TinyService:
    """A coordinator with workers.

    Args:
        roles: of the workers, at most one each.

    Attributes:
        addresses: host:port by role.
    """

    def __init__(self, folder: Path, *, roles: Sequence[str] = ("target", "draft"), **coordinator: Any) -> None:
        settings: dict[str, Any] = {"default_max_new_tokens": 8, "heartbeat_interval_ms": 100, "lease_ms": 5000}
        self.coordinator = CoordinatorServer(
            CoordinatorConfig(port=0, model_path=folder, connect_timeout_s=0.25, **settings | coordinator)
        )
        self._folder, self._wanted = folder, roles
        self._stop = asyncio.Event()
        self._roles: list[asyncio.Task[None]] = []
        self.addresses: dict[str, str] = {}

    async def start(self) -> None:
        """Start all roles, and wait until they serve."""
        await self.coordinator.start()
        address = self.addresses["coordinator"] = self.coordinator.address
        shared: dict[str, Any] = {
            "model_path": self._folder,
            "coordinators": (address,),
            "max_num_seqs": 8,
            "num_slots": 2000,
        }
        if "target" in self._wanted:
            await self._start_role("target", serve_target, TargetWorkerConfig(**shared))
        if "draft" in self._wanted:
            await self._start_role("draft", serve_draft, DraftWorkerConfig(**shared))
        await self.until(lambda: self.serving == len(self._wanted))

    async def _start_role(self, role: str, serve: Any, config: Any) -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(config, ready=ready.set_result, stop=self._stop), name=f"role {role}")
        self._roles.append(task)
        await asyncio.wait({ready, task}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise TimeoutError(f"the {role} does not serve")
        self.addresses[role] = ready.result()

    @property
    def serving(self) -> int:
        """Workers that the coordinator uses."""
        return sum(worker.state == "serving" for worker in self.coordinator.info().workers)

    def check_alive(self) -> None:
        """Check that no role has ended.

        Raises:
            RuntimeError: one has.
        """
        for role in self._roles:
            if role.done():
                raise RuntimeError(f"{role.get_name()} has ended") from role.exception()

    async def probe(self) -> tuple[int, ...]:
        """The tokens of a correct request."""
        async with AsyncClient(self.addresses["coordinator"]) as client:
            output = await client.generate(
                list(PROMPT), max_new_tokens=PROBE_TOKENS, temperature=1.0, seed=3, ignore_eos=True, timeout_s=20
            )
        return tuple(output.token_ids)

    def gauges(self) -> Gauges:
        """Now."""
        info = self.coordinator.info()
        loads = [worker.load for worker in info.workers]
        return Gauges(
            sessions=info.running_sessions + info.waiting_requests,
            at_workers=sum(load.sessions + load.slots_used for load in loads),
            workers=len(info.workers),
            tasks=len(asyncio.all_tasks()),
            files=len(list(Path("/proc/self/fd").iterdir())),
            threads=threading.active_count(),
        )

    async def quiet(self, wanted: Gauges) -> Gauges:
        """Return the gauges once they are no more than these, or as they are after a long wait."""
        for _ in range(round(_QUIET_S / _POLL_S)):
            now = self.gauges()
            if not exceeded(now, wanted):
                break
            await asyncio.sleep(_POLL_S)
        return self.gauges()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, as long as all roles run."""
        async with asyncio.timeout(_START_S):
            while not condition():
                self.check_alive()
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """All roles."""
        self._stop.set()
        await asyncio.gather(*self._roles, return_exceptions=True)
        await self.coordinator.stop()


def exceeded(now: Gauges, wanted: Gauges) -> list[str]:
    """The gauges that are higher than they should be."""
    return [
        f"{name}: {value} now, {most} before"
        for name, value in vars(now).items()
        if value > (most := getattr(wanted, name)) + (_POOL_THREADS if name == "threads" else 0)
    ]


@asynccontextmanager
async def tiny_service(folder: Path, **settings: Any) -> AsyncIterator[TinyService]:
    """A service that serves; `folder` gets the checkpoint unless it is there."""
    if not (folder / "config.json").is_file():
        write_checkpoint(folder)
    service, threshold = TinyService(folder, **settings), gc.get_threshold()
    try:
        await service.start()
        yield service
    finally:
        await service.stop()
        # A draft takes Python's collector for its own; what gRPC leaves has to go while its event loop is there.
        gc.set_threshold(*threshold)
        gc.collect()
