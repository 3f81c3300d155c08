"""Puts one-graph rounds together: a model whose decoder runs, the head beside it, the shape of their trees."""

from outrider.engine.model_runner import ModelRunner
from outrider.engine.one_graph_buckets import RoundLadder
from outrider.engine.one_graph_program import HeadCaches, RoundProgram
from outrider.engine.one_graph_runner import RoundRunner
from outrider.engine.one_graph_shape import RoundShape
from outrider.errors import CheckpointError
from outrider.target_worker.one_graph import RoundDraft
from outrider.target_worker.resident import ResidentDraft

# Rows of the largest round.
_MOST_ROWS = 512


def make_rounds(runner: ModelRunner, resident: ResidentDraft, shape: RoundShape, *, max_step_tokens: int) -> RoundDraft:
    """Rounds of a runner; its resident draft goes on keeping the head's KV up in ordinary steps, and grows no trees.

    Args:
        runner: its decoder runs, on every device (`ModelRunner(..., decoder=True)`).
        resident: the head.
        shape: of every session's tree.
        max_step_tokens: most rows of a step, and so of a round.

    Raises:
        CheckpointError: the model runs as transformers' code.
    """
    if runner.steps is None:
        raise CheckpointError(f"{runner.config.model_path}: one_graph needs the decoder, which does not run this model")
    resident.grows = False
    config = runner.config
    rows, row_len = runner.slots.table.shape
    caches = HeadCaches(keys=resident.key_cache, values=resident.value_cache)
    program = RoundProgram(runner.steps.program, resident.head, caches, shape=shape, max_rows=rows)
    ladder = RoundLadder(shape, max_tokens=min(_MOST_ROWS, max_step_tokens), max_sessions=rows, row_len=row_len)
    graphs = config.attention_backend_name == "triton" and not config.enforce_eager
    return RoundDraft(RoundRunner(program, shape, ladder, runner.slots, graphs=graphs), runner.slots)
