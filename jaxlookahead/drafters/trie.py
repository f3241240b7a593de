"""The trie drafter: every source of next tokens, expanded best first into one tree."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from jaxlookahead.drafters.calibration import Calibration
from jaxlookahead.drafters.estimates import Texts
from jaxlookahead.drafters.expansion import Mode, grow
from jaxlookahead.drafters.memory import BURST, Memory, token_list
from jaxlookahead.drafters.merging import merge_memories
from jaxlookahead.drafters.persistence import pack, unpack, write_atomically
from jaxlookahead.drafters.protocol import Draft, DrafterBase
from jaxlookahead.drafters.request_state import ParentText, RequestState
from jaxlookahead.drafters.siblings import LiveTexts, SiblingSource
from jaxlookahead.drafters.sources import Source, SuccessorTable
from jaxlookahead.drafters.suffix_index import MAX_TOKEN, SuffixIndex

if TYPE_CHECKING:
    from jaxlookahead.drafters.snapshot import TrieSnapshot


class TrieDrafter(DrafterBase):
    """Drafts from the request's own text and from shared text that grows with every response.

    Shared text is kept per namespace: what one namespace holds is never drafted in another, unless the other
    was told to fall back on it (`set_parent`). What a live request has emitted so far is shared too, with the
    requests that are alive beside it in its namespace; once it ends it is remembered or gone. All methods may be
    called from several threads; a lock serialises them, and an insertion lets others in between its chunks.
    """

    def __init__(
        self,
        *,
        depth: int = 6,
        max_nodes: int = 1 << 21,
        mode: Mode = "tree",
        use_request: bool = True,
        use_shared: bool = True,
        use_siblings: bool = True,
        remember_prompts: bool = False,
        successors: int = 0,
        sources: Iterable[Source] = (),
        eos_ids: Collection[int] = (),
        vocab_size: int | None = None,
        tokenizer_fingerprint: str | None = None,
        labels: bool = False,
    ) -> None:
        """
        Args:
          depth: length of the longest context whose continuations are counted; longer matches are followed in
            the text itself.
          max_nodes: hard cap on the nodes of shared memory, over all namespaces; a node takes some 170 bytes.
          mode: `tree`, `parallel` (branches that share no nodes) or `single` (one branch).
          use_request: whether to draft from the request's own text.
          use_shared: whether to draft from shared text.
          use_siblings: whether shared text includes what other live requests of the same namespace have emitted.
          remember_prompts: whether a request's prompt joins shared memory with its response when it ends.
          successors: how many of the model's own likeliest next tokens to remember after each verified token,
            given by `observe_topk`; 0 for none.
          sources: further sources, such as `GuessPool()` for Jacobi guesses.
          eos_ids: tokens after which nothing is drafted.
          vocab_size: token ids must be below it.
          tokenizer_fingerprint: written to files and asked of files; see
            `jaxlookahead.drafters.persistence.tokenizer_fingerprint`.
          labels: whether drafts name the source of each node, which makes them slower.

        Raises:
          ValueError: an option has no meaning.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")
        if vocab_size is not None and not 0 < vocab_size <= MAX_TOKEN:
            raise ValueError(f"vocab_size={vocab_size} must be from 1 to {MAX_TOKEN}")
        if successors < 0:
            raise ValueError(f"successors={successors} must not be negative")
        self.depth = depth
        self.mode = mode
        self.use_request = use_request
        self.use_shared = use_shared
        self.use_siblings = use_siblings
        self.remember_prompts = remember_prompts
        self.eos_ids = frozenset(int(token) for token in eos_ids)
        self.vocab_size = vocab_size
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.labels = labels
        self.successors = SuccessorTable(successors) if successors else None
        self.sources: tuple[Source, ...] = tuple(sources)
        if self.successors is not None:
            self.sources += (self.successors,)
        self._live = LiveTexts()
        self._siblings = SiblingSource(self._live)
        names = [source.name for source in self.sources]
        taken = ["request", "shared", "parent", self._siblings.name]
        if len(set(names)) < len(names) or set(taken) & set(names):
            raise ValueError(f"sources need distinct names other than {', '.join(taken)}, got {names}")
        self.memory = Memory(depth, max_nodes)
        self._nothing = SuffixIndex(depth)
        self._nothing_root = self._nothing.new_root()
        self._requests: dict[Hashable, RequestState] = {}
        self._lock = threading.RLock()
        self._writing = threading.RLock()

    @property
    def wants_topk(self) -> int:
        """How many of the likeliest next tokens `observe_topk` would like to have of every verified node."""
        return max((source.wants_topk for source in self.sources), default=0)

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        """See `Drafter`."""
        tokens = token_list("prompt", prompt, self.vocab_size)
        with self._lock:
            if request in self._requests:
                raise ValueError(f"request {request!r} has begun already: end it first")
            state = RequestState(self.depth, namespace, len(tokens))
            self._requests[request] = state
            self.memory.hold(namespace)
            for token in tokens:
                state.push(token)
            self._live.begin(request, tokens, namespace)
            for source in self.sources:
                source.begin(request, tokens, namespace)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        ids = token_list("tokens", tokens, self.vocab_size)
        with self._lock:
            state = self._state(request)
            texts = self._texts(state)
            for token in ids:
                texts = state.take(texts, token)
            self._live.extend(request, ids)
            for source in self.sources:
                source.extend(request, ids)

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        """See `Drafter`."""
        with self._lock:
            state = self._state(request)
            texts = self._texts(state)
            place = state.locate(texts)
            side = ()
            if texts.extras:
                side = tuple(
                    source.open(request, state.namespace, state.index.text, budget, max_depth)
                    for source in texts.extras
                )
                state.side, state.asked = side, tuple(source.name for source in texts.extras)
            draft = grow(
                texts,
                place,
                budget,
                max_depth,
                mode=self.mode,
                side=side,
                eos_ids=self.eos_ids,
                labels=self.labels,
            )
            state.estimated = draft.probs or []
            draft.probs = texts.calibration.corrected(state.estimated, draft.parents)
            return draft

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""
        with self._lock:
            state = self._state(request)
            self.memory.calibration(state.namespace).verified(state.estimated[: len(draft)], accepted)
            topk, state.topk = state.topk, ()
            for source in self.sources:
                source.verified(request, draft, accepted, topk)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        """See `Drafter.end`. Of a response of more than 2,048 tokens, the rest joins shared memory in `idle`."""
        with self._lock:
            state = self._state(request)
            del self._requests[request]
            if remember:
                start = 0 if self.remember_prompts else state.prompt_length
                self.memory.enqueue(state.index.text[start:].tolist(), state.namespace, request)
            self.memory.let_go(state.namespace)
            self._live.end(request)
            for source in self.sources:
                source.end(request, remember)
        self._work()

    def idle(self) -> None:
        """Puts up to 2,048 tokens in that wait to join shared memory."""
        self._work()

    def insert(
        self,
        tokens: Sequence[int],
        *,
        namespace: Hashable | None = None,
        key: Hashable | None = None,
        wait: bool = True,
    ) -> None:
        """Puts a document, a past response or a past prompt into shared memory.

        This takes some 5 microseconds a token. Other threads may draft meanwhile: they wait for 256 tokens at most.

        Args:
          tokens: its token ids. Nothing is ever drafted across the end of a document.
          namespace: who may draft from it; `None` is the common namespace.
          key: a name by which `forget` finds it; several documents may have the same.
          wait: whether all of it is in on return. Otherwise the call returns after 2,048 tokens, or as soon as
            another thread is found inserting, and what is left goes in during later calls of `idle` (one for each
            step of decoding): for long documents that come while requests are being decoded.

        Raises:
          ValueError: a token id is negative or too large.
        """
        ids = token_list("tokens", tokens, self.vocab_size)
        with self._lock:
            self.memory.enqueue(ids, namespace, key)
            for source in self.sources:
                source.insert(ids, namespace)
        if wait:
            with self._writing:
                self.memory.work(self._lock)
        else:
            self._work()

    def forget(self, key: Hashable) -> int:
        """Removes all documents of a key, or the remembered response of a request, from shared memory.

        Returns:
          the number of documents removed.
        """
        with self._settled():
            return self.memory.forget(key)

    def forget_namespace(self, namespace: Hashable | None) -> None:
        """Removes everything of a namespace, what was learnt about it included.

        Raises:
          ValueError: a request of this namespace is alive.
        """
        with self._settled():
            self.memory.forget_namespace(namespace)
            for source in self.sources:
                source.forget(namespace)

    def set_parent(self, namespace: Hashable, parent: Hashable | None) -> None:
        """Lets `namespace` also draft from `parent` (None: the common namespace), and from its parents in
        turn.

        Raises:
          ValueError: `namespace` would become its own ancestor.
        """
        with self._writing, self._lock:
            self.memory.set_parent(namespace, parent)

    def observe_topk(self, request: Hashable, tokens: Sequence[int], topk: Sequence[Sequence[int]]) -> None:
        """Tells the model's likeliest next tokens, likeliest first, after each of the verified `tokens`: the newest
        one, then the draft's. Called before `verified`."""
        with self._lock:
            state = self._state(request)
            if self.successors is not None:
                self.successors.observe(state.namespace, tokens, topk)
            state.topk = topk

    def snapshot(self, *, namespace: Hashable | None = None) -> TrieSnapshot:
        """What shared memory holds of a namespace now, as arrays for `on_device.generate`. Puts in what waits first."""
        from jaxlookahead.drafters.snapshot import take

        with self._settled():
            root = self.memory.roots.get(namespace)
            if root is None:
                return take(self._nothing, self._nothing_root)
            return take(self.memory.index, root)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes shared memory and what was learnt about it to a file, atomically.

        Raises:
          TypeError: a namespace is not made of None, str, int, bool and tuples of them. Keys of documents
            that are not are left out, so `forget` does not find those after loading.
        """
        with self._writing:
            with self._settled():
                parts = pack(self.memory, self.vocab_size, self.tokenizer_fingerprint)
            write_atomically(path, parts)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces shared memory by a file's.

        Raises:
          TrieFileError: the file is not one, is damaged, or was made for another vocabulary, tokenizer or
            depth; nothing has changed then.
        """
        loaded = unpack(path, self.memory.max_nodes, self.depth, self.vocab_size, self.tokenizer_fingerprint)
        with self._settled():
            self.memory.replace(loaded)

    def merge(self, *others: TrieDrafter) -> None:
        """Takes in the shared memory of other drafters, in an order that does not depend on the order of
        arguments.

        The result is as if all documents whose text is still held had been put into one memory, those that
        are oldest within their own memory first.
        """
        drafters = (self, *others)
        with contextlib.ExitStack() as held:
            # In one order everywhere, so that two merges can't wait for each other.
            for drafter in sorted(dict.fromkeys(drafters), key=id):
                held.enter_context(drafter._settled())
            self.memory.replace(merge_memories([drafter.memory for drafter in drafters]))

    def stats(self) -> dict[str, Any]:
        """Sizes of shared memory: `nodes`, `max_nodes`, `tokens`, `waiting` (tokens still to go in), `documents`,
        `namespaces`, `bytes`."""
        with self._lock:
            return self.memory.stats()

    def _work(self) -> None:
        """Puts waiting text in, as much as does not stall the caller; leaves it to another thread that is at it."""
        if self._writing.acquire(blocking=False):
            try:
                self.memory.work(self._lock, BURST)
            finally:
                self._writing.release()

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Both locks, once all waiting text is in."""
        with self._writing, self._lock:
            self.memory.work(self._lock)
            yield

    def _state(self, request: Hashable) -> RequestState:
        try:
            return self._requests[request]
        except KeyError:
            raise KeyError(f"request {request!r} has not begun or has ended: call begin first") from None

    def _texts(self, state: RequestState) -> Texts:
        memory = self.memory
        root = memory.root(state.namespace)
        calibration: Calibration = memory.calibration(state.namespace)
        extras = self.sources
        if self.use_shared and self.use_siblings and self._live.any(state.namespace):
            extras = (*extras, self._siblings)
        if self.use_shared:
            index = memory.index
            for parent in memory.ancestors(state.namespace):
                source = ParentText(self._nothing, self._nothing_root, index, memory.root(parent), calibration)
                extras = (*extras, source)
        else:
            index, root = self._nothing, self._nothing_root
        own, own_root = (state.index, state.root) if self.use_request else (self._nothing, self._nothing_root)
        return Texts(own, own_root, index, root, calibration, state.success(), extras)
