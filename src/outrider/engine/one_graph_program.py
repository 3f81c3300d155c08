"""What the device does in a one-graph round: verify, choose, walk, extend the head, draft the next candidates.

    candidates of the last round -> rows of the trees
    layers, last norm, logits -> choices -> walks                                      as in any step
    head, over all rows: (hidden states of row r, the token chosen at r)               the extension
    at the last accepted row: head's logits -> candidates of the first step
    k - 1 times: head, one row a session: (its own hidden state, the best candidate) -> candidates of the next step
    candidates -> table, by the session's row

What the host does not know before the round is over, how many candidates are accepted, the device never has to know
as a shape: the extension runs over every row of the trees with their own masks. On an accepted path the token chosen
at a row is the next row's, so its entries are the head's; those of rows off the path are garbage in slots that are
given back. So nothing is gathered, no shape depends on values, and nothing waits for the host.

Position i of the head is (hidden states at i, token i + 1), in the slot of token i. The candidate that follows entry i
is token i + 2 of the sequence, and is chosen with the noise of that position, as the target will choose it.

Shapes: S sessions, n rows of each, T = S n rows, k steps, c candidates, m = k c nodes, F and N sizes of the hidden
states that the head reads and makes, V vocabulary size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from outrider.engine.buckets import Bucket
from outrider.engine.one_graph_buckets import RoundBucket, RoundLayout
from outrider.engine.one_graph_shape import RoundShape
from outrider.engine.step_program import StepOutput, StepProgram
from outrider.kernels.coupled_sampling import coupled_topk
from outrider.kernels.processors import ProcessorBatch, apply_processors
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.kernels.verify_coupled import verify_coupled

_SAMPLING = ("seeds", "choice_positions", "temperature", "top_k", "top_p", "min_p")
_LISTS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "count_start", "count_tokens", "count_output",
    "bias_start", "bias_tokens", "bias_values", "allowed_start", "allowed_tokens", "banned_start", "banned_tokens",
)  # fmt: skip


class Head(Protocol):
    """A layer over the target's hidden states that tells the next tokens (`outrider.engine.eagle`)."""

    @property
    def taps(self) -> tuple[int, ...]:
        """After which layers hidden states are read; see `DecoderInputs.feature_layers`."""
        ...

    @property
    def feature_size(self) -> int:
        """F."""
        ...

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[T, F] of the target to [T, N]."""
        ...

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        batch: TreeAttentionBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """[T, N]; stores the rows' keys and values."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, V] of [R, N]."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadCaches:
    """The head's keys and values, [num_slots, Hkv, D] each, in the target's slots."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Walked:
    """Where the walks of a round ended.

    Attributes:
        choices: [T] the token chosen at every row.
        rows: [S] the last accepted one.
        accepted: [S] how many candidates.
        tokens: [S, k + 1] that were chosen along the path; -1 behind its end.
    """

    choices: torch.Tensor
    rows: torch.Tensor
    accepted: torch.Tensor
    tokens: torch.Tensor


class RoundProgram:
    """A model and its head, with what the head has drafted.

    Args:
        program: the model, its caches and its slot table.
        head: that drafts.
        caches: its KV.
        shape: of every session's tree.
        max_rows: rows of the slot table.
    """

    def __init__(
        self, program: StepProgram, head: Head, caches: HeadCaches, *, shape: RoundShape, max_rows: int
    ) -> None:
        self._program, self._head, self._caches, self._shape = program, head, caches, shape
        self._paths = [(row, node) for row, path in enumerate(shape.paths) for node in path]
        self.device = device = program.device
        # One row more, for what belongs to no session.
        self.known = torch.full((max_rows + 1, shape.nodes), -1, dtype=torch.int32, device=device)
        self._path_columns = torch.tensor([node - 1 for _, node in self._paths], dtype=torch.int64, device=device)
        lengths = torch.tensor([len(path) for path in shape.paths], dtype=torch.int32)
        self._path_ends = lengths.cumsum(0, dtype=torch.int32).to(device)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._program.vocab_size

    @torch.inference_mode()
    def update_slots(self, updates: torch.Tensor) -> None:
        """As the step program's."""
        self._program.update_slots(updates)

    @torch.inference_mode()
    def run(self, bucket: Bucket, data: torch.Tensor, after_layer: Callable[[int], object] | None = None) -> StepOutput:
        """Runs a round; `after_layer` is never called: the round is one piece.

        Args:
            bucket: of the round.
            data: [nbytes] uint8 on the device.
            after_layer: as the step program's.
        """
        del after_layer
        assert isinstance(bucket, RoundBucket)
        arrays = RoundLayout.of_round(bucket).tensors(data)
        table_rows = torch.where(arrays["rows"] < 0, len(self.known) - 1, arrays["rows"]).long()
        known = torch.where(arrays["is_known"][:, None] > 0, self.known[table_rows], -1)
        per = self._shape.rows
        roots = arrays["token_ids"].view(-1, per)[:, :1]
        tokens = torch.cat([roots, known.clamp(min=0)], 1).view(-1)
        rows, dtype = bucket.tokens, self._program.decoder.weights.embedding.dtype
        features = torch.empty((rows, self._head.feature_size), dtype=dtype, device=self.device)
        inputs = replace(
            self._program.inputs(bucket, arrays),
            token_ids=tokens,
            feature_layers=self._head.taps,
            features=features,
        )
        hidden = self._program.decoder.forward(inputs)
        logits = self._program.decoder.logits(hidden, arrays["logit_rows"])
        answer = torch.zeros(answer_len(bucket), dtype=torch.int32, device=self.device)
        walked = self._verify(bucket, logits, arrays, known, answer)
        extended = self._head.forward(
            self._head.fuse(features),
            walked.choices,
            positions=inputs.positions,
            write_slots=inputs.write_slots,
            batch=inputs.batch,
            key_cache=self._caches.keys,
            value_cache=self._caches.values,
        )
        drafted = self._draft(bucket, extended[walked.rows], walked, inputs.batch, arrays)
        self.known[table_rows] = drafted
        return StepOutput(logits=None, answer=answer)

    def _verify(
        self,
        bucket: RoundBucket,
        logits: torch.Tensor,
        arrays: dict[str, torch.Tensor],
        known: torch.Tensor,
        answer: torch.Tensor,
    ) -> _Walked:
        """Choices and walks, and log probabilities where they are wanted, into `answer`."""
        raw = logits
        if bucket.entries:
            logits = logits.to(torch.float32, copy=True)
            apply_processors(logits, self._processors(bucket, arrays, known))
        walks = bucket.logit_rows, bucket.sessions * bucket.nodes, bucket.sessions
        predicts, paths, accepted, told = answer.split([*walks, len(answer) - sum(walks)])
        paths = paths.view(bucket.sessions, bucket.nodes)
        roots = torch.full_like(known[:, :1], -1)
        choices = verify_coupled(
            logits,
            *(arrays[name] for name in _SAMPLING),
            choice_index=arrays["choice_index"],
            candidates=torch.cat([roots, known], 1),
            retrive_index=arrays["tree_rows"],
            retrive_next_token=arrays["first_child"],
            retrive_next_sibling=arrays["next_sibling"],
            predicts=predicts,
            accept_index=paths,
            accept_token_num=accepted,
        )
        if len(told):
            _tell(raw, choices, told, bucket.alternatives)
        ends = paths.gather(1, accepted.long()[:, None]).squeeze(1).long()
        on_path = paths[:, : self._shape.steps + 1]
        place = torch.arange(on_path.shape[1], device=self.device)
        tokens = torch.where(place <= accepted[:, None], choices[on_path.long()], -1)
        return _Walked(choices=choices, rows=ends, accepted=accepted, tokens=tokens)

    def _processors(
        self, bucket: RoundBucket, arrays: dict[str, torch.Tensor], known: torch.Tensor
    ) -> ProcessorBatch:  # fmt: skip
        """What the host listed, and the paths that it does not know."""
        sessions, per = bucket.sessions, self._shape.rows
        number = torch.arange(bucket.tokens, dtype=torch.int32, device=self.device)
        session = number // per
        ends = (session.view(sessions, per) * len(self._paths) + self._path_ends).view(-1)
        return ProcessorBatch(
            row_session=session,
            path_start=torch.cat([torch.zeros_like(ends[:1]), ends]),
            path_tokens=known[:, self._path_columns].view(-1),
            **{name: arrays[name] for name in _LISTS},
        )

    def _head_logits(
        self, bucket: RoundBucket, hidden: torch.Tensor, path: torch.Tensor, arrays: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The head's logits [S, V] with what the target's get: bans of stop tokens alone are left to the target.

        Args:
            bucket: of the round.
            hidden: [S, N].
            path: [S, p] tokens since the round's roots; -1 for none.
            arrays: of the round.
        """
        logits = self._head.logits(hidden)
        if not bucket.entries:
            return logits
        logits = logits.to(torch.float32, copy=True)
        count, length = path.shape
        number = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        apply_processors(
            logits,
            ProcessorBatch(
                row_session=number[:-1],
                path_start=number * length,
                path_tokens=path.reshape(-1),
                **{name: arrays[name] for name in _LISTS if not name.startswith("banned")},
            ),
        )
        return logits

    def _draft(
        self,
        bucket: RoundBucket,
        hidden: torch.Tensor,
        walked: _Walked,
        batch: TreeAttentionBatch,
        arrays: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The candidates [S, m] that follow where the walks ended.

        Args:
            bucket: of the round.
            hidden: [S, N] the head's at the last accepted rows.
            walked: the walks.
            batch: of the round.
            arrays: of the round.
        """
        ends = walked.rows
        sampling = [arrays[name][ends] for name in _SAMPLING]
        index = arrays["choice_index"][ends]
        shape, found = self._shape, []
        mask = batch.tree_mask[ends]
        positions = batch.tree_start + walked.accepted
        for step in range(shape.steps):
            # The entry before the candidate is one position before it, and so are the choice at its end and its own.
            sampling[1] = arrays["choice_positions"][ends] + (step + 1)
            path = torch.cat([walked.tokens, *(tokens[:, :1] for tokens in found)], 1)
            logits = self._head_logits(bucket, hidden, path, arrays)
            tokens, _ = coupled_topk(logits, *sampling, choice_index=index, k=shape.candidates)
            found.append(tokens.to(torch.int32))
            if step == shape.steps - 1:
                break
            mask = mask | 1 << (shape.rows + step)
            where = torch.minimum(positions + (step + 1), arrays["last_positions"])
            hidden = self._head.forward(
                hidden,
                tokens[:, 0].clamp(min=0),
                positions=where,
                write_slots=arrays["draft_slots"][step],
                batch=replace(
                    batch,
                    query_start=arrays["draft_start"],
                    prefix_len=batch.tree_start,
                    tree_mask=mask,
                    max_query_len=1,
                    positions=where,
                ),
                key_cache=self._caches.keys,
                value_cache=self._caches.values,
            )
        return torch.cat(found, 1)


def answer_len(bucket: RoundBucket) -> int:
    """Words of a round's answer: predictions [T], paths [S, n], accepted [S]; and as bits log probabilities of the
    chosen tokens [T], ids of the most likely ones [T, K] and theirs [T, K].
    """
    told = bucket.tokens * (1 + 2 * bucket.alternatives) if bucket.alternatives >= 0 else 0
    return bucket.logit_rows + bucket.sessions * (bucket.nodes + 1) + told


def _tell(raw: torch.Tensor, choices: torch.Tensor, told: torch.Tensor, alternatives: int) -> None:
    """Log probabilities under the raw softmax, written as bits."""
    logprobs = raw.float().log_softmax(dim=-1)
    rows = len(choices)
    chosen, ids, best = told.split([rows, rows * alternatives, rows * alternatives])
    chosen.copy_(logprobs.gather(1, choices[:, None]).view(-1).view(torch.int32))
    if alternatives:
        values, found = logprobs.topk(min(alternatives, logprobs.shape[1]), dim=-1)
        ids.view(rows, alternatives)[:, : values.shape[1]] = found.to(torch.int32)
        best.view(rows, alternatives)[:, : values.shape[1]] = values.view(torch.int32)
