"""This file is what SGLang cannot do with trees, as rules over options and model: each with its reason and the alternative."""

from __future__ import annotations

from collections.abc import Iterator

from verify_service.engine import Unsupported
from verify_service.engines.sglang.options import SglangOptions
from verify_service.engines.sglang.traits import ModelTraits

_TREE_BACKENDS = ("triton", "fa3", "fa4", "flashinfer", "intel_amx")
_TREE_BACKENDS_MLA = ("triton", "fa3", "fa4")
_REASONS = {
    "flashinfer": "for a model with latent attention (MLA) it builds the tree mask, drops it and computes causal attention",
    "trtllm_mha": "it takes chains only",
    "trtllm_mla": "it computes causal attention, whatever the mask",
    "flashmla": "it computes causal attention, whatever the mask",
    "cutedsl_mla": "it computes causal attention, whatever the mask",
    "torch_native": "it fails when it is asked to verify a tree",
    "intel_amx": "it has no tree mask for latent attention (MLA)",
}
_UNKNOWN_BACKEND = "it is not known to honour a tree mask"
_BACKEND_ARGUMENTS = ("prefill_attention_backend", "decode_attention_backend")
_SINGLE = {
    "page_size": "a kept path stays in its slots, which only single-token pages allow",
    "dp_size": "the gateway balances over replicas: start one verify service for each",
    "pp_size": "the stages of a pipeline would see a tree one after the other: use tp_size",
    "dcp_size": "a tree's mask is not split over ranks: use tp_size",
    "attn_cp_size": "a tree's mask is not split over ranks: use tp_size",
}
_OFF = {
    "enable_dp_attention": "its verify step takes chains only: use tp_size",
    "enable_two_batch_overlap": "a tree is one batch",
}


def check(options: SglangOptions, traits: ModelTraits) -> None:
    """Raises Unsupported with every reason, if there is one."""
    reasons = list(refusals(options, traits))
    if reasons:
        raise Unsupported("; ".join(reasons))


def refusals(options: SglangOptions, traits: ModelTraits) -> Iterator[str]:
    """Why these options cannot serve this model, one sentence each."""
    for backend in _backends(options):
        yield from backend_refusals(backend, is_mla=traits.is_mla)
    yield from _model_refusals(traits)
    yield from _argument_refusals(options)
    yield from _node_refusals(options)
    yield from _context_refusals(options, traits)
    yield from _tap_refusals(options, traits)


def backend_refusals(backend: str, *, is_mla: bool) -> Iterator[str]:
    """Why an attention backend cannot take trees of such a model."""
    able = _TREE_BACKENDS_MLA if is_mla else _TREE_BACKENDS
    if backend not in able:
        reason = _REASONS.get(backend, _UNKNOWN_BACKEND)
        yield f"attention_backend {backend} cannot verify trees: {reason}; take {' or '.join(able)}"


def _backends(options: SglangOptions) -> list[str]:
    others = (options.sglang_args.get(name) for name in _BACKEND_ARGUMENTS)
    return list(dict.fromkeys([options.attention_backend, *(str(backend) for backend in others if backend)]))


def _model_refusals(traits: ModelTraits) -> Iterator[str]:
    if traits.is_encoder_decoder:
        yield f"{traits.model_type} is an encoder-decoder; the engine serves decoder-only models"
    if traits.recurrent_sign:
        yield (
            f"{traits.model_type} keeps a recurrent state ({traits.recurrent_sign}), which a tree would need forked for each "
            "branch; take a target of attention layers only, or decode without this service"
        )
    if traits.window_sign:
        yield (
            f"{traits.model_type} has sliding-window attention ({traits.window_sign}), whose KV slots SGLang keeps apart and "
            "this engine does not; the transformers engine serves such models"
        )
    if traits.is_sparse:
        yield f"{traits.model_type} has sparse attention (index_topk), whose backend takes no tree mask; take a dense target"


def _argument_refusals(options: SglangOptions) -> Iterator[str]:
    for name, reason in _SINGLE.items():
        value = options.sglang_args.get(name, 1)
        if value not in (None, 1):
            yield f"{name} is {value}, this engine takes 1: {reason}"
    for name, reason in _OFF.items():
        if options.sglang_args.get(name):
            yield f"{name} is on, this engine takes it off: {reason}"


def _node_refusals(options: SglangOptions) -> Iterator[str]:
    if options.tp_size % options.nnodes:
        yield f"tp_size is {options.tp_size}, it must be a multiple of nnodes, {options.nnodes}"
    if not 0 <= options.node_rank < options.nnodes:
        yield f"node_rank is {options.node_rank}, of {options.nnodes} nodes the ranks are 0 to {options.nnodes - 1}"
    if options.nnodes > 1 and not options.dist_init_addr:
        yield "nnodes is above 1 and dist_init_addr is not set: give every node the same host:port of node 0"


def _context_refusals(options: SglangOptions, traits: ModelTraits) -> Iterator[str]:
    widest = options.widths[-1]
    if traits.max_positions is None:
        if not options.max_context:
            yield f"{traits.model_type} does not say how long its context is; give max_context"
        return
    longest = traits.max_positions - widest
    if longest < 1:
        yield f"a tree is {widest} nodes wide, {traits.model_type} has only {traits.max_positions} positions; lower tree_widths"
    elif options.max_context > longest:
        yield (
            f"max_context is {options.max_context:,}, {traits.model_type} has {traits.max_positions:,} positions and the "
            f"widest tree needs {widest} of them; take at most {longest:,}, or lower tree_widths"
        )


def _tap_refusals(options: SglangOptions, traits: ModelTraits) -> Iterator[str]:
    last = traits.num_layers - 2  # SGLang hands out a layer's output when the next layer begins
    wrong = [layer for layer in options.tapped_layers if not 0 <= layer <= last]
    if wrong:
        yield f"layer {wrong[0]} is tapped, of {traits.model_type} the outputs of layers 0 to {last} can be tapped"
    if list(options.tapped_layers) != sorted(set(options.tapped_layers)):
        yield f"the tapped layers are {options.tapped_layers}, they must rise"
