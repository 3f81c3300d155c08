"""A session's logits processors as columns of the device; see `outrider.kernels.sampling.processors`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.kernels.sampling.processors import NodeProcessors
from outrider.sampling import SamplingSpec

TokenIds = Sequence[int] | npt.NDArray[np.int32]


def describe_processors(
    processors: NodeProcessors, row: int, spec: SamplingSpec, prompt: TokenIds, output: TokenIds
) -> None:
    """Write the columns of a row that no launched step uses, on the current stream; the host may wait for that."""
    processors.describe(
        row,
        repetition=spec.repetition_penalty,
        presence=spec.presence_penalty,
        frequency=spec.frequency_penalty,
        bias=spec.logit_bias,
        allowed=spec.allowed_token_ids,
        bans_stops=spec.bans_stops,
        prompt=prompt,
        output=output,
    )
