"""This file is the causal language model as a drafter: any small one of `transformers` that has the target's vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from draft_service.engine import KV_PAGE_SIZE, KV_TOKENS, Drafter, Proposal, SessionId
from draft_service.engines.admission import Grant, check_proposals, check_room, check_start, grant
from draft_service.engines.paged_cache import PagedCache
from draft_service.engines.ranking import Row, rank_vocabulary, to_marginals
from treewire.core.history import History
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals
from treewire.kv.pages import PagedKv
from treewire.kv.rows import SessionRows, Slots
from treewire.kv.store import KvStore

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass
class _Session:
    """`rows` are of all `length` committed tokens, between two calls; in the slots behind them are those of `path`, drafted."""

    rows: SessionRows
    length: int
    sampling: Sampling
    history: History
    path: list[int] = field(default_factory=list)


class CausalLMDrafter:
    """Drafts greedily, depth by depth, along the path of its own best tokens; one row of marginals for each depth.

    The prompt is computed once, at start, but for the full pages that another session has committed; each round computes the
    committed tokens and the horizon - 1 tokens of the path. Rows of the last path whose tokens were committed stay where they
    are; the next ones are written over the others. The sessions of a batch are computed one after another, which keeps each
    the same in every batch; a batch saves nothing. The whole sampling chain is applied, with the session's history and the
    path's.

    `kv_tokens` positions' keys and values fit in all sessions together, in pages of `kv_page_size`. `start` needs room for the
    prompt and a path, a proposal for its commit and its path; either raises KvExhausted, naming the session, before anything
    is computed or taken.

    Raises ValueError for a model whose state cannot be cut back: sliding windows, recurrent layers, encoders.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        horizon: int = 5,
        width: int = 16,
        tokenizer_hash: str = "",
        kv_tokens: int = KV_TOKENS,
        kv_page_size: int = KV_PAGE_SIZE,
    ) -> None:
        _check_model(model, name)
        config = model.config.get_text_config()
        if horizon < 1 or not 1 <= width <= config.vocab_size:
            raise ValueError(f"horizon {horizon} and width {width} must be at least 1, width at most {config.vocab_size}")
        self._model = model.eval()
        self._cache_parameter = _cache_parameter(model, name)
        self._drafter = Drafter(
            "causal_lm", name, config.vocab_size, tokenizer_hash, horizon, width, _max_context(config, name)
        )
        self._num_layers = len(DynamicCache(config=model.config).layers)
        self._kv = PagedKv(kv_tokens, kv_page_size)
        self._store = KvStore(self._kv.num_slots)
        self._sessions: dict[SessionId, _Session] = {}
        self.positions_computed = 0

    @classmethod
    def load(
        cls,
        model: str,
        *,
        name: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        horizon: int = 5,
        width: int = 16,
        num_threads: int | None = None,
        tokenizer_hash: str = "",
        kv_tokens: int = KV_TOKENS,
        kv_page_size: int = KV_PAGE_SIZE,
    ) -> CausalLMDrafter:
        """The drafter of a checkpoint, a folder or a name that `transformers` resolves; safetensors only, no remote code.

        `name` is what people read, by default `model`; `num_threads` is of the whole process, None leaves it. Raises OSError
        where there is no such checkpoint, ValueError on a dtype that is no floating-point one of torch.
        """
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype!r}, it must be a floating-point one of torch, such as 'float32' or 'bfloat16'")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch_dtype, use_safetensors=True, trust_remote_code=False)
        return cls(loaded.to(device), name or model, horizon, width, tokenizer_hash, kv_tokens, kv_page_size)

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""
        return self._drafter

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values."""
        return len(self._sessions)

    @property
    def num_free_slots(self) -> int:
        """Token positions for which memory is free, or would be if pages that nobody holds were evicted."""
        return self._kv.num_free

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Compute the prompt."""
        check_start(self.drafter, self._sessions, session, prompt)
        check_room(self._kv, session, self._kv.room_for(prompt, self.drafter.horizon))
        started = _Session(SessionRows(self._kv, prompt), len(prompt), sampling, History(prompt))
        with ExitStack() as unless_started:
            unless_started.callback(started.rows.release)
            self._commit(started, prompt[started.rows.num_committed :])
            unless_started.pop_all()
        self._sessions[session] = started

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Compute each session's commit, then its path."""
        check_proposals(self.drafter, self._sessions, proposals)
        num_taken = 0
        for proposal in proposals:
            num_rows = len(proposal.commit.token_ids) + max(0, grant(self.drafter, proposal).depths - 1)
            room = self._sessions[proposal.session].rows.room_for(num_rows)
            check_room(self._kv, proposal.session, room, num_taken)
            num_taken += room.num_needed
        return [self._propose(self._sessions[proposal.session], proposal) for proposal in proposals]

    def release(self, session: SessionId) -> None:
        """Let go of the session's pages."""
        released = self._sessions.pop(session, None)
        if released is not None:
            released.rows.release()

    def _propose(self, session: _Session, proposal: Proposal) -> Marginals:
        logits = self._commit(session, proposal.commit.token_ids)
        session.length = proposal.commit.length
        session.history.extend(proposal.commit.token_ids)
        return to_marginals(self._draft(session, logits, grant(self.drafter, proposal)))

    def _draft(self, session: _Session, logits: NDArray[np.float32], granted: Grant) -> list[Row]:
        """A row for each depth; the best token of a row is the next of the path, the last row's is not computed."""
        rows: list[Row] = []
        history = session.history.copy()
        slots = np.concatenate([session.rows.committed, session.rows.next_slots(max(0, granted.depths - 1))])
        while len(rows) < granted.depths:
            if rows:
                best = int(rows[-1].token_ids[0])
                history.extend([best])
                logits = self._forward(slots[: session.length + len(rows)], [best])
                session.path.append(best)
            rows.append(rank_vocabulary(logits, session.sampling, session.length + len(rows), granted.width, history))
        return rows

    def _commit(self, session: _Session, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute the next committed tokens but for those that the path begins with; logits of the token after the last."""
        session.path = session.path[: _num_followed(session.path, token_ids[:-1])]
        slots = np.concatenate([session.rows.committed, session.rows.next_slots(len(token_ids))])
        logits = self._forward(slots, token_ids[len(session.path) :])
        session.rows.commit_chunk(token_ids)
        session.path = []
        return logits

    @torch.inference_mode()
    def _forward(self, slots: Slots, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the token after these, float32 [vocabulary]. `slots` are of the whole sequence, the last where the keys and
        values of these tokens go."""
        input_ids: Tensor = torch.tensor([list(token_ids)], device=self._model.device)
        cache = PagedCache(self._store, torch.from_numpy(slots).to(self._model.device), self._num_layers, len(token_ids))
        outputs = self._model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{self._cache_parameter: cache})
        self.positions_computed += len(token_ids)
        logits: NDArray[np.float32] = outputs.logits[0, -1].float().cpu().numpy()
        return logits


def _num_followed(path: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens of a path these tokens begin with."""
    pairs = enumerate(zip(path, token_ids, strict=False))
    return next((place for place, (guessed, token_id) in pairs if guessed != token_id), min(len(path), len(token_ids)))


def _cache_parameter(model: Any, name: str) -> str:
    """What this release of `transformers` calls the cache: renamed on the way to 5.40."""
    parameters = inspect.signature(model.forward).parameters
    for parameter in ("cache", "past_key_values"):
        if parameter in parameters:
            return parameter
    raise ValueError(f"{name} takes no cache of keys and values; a drafter computes each position once")


def _max_context(config: Any, name: str) -> int:
    """The longest sequence; raises ValueError if the configuration sets none."""
    max_context = getattr(config, "max_position_embeddings", None)
    if not max_context:
        raise ValueError(f"{name} does not say its longest context (max_position_embeddings)")
    return int(max_context)


def _check_model(model: Any, name: str) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; a drafter continues one sequence")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} computes the logits of every position; a drafter needs those of the last alone")
    uncuttable = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {DynamicLayer.__name__}
    if uncuttable:
        raise ValueError(
            f"{name} keeps state in {', '.join(sorted(uncuttable))}, which cannot be cut back to what is committed"
        )
