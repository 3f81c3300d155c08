"""Several processes of one host that run one model: this process leads, the others follow.

    leader     rank 0, the worker itself: plans, chooses, answers. Sends every command to all followers, then runs it
    follower   ranks 1 to N - 1, `python -m outrider.engine.tensor_parallel_rank`: runs the same commands in the same
               order on its own part of the model, on its own GPU

    leader   start_ranks ─────────── least(slots) ── connect ── lead("packed", shape) ... ── close
    follower    started with a setup ── least(slots) ── connect ── follow: packed(shape) ...

Commands go over one socket pair a follower. It ends with the process at its other end however that ended, and so does
the follower's standard input: a rank that dies is noticed at once, by whoever is left. The leader then ends the other
followers, lets go what waits for them on the device, and fails with the reason.
"""

import torch

from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_weights import check_world_size
from outrider.engine.tensor_parallel_leader import Leader
from outrider.engine.tensor_parallel_ranks import Ranks
from outrider.engine.weight_source import WeightSource
from outrider.errors import CheckpointError

__all__ = ["Leader", "Ranks", "start_ranks"]


def start_ranks(config: EngineConfig, source: WeightSource | None = None) -> Ranks:
    """Starts the followers of `config.tensor_parallel_size` ranks; they load while the leader does.

    Args:
        source: of its weights, which can be pickled; by default the files of the checkpoint.

    Raises:
        CheckpointError: the model does not divide into so many parts, or there are fewer GPUs.
    """
    wanted = config.tensor_parallel_size
    if wanted == 1:
        return Ranks(torch.device(config.device))
    check_world_size(read_checkpoint(config)[0], wanted)
    if config.device == "cuda" and torch.cuda.device_count() < wanted:
        raise CheckpointError(
            f"--tensor-parallel-size {wanted} given, {torch.cuda.device_count()} GPUs are here "
            "(CUDA_VISIBLE_DEVICES may hide others)"
        )
    return Leader(config, source)
