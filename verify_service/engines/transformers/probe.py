"""This file is the probe of a freshly loaded model: does tree attention compute what the model itself computes?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewire.core.tree import DraftTree
from treewire.kv.store import KvStore
from verify_service.attention.layout import StepLayout
from verify_service.attention.tree_attention import LayerCall
from verify_service.engine import Unsupported
from verify_service.engines.transformers.forward import TreeForward
from verify_service.engines.transformers.segments import chain_segment, tree_segment

_CONTEXT_LENGTH = 4
_PARENTS = (-1, 0, 0, 1, 2, 1)
_TOLERANCE = {torch.float32: 1e-3}  # of the largest logit
_COARSE_TOLERANCE = 0.1  # two branches confused show as differences of the order of the logits


@dataclass(frozen=True)
class _ProbeText:
    context: tuple[int, ...]
    tree: DraftTree

    @classmethod
    def spread_over(cls, vocabulary_size: int) -> _ProbeText:
        """Tokens from all over the vocabulary."""
        count = _CONTEXT_LENGTH + len(_PARENTS)
        token_ids = tuple(vocabulary_size * number // count for number in range(count))
        return cls(token_ids[:_CONTEXT_LENGTH], DraftTree(token_ids[_CONTEXT_LENGTH:], _PARENTS))

    def path_to(self, node: int) -> list[int]:
        return [*self.context, *(self.tree.token_ids[step] for step in self.tree.path(node))]


def probe(model: PreTrainedModel) -> KvStore:
    """Run a prefix and a tree after it through the model with its own attention and with ours, and compare.

    Returns the store that was used, which knows the shapes of every layer. Raises Unsupported if a layer's attention does
    not go through transformers' attention interface, or if the logits differ. The model is bound to the probe afterwards.
    """
    config = model.config.get_text_config(decoder=True)
    text = _ProbeText.spread_over(config.vocab_size)
    expected = torch.stack([_last_logits(model, text.path_to(node)) for node in range(len(text.tree))])
    store = KvStore(_CONTEXT_LENGTH + len(text.tree))
    forward = TreeForward(model, store)
    computed = _tree_logits(forward, text)
    _check_calls(forward.calls, config.model_type, config.num_hidden_layers, getattr(config, "layer_types", None))
    _check_logits(computed, expected, config.model_type, model.dtype)
    return store


@torch.inference_mode()
def _last_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    output = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    logits: Tensor = output.logits[0, -1].float()
    return logits


def _tree_logits(forward: TreeForward, text: _ProbeText) -> Tensor:
    slots = np.arange(_CONTEXT_LENGTH + len(text.tree))
    device = forward.device
    prefix = chain_segment(slots[:0], slots[:_CONTEXT_LENGTH], device)
    forward.logits(torch.tensor(text.context, device=device), StepLayout([prefix]), torch.tensor([0], device=device))
    branches = tree_segment(slots[:_CONTEXT_LENGTH], slots[_CONTEXT_LENGTH:], text.tree, device)
    nodes = torch.arange(len(text.tree), device=device)
    return forward.logits(torch.tensor(text.tree.token_ids, device=device), StepLayout([branches]), nodes)


def _check_calls(calls: Sequence[LayerCall], model_type: str, num_layers: int, layer_types: Sequence[str] | None) -> None:
    layers = sorted(call.layer for call in calls)
    if layers != list(range(num_layers)):
        raise Unsupported(
            f"{model_type} has {num_layers} layers, attention through the attention interface was called for layers {layers}"
        )
    unwindowed = [
        call.layer for call in calls if layer_types and layer_types[call.layer] == "sliding_attention" and call.window is None
    ]
    if unwindowed:
        raise Unsupported(f"{model_type} does not tell its attention the sliding window of layers {unwindowed}")


def _check_logits(computed: Tensor, expected: Tensor, model_type: str, dtype: torch.dtype) -> None:
    tolerance = _TOLERANCE.get(dtype, _COARSE_TOLERANCE) * expected.abs().max().item()
    difference = (computed - expected).abs().max().item()
    if not difference <= tolerance:  # also catches NaN
        raise Unsupported(
            f"{model_type} computes other logits with tree attention than with its own: they differ by {difference:.3g}, "
            f"at most {tolerance:.3g} is rounding"
        )
