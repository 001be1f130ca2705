"""This file is what the SGLang engine can be told, and the arguments for SGLang that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treewire.checkpoint import feature_projection
from verify_service.engines.sglang.traits import ModelTraits

ALGORITHM = "TREEWIRE"
"""The name under which our algorithm is registered with SGLang."""

DEFAULT_TREE_WIDTHS = (9, 17, 33, 65, 129)
_GRAPH_BATCH_SIZES = (1, 2, 4, 8, 12, 16)
_SMALLEST_WIDTH = 2
_NO_LIMITS: Mapping[str, Any] = MappingProxyType({})

# What the engine itself gives SGLang. In `sglang_args` they would contradict it.
_OWN_ARGUMENTS = frozenset(
    {
        "model_path",
        "device",
        "dtype",
        "tp_size",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "nccl_port",
        "base_gpu_id",
        "mem_fraction_static",
        "max_total_tokens",
        "max_running_requests",
        "context_length",
        "attention_backend",
        "quantization",
        "kv_cache_dtype",
        "trust_remote_code",
        "skip_tokenizer_init",
        "disable_radix_cache",
        "random_seed",
        "return_hidden_states_mode",
    }
)
_OWN_PREFIX = "speculative_"


@dataclass(frozen=True)
class SglangOptions:
    """How SGLang serves the target. Zero and the empty text leave a choice to SGLang or to the model.

    `tree_widths` are the captured tree sizes, root included; a tree is padded to the next. `max_context` in tokens, the
    prompt included. `feature_projection` is the checkpoint of the drafter that features are fused
    for; without one, the outputs of `tap_layers` side by side are the features. `sglang_args` are arguments of SGLang's own
    `ServerArgs`. Raises ValueError for a value that cannot be meant; what SGLang cannot do is found by `refusals`.
    """

    model_path: Path
    device: str = "cpu"
    dtype: str = "float32"
    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""
    base_gpu_id: int = 0
    mem_fraction_static: float = 0.0
    max_total_tokens: int = 0
    max_sessions: int = 64
    max_tree_nodes: int = DEFAULT_TREE_WIDTHS[-1]
    tree_widths: tuple[int, ...] = DEFAULT_TREE_WIDTHS
    max_context: int = 0
    attention_backend: str = "triton"
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    trust_remote_code: bool = False
    tap_layers: tuple[int, ...] = ()
    feature_projection: Path | None = None
    sglang_args: Mapping[str, Any] = field(default_factory=lambda: _NO_LIMITS)

    def __post_init__(self) -> None:
        if not self.tree_widths or list(self.tree_widths) != sorted(set(self.tree_widths)):
            raise ValueError(f"tree_widths are {self.tree_widths}, they must rise and there must be one")
        if self.tree_widths[0] < _SMALLEST_WIDTH:
            raise ValueError(f"the first of tree_widths is {self.tree_widths[0]}, it must be at least {_SMALLEST_WIDTH}")
        for name in ("tp_size", "nnodes", "max_sessions", "max_tree_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        own = sorted(name for name in self.sglang_args if name in _OWN_ARGUMENTS or name.startswith(_OWN_PREFIX))
        if own:
            raise ValueError(f"sglang_args has {', '.join(own)}, which this engine sets itself: use its own flags")

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """The layers whose outputs features are made of."""
        return feature_projection(self.feature_projection).tapped_layers if self.feature_projection else self.tap_layers

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that are captured: up to the first that holds the largest tree."""
        needed = [width for width in self.tree_widths if width < self.max_tree_nodes]
        return self.tree_widths[: len(needed) + 1]

    @property
    def largest_tree(self) -> int:
        """Nodes of the largest tree that is taken, root included."""
        return min(self.max_tree_nodes, self.tree_widths[-1])

    @property
    def ranks_per_node(self) -> int:
        """Ranks that run on this machine."""
        return self.tp_size // self.nnodes

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def context_of(self, traits: ModelTraits) -> int:
        """Longest sequence in tokens: as asked, or all that the model leaves beside the widest tree."""
        if self.max_context or traits.max_positions is None:
            return self.max_context
        return traits.max_positions - self.widths[-1]


def server_arguments(options: SglangOptions, traits: ModelTraits, dist_port: int) -> dict[str, Any]:
    """Arguments for SGLang's `ServerArgs`, the same on every rank. `dist_port` is where the ranks of one machine meet."""
    widest = options.widths[-1]
    arguments: dict[str, Any] = {
        "model_path": str(options.model_path),
        "device": options.device,
        "dtype": options.dtype,
        "tp_size": options.tp_size,
        "nnodes": options.nnodes,
        "node_rank": options.node_rank,
        "base_gpu_id": options.base_gpu_id,
        "nccl_port": dist_port,
        "context_length": options.context_of(traits) + widest,
        "max_running_requests": options.max_sessions,
        "attention_backend": options.attention_backend,
        "kv_cache_dtype": options.kv_cache_dtype,
        "trust_remote_code": options.trust_remote_code,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,  # chunks are made by the service
        "page_size": 1,  # kept nodes stay where they are, whichever slots they have
        "random_seed": 0,  # not drawn, so that all ranks agree; SGLang samples nothing here
        "sampling_backend": "pytorch",
        "log_level": "warning",
        "speculative_algorithm": ALGORITHM,
        "speculative_num_draft_tokens": widest,
        "speculative_num_steps": widest - 1,
        "speculative_eagle_topk": widest,  # above 1: what tells fa3 and fa4 that there is a tree
        "return_hidden_states_mode": "full" if options.tapped_layers else None,
        **_graph_arguments(options),
    }
    asked = {
        "dist_init_addr": options.dist_init_addr,
        "mem_fraction_static": options.mem_fraction_static,
        "max_total_tokens": options.max_total_tokens,
        "quantization": options.quantization,
    }
    arguments.update({name: value for name, value in asked.items() if value})
    arguments.update(options.sglang_args)
    return arguments


def _graph_arguments(options: SglangOptions) -> dict[str, Any]:
    if options.device == "cpu":
        return {"disable_cuda_graph": True}
    sizes = [size for size in _GRAPH_BATCH_SIZES if size <= options.max_sessions]
    return {"cuda_graph_bs_decode": sizes, "disable_prefill_cuda_graph": True}
