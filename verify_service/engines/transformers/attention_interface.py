"""This file is the crossing from transformers' attention interface to tree attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from verify_service.attention.tree_attention import TreeAttention
from verify_service.engine import Unsupported

_IMPLEMENTATION = "treewire"  # has no mask function in transformers: models then build no mask at all
_BOUND_NAME = "tree_attention"

# What models pass along that says nothing about what attention computes.
_IRRELEVANT = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def bind(model: PreTrainedModel, attention: TreeAttention) -> None:
    """From now on the model's attention is `attention`. Each layer holds it, so models in one process do not meet."""
    model.set_attn_implementation(_IMPLEMENTATION)
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            vars(module)[_BOUND_NAME] = attention


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention functions. Raises Unsupported on what tree attention does not compute."""
    asked = [name for name, value in others.items() if value is not None and name not in _IRRELEVANT]
    if attention_mask is not None:
        asked.append("attention_mask")
    if is_causal is False:
        asked.append("is_causal=False")
    if asked:
        raise Unsupported(f"the model's attention uses {', '.join(asked)}, which tree attention does not compute")
    attention: TreeAttention = vars(module)[_BOUND_NAME]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention(int(vars(module)["layer_idx"]), query, key, value, scaling, sliding_window)[None], None


AttentionInterface.register(_IMPLEMENTATION, _attend)
