"""The open sessions of a target: what opens, closes and checks them."""

import numpy as np

from outrider.engine.model_runner import ModelRunner
from outrider.errors import OutOfSlots
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar
from outrider.target_worker.open_checks import check_open
from outrider.target_worker.session_kv import SessionKv
from outrider.target_worker.sessions import Code, OpenRequest, Session, SessionFault, SessionKey, TreeRequest
from outrider.target_worker.tree_checks import check_length, check_tree


class OpenSessions(dict[SessionKey, Session]):
    """Sessions by key, in the order in which they were opened. Not thread-safe.

    Args:
        runner: the target.
        kv: where their KV is.
    """

    def __init__(self, runner: ModelRunner, kv: SessionKv) -> None:
        super().__init__()
        self._runner, self._slots, self._kv = runner, runner.slots, kv
        self._grammars = GrammarCompiler.of_checkpoint(runner.config.model_path)
        self._opens = 0

    def is_in_flight(self, key: SessionKey) -> bool:
        """Whether a step of the session has begun and is not finished."""
        session = self.get(key)
        return session is not None and session.in_flight

    def open(self, request: OpenRequest) -> None:
        """Opens a session, or replaces it where it is open under the same or an older epoch, and not in flight.

        KV of tokens that the old and the new state share from the start on is kept, and more is taken from the cache.

        Raises:
            SessionFault: an older epoch, tokens or parameters out of range, no room.
        """
        held = self.get(request.key)
        if held is not None and request.epoch < held.epoch:
            raise SessionFault(Code.FAILED_PRECONDITION, f"epoch {request.epoch} is over: {held.epoch} is open")
        tokens = [*request.prompt, *request.output]
        ids = np.array(tokens, dtype=np.int64)
        check_open(request, ids, model=self._runner.info, num_slots=self._slots.num_slots)
        assert held is None or not held.in_flight, "a session is reopened while its step is in flight"
        self._opens += 1
        session = self[request.key] = Session(
            key=request.key,
            epoch=request.epoch,
            order=self._opens if held is None else held.order,
            row=self._acquire_row() if held is None else held.row,
            tokens=tokens,
            prompt_len=len(request.prompt),
            sampling=request.sampling,
            limit=min(len(request.prompt) + request.sampling.max_new_tokens, self._runner.info.max_model_len),
            grammar=self._grammar_of(request),
            draft=request.draft,
        )
        session.set_token_ids(ids)
        if held is not None:
            shared = self._kv.common_length(held, session)
            self._kv.cut(held, shared)
            session.next_node_id = held.next_node_id
            session.cached_tokens, session.reached = held.cached_tokens, min(held.reached, shared)
        self._kv.take(session)

    def close(self, key: SessionKey, epoch: int) -> None:
        """Frees a session and its slots, after its step in flight; unknown ones and reopened ones stay as they are."""
        session = self.get(key)
        if session is None or session.epoch > epoch:
            return
        session.closing = True
        if not session.in_flight:
            del self[key]
            self._kv.release(session)

    def forget(self) -> None:
        """Closes all sessions, none of which may be in flight, and remembers no KV: it is of weights that go."""
        for session in list(self.values()):
            self.close(session.key, session.epoch)
        assert not self, "a session's step was in flight"
        self._kv.forget()

    def checked(self, tree: TreeRequest, *, repeated: bool) -> Session:
        """The session of a tree, cut to what the tree says is committed.

        Args:
            tree: to be verified.
            repeated: whether its session stands in the batch more than once.

        Raises:
            SessionFault: it is not open under the tree's epoch, or the tree does not fit it.
        """
        session = self.get(tree.key)
        if session is None or session.epoch < tree.epoch:
            raise SessionFault(Code.NOT_FOUND, "the session is not open here under this epoch: open it again")
        if session.epoch > tree.epoch:
            raise SessionFault(Code.FAILED_PRECONDITION, f"epoch {tree.epoch} is over: {session.epoch} is open")
        if repeated:
            raise SessionFault(Code.INVALID_ARGUMENT, "the session stands in the batch more than once")
        check_length(tree, session, num_slots=self._slots.num_slots)
        check_tree(tree, session.sampling.rule, self._runner.vocab_size)
        if tree.length < len(session.tokens):
            self._kv.cut(session, tree.length - 1)
            session.truncate(tree.length)
        return session

    def _grammar_of(self, request: OpenRequest) -> SessionGrammar | None:
        grammar, end_ids = request.sampling.grammar, request.sampling.grammar_end_ids
        return SessionGrammar(self._grammars.start(grammar, end_ids), end_ids) if grammar else None

    def _acquire_row(self) -> int:
        try:
            return self._slots.acquire_row()
        except OutOfSlots as error:
            raise SessionFault(Code.RESOURCE_EXHAUSTED, str(error)) from error
