"""This file is the causal language model as a drafter: any small one of `transformers` that has the target's vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from draft_service.engine import Drafter, Proposal, SessionId
from draft_service.engines.admission import Grant, check_proposals, check_start, grant
from draft_service.engines.ranking import Row, rank_vocabulary, to_marginals
from treewire.core.history import History
from treewire.core.sampling import Sampling
from treewire.core.tree import Marginals

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass
class _Session:
    """`cache` holds the keys and values of all `length` committed tokens, and of no other, between two calls."""

    cache: Any
    length: int
    sampling: Sampling
    history: History


class CausalLMDrafter:
    """Drafts greedily, depth by depth, along the path of its own best tokens; one row of marginals for each depth.

    The prompt is computed once, at start; each round computes the committed tokens and the horizon - 1 tokens of the path,
    whose keys and values are dropped again. The sessions of a batch are computed one after another, which keeps each the same
    in every batch; a batch saves nothing. The whole sampling chain is applied, with the session's history and the path's.

    Raises ValueError for a model whose state cannot be cut back: sliding windows, recurrent layers, encoders.
    """

    def __init__(self, model: Any, name: str, horizon: int = 5, width: int = 16, tokenizer_hash: str = "") -> None:
        _check_model(model, name)
        config = model.config.get_text_config()
        if horizon < 1 or not 1 <= width <= config.vocab_size:
            raise ValueError(f"horizon {horizon} and width {width} must be at least 1, width at most {config.vocab_size}")
        self._model = model.eval()
        self._cache_parameter = _cache_parameter(model, name)
        self._drafter = Drafter(
            "causal_lm", name, config.vocab_size, tokenizer_hash, horizon, width, _max_context(config, name)
        )
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
        return cls(loaded.to(device), name or model, horizon, width, tokenizer_hash)

    @property
    def drafter(self) -> Drafter:
        """What this engine is."""
        return self._drafter

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values."""
        return len(self._sessions)

    def start(self, session: SessionId, prompt: Sequence[int], sampling: Sampling) -> None:
        """Compute the prompt."""
        check_start(self.drafter, self._sessions, session, prompt)
        started = _Session(DynamicCache(config=self._model.config), len(prompt), sampling, History(prompt))
        self._forward(started, prompt)
        self._sessions[session] = started

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        """Compute each session's commit, then its path."""
        check_proposals(self.drafter, self._sessions, proposals)
        return [self._propose(self._sessions[proposal.session], proposal) for proposal in proposals]

    def release(self, session: SessionId) -> None:
        """Drop the session's keys and values."""
        self._sessions.pop(session, None)

    def _propose(self, session: _Session, proposal: Proposal) -> Marginals:
        try:
            logits = self._forward(session, proposal.commit.token_ids)
            session.length = proposal.commit.length
            session.history.extend(proposal.commit.token_ids)
            return to_marginals(self._draft(session, logits, grant(self.drafter, proposal)))
        finally:
            _cut(session.cache, session.length)

    def _draft(self, session: _Session, logits: NDArray[np.float32], granted: Grant) -> list[Row]:
        """A row for each depth; the best token of a row is the next of the path, the last row's is not computed."""
        rows: list[Row] = []
        history = session.history.copy()
        while len(rows) < granted.depths:
            if rows:
                best = int(rows[-1].token_ids[0])
                history.extend([best])
                logits = self._forward(session, [best])
            rows.append(rank_vocabulary(logits, session.sampling, session.length + len(rows), granted.width, history))
        return rows

    @torch.inference_mode()
    def _forward(self, session: _Session, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the token after these, float32 [vocabulary]; their keys and values go to the session's cache."""
        input_ids: Tensor = torch.tensor([token_ids], device=self._model.device)
        outputs = self._model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{self._cache_parameter: session.cache})
        self.positions_computed += len(token_ids)
        logits: NDArray[np.float32] = outputs.logits[0, -1].float().cpu().numpy()
        return logits


def _cut(cache: Any, length: int) -> None:
    """Keep the first `length` positions; the next update copies them, which frees the rest."""
    for layer in cache.layers:
        layer.keys = layer.keys[..., :length, :]
        layer.values = layer.values[..., :length, :]


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
