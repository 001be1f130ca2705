"""This file is everything that is private in SGLang: its names, checked at start, and the calls that are made of them.

Nothing else of treewire imports SGLang. What is used here is not promised by SGLang between releases, hence the exact
version; `sglang/benchmark/one_batch.py` of a release shows how its own code goes about the same calls.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verify_service.engine import Unsupported
from verify_service.engines.sglang.batches import ChainBatch, TableWrites, TreeBatch
from verify_service.engines.sglang.messages import Place
from verify_service.engines.sglang.options import ALGORITHM
from verify_service.engines.sglang.refusals import backend_refusals
from verify_service.engines.sglang.release import VERSION, installed_version, mismatch


class Name(NamedTuple):
    """Something of SGLang that is used: where it is, and which of its parameters are given by name."""

    module: str
    path: str
    parameters: tuple[str, ...] = ()


NAMES: tuple[Name, ...] = (
    Name("sglang.srt.server_args", "ServerArgs", ("model_path", "page_size", "nccl_port", "cuda_graph_bs_decode")),
    Name("sglang.srt.server_args", "ServerArgs.resolve_once"),
    Name("sglang.srt.arg_groups.overrides", "resolving_view"),
    Name("sglang.srt.entrypoints.engine", "_set_envs_and_config", ("server_args",)),
    Name("sglang.srt.runtime_context", "publish", ("role", "ranks")),
    Name("sglang.srt.runtime_context", "SpawnRanks", ("world_rank", "gpu_id")),
    Name("sglang.srt.runtime_context", "spawn_world_rank", ("tp_rank", "pp_rank")),
    Name("sglang.srt.runtime_context", "get_context"),
    Name("sglang.srt.runtime_context", "RuntimeContext.override"),
    Name("sglang.srt.runtime_context", "get_device"),
    Name("sglang.srt.layers.moe", "initialize_moe_config"),
    Name("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config"),
    Name("sglang.srt.layers.quantization.unquant", "initialize_bf16_gemm_config"),
    Name("sglang.srt.layers.quantization.fp4_utils", "initialize_fp4_gemm_config"),
    Name("sglang.srt.configs.model_config", "ModelConfig.from_server_args"),
    Name("sglang.srt.configs.hybrid_arch", "mambaish_config"),
    Name("sglang.srt.distributed.bootstrap", "init_parallel_runtime", ("server_args", "device", "dist_port")),
    Name("sglang.srt.distributed.bootstrap", "init_layer_runtime", ("model_config",)),
    Name(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner",
        ("model_config", "mem_fraction_static", "gpu_id", "nccl_port", "server_args"),
    ),
    Name("sglang.srt.model_executor.model_runner", "ModelRunner.alloc_memory_pool"),
    Name("sglang.srt.model_executor.model_runner", "ModelRunner.init_attention_backends"),
    Name("sglang.srt.model_executor.model_runner", "ModelRunner.init_cuda_graphs"),
    Name("sglang.srt.model_executor.model_runner", "ModelRunner._get_attention_backend", ("init_new_workspace",)),
    Name("sglang.srt.model_executor.model_runner", "ModelRunner._decode_cuda_graph_runner_cls"),
    Name("sglang.srt.model_executor.model_runner", "ModelRunner.forward", ("forward_batch",)),
    Name("sglang.srt.model_executor.model_runner", "ModelRunnerOutput", ("logits_output", "can_run_graph")),
    Name(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner",
        ("attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
    ),
    Name("sglang.srt.model_executor.forward_batch_info", "ForwardMode.EXTEND"),
    Name("sglang.srt.model_executor.forward_batch_info", "ForwardMode.TARGET_VERIFY"),
    Name("sglang.srt.model_executor.forward_batch_info", "CaptureHiddenMode.NULL"),
    Name("sglang.srt.model_executor.forward_batch_info", "CaptureHiddenMode.FULL"),
    Name(
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "seq_lens_sum",
            "out_cache_loc",
            "positions",
            "spec_info",
            "spec_algorithm",
            "capture_hidden_mode",
            "return_logprob",
            "extend_num_tokens",
            "extend_seq_lens",
            "extend_prefix_lens",
            "extend_start_loc",
            "extend_prefix_lens_cpu",
            "extend_seq_lens_cpu",
            "extend_logprob_start_lens_cpu",
        ),
    ),
    Name(
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch._init_num_token_non_padded",
        ("device", "is_draft_worker"),
    ),
    Name("sglang.srt.mem_cache.kv_index_translator", "KVIndexTranslator.own_plan", ("forward_batch",)),
    Name("sglang.srt.mem_cache.kv_loc_plan", "KVLocPlan.bind", ("batch", "reader", "cols")),
    Name(
        "sglang.srt.speculative.ngram_info",
        "NgramVerifyInput",
        ("draft_token", "custom_mask", "positions", "draft_token_num"),
    ),
    Name("sglang.srt.speculative.spec_registry", "CustomSpecAlgo.is_ngram"),
    Name("sglang.srt.speculative.spec_registry", "CustomSpecAlgo.has_draft_kv"),
    Name("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.register", ("supports_overlap", "spec_class")),
)

# What is read from a loaded runner, and cannot be looked up before.
RUNNER_ATTRIBUTES = (
    "model",
    "model_config.vocab_size",
    "spec_algorithm",
    "spec_aux_config.dflash_use_aux_hidden_state",
    "spec_aux_config.dflash_target_layer_ids",
    "use_mla_backend",
    "is_hybrid_swa",
    "sliding_window_size",
    "device",
)
LOADED_ATTRIBUTES = (
    "req_to_token_pool.req_to_token",
    "req_to_token_pool.size",
    "kv_index_translator.own_plan",
    "max_total_num_tokens",
    "attn_backend",
    "decode_cuda_graph_runner",
    "decode_attention_backend_str",
    "prefill_attention_backend_str",
)


def check_names(names: Sequence[Name] = NAMES) -> None:
    """Raises Unsupported that names the version and every gap, if SGLang lacks a name or a parameter that is used."""
    found = tuple(gaps(names))
    if found:
        raise Unsupported(mismatch(installed_version(), found))


def gaps(names: Sequence[Name] = NAMES) -> Iterator[str]:
    """What SGLang as it is installed lacks of what is used."""
    for name in names:
        try:
            found: Any = importlib.import_module(name.module)
        except ImportError as error:
            yield f"no module {name.module} ({error})"
            continue
        try:
            for attribute in name.path.split("."):
                found = getattr(found, attribute)
        except AttributeError:
            yield f"no {name.module}.{name.path}"
            continue
        missing = [parameter for parameter in name.parameters if parameter not in inspect.signature(found).parameters]
        if missing:
            yield f"{name.module}.{name.path} has no parameter {', '.join(missing)}"


class ForwardOutput(NamedTuple):
    """Logits [chosen rows, vocabulary] float32, features [all rows, size] or None, and whether a CUDA graph ran."""

    logits: Tensor
    features: Tensor | None
    ran_graph: bool


class _WidthState(NamedTuple):
    """What belongs to one tree width: its attention backend, and its graphs or None."""

    attention: Any
    graphs: Any


class TargetRunner:
    """SGLang's ModelRunner of one rank, loaded, with one captured state for each tree width."""

    def __init__(self, runner: Any, widths: Mapping[int, _WidthState], *, has_taps: bool) -> None:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        self._runner = runner
        self._widths = widths
        self._chain_state = widths[max(widths)]
        self._hidden_mode = CaptureHiddenMode.FULL if has_taps else CaptureHiddenMode.NULL
        self.device = torch.device(runner.device)

    @property
    def num_slots(self) -> int:
        """Token positions for whose keys and values there is memory, the padding slot aside."""
        return int(self._runner.max_total_num_tokens)

    @property
    def num_rows(self) -> int:
        """Sessions that fit in the table of KV slots, its padding row aside."""
        return int(self._runner.req_to_token_pool.size)

    @property
    def attention_backend(self) -> str:
        """What computes the attention of trees."""
        return str(self._runner.decode_attention_backend_str)

    @property
    def captured(self) -> bool:
        """True if trees run in CUDA graphs."""
        return all(state.graphs is not None for state in self._widths.values())

    def write_table(self, writes: TableWrites) -> None:
        """Set entries of the table of KV slots."""
        table = self._runner.req_to_token_pool.req_to_token
        table[self._put(writes.rows), self._put(writes.columns)] = self._put(writes.slots).to(table.dtype)

    @torch.inference_mode()
    def extend(self, batch: ChainBatch) -> ForwardOutput:
        """Compute chunks of prompts; the logits are those after the last token of each."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lengths, prefix_lengths = torch.from_numpy(batch.lengths), torch.from_numpy(batch.prefix_lengths)
        starts = torch.from_numpy(np.cumsum(batch.lengths) - batch.lengths)
        return self._forward(
            self._chain_state,
            batch,
            prefix_lengths + lengths,
            forward_mode=ForwardMode.EXTEND,
            extend_num_tokens=len(batch.token_ids),
            extend_seq_lens=lengths.to(self.device, torch.int32),
            extend_prefix_lens=prefix_lengths.to(self.device, torch.int32),
            extend_start_loc=starts.to(self.device, torch.int32),
            extend_seq_lens_cpu=lengths.tolist(),
            extend_prefix_lens_cpu=prefix_lengths.tolist(),
            extend_logprob_start_lens_cpu=lengths.tolist(),
        )

    @torch.inference_mode()
    def verify(self, batch: TreeBatch) -> ForwardOutput:
        """Compute trees; logits and features of every node, padding nodes included."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        spec_info = NgramVerifyInput(
            draft_token=self._put(batch.token_ids),
            custom_mask=self._full_mask(batch),
            positions=self._put(batch.positions),
            draft_token_num=batch.width,
        )
        spec_info.capture_hidden_mode = self._hidden_mode
        return self._forward(
            self._widths[batch.width],
            batch,
            torch.from_numpy(batch.prefix_lengths),  # attention backends add the width
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=spec_info,
        )

    def _forward(self, state: _WidthState, batch: ChainBatch | TreeBatch, lengths: Tensor, **fields: Any) -> ForwardOutput:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        runner = self._runner
        runner.attn_backend, runner.decode_cuda_graph_runner = state
        forward_batch = ForwardBatch(
            batch_size=len(batch.rows),
            input_ids=self._put(batch.token_ids),
            req_pool_indices=self._put(batch.rows),
            seq_lens=lengths.to(self.device),
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=self._put(batch.slots),
            positions=self._put(batch.positions),
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=self._hidden_mode,
            return_logprob=False,
            **fields,
        )
        forward_batch._init_num_token_non_padded(device=self.device, is_draft_worker=False)
        translator = runner.kv_index_translator
        translator.own_plan(forward_batch).bind(forward_batch, translator, cols=None)
        output = runner.forward(forward_batch)
        logits = output.logits_output.next_token_logits[:, : runner.model_config.vocab_size].float()
        return ForwardOutput(logits, output.logits_output.hidden_states, bool(output.can_run_graph))

    def _full_mask(self, batch: TreeBatch) -> Tensor:
        """SGLang's layout: of each tree [width, prefix + width] in row order, one after the other, true where seen."""
        lengths = (batch.prefix_lengths + batch.width).tolist()
        mask = torch.ones(batch.width * sum(lengths), dtype=torch.bool, device=self.device)
        visible = torch.from_numpy(batch.visible).to(self.device)
        start = 0
        for number, length in enumerate(lengths):
            stop = start + batch.width * length
            mask[start:stop].view(batch.width, length)[:, -batch.width :] = visible[number]
            start = stop
        return mask

    def _put(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def load(arguments: Mapping[str, Any], place: Place, widths: Sequence[int], tap_layers: Sequence[int]) -> TargetRunner:
    """Load one rank's share of the target. All ranks must call it; they meet in it. Raises Unsupported with the reason."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_device

    server_args = _published_arguments(arguments, place)
    model_config = ModelConfig.from_server_args(server_args)
    _check_model(model_config)
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=place.dist_port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=_resolved(server_args).mem_fraction_static,
        gpu_id=place.gpu_id,
        nccl_port=place.dist_port,
        server_args=server_args,
    )
    _check_attributes(runner, RUNNER_ATTRIBUTES)
    _check_runner(runner)
    _tap(runner, tap_layers)
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    _check_attributes(runner, LOADED_ATTRIBUTES)
    _check_backends(runner)
    return TargetRunner(runner, dict(_width_states(runner, widths)), has_taps=bool(tap_layers))


def _published_arguments(arguments: Mapping[str, Any], place: Place) -> Any:
    """SGLang's own arguments, resolved, and made those of this process."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    _register_algorithm()
    unknown = sorted(set(arguments) - set(inspect.signature(ServerArgs).parameters))
    if unknown:
        raise Unsupported(f"sglang_args has {', '.join(unknown)}, which sglang {VERSION} does not know")
    server_args = ServerArgs(**arguments)
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    world_rank = spawn_world_rank(server_args, tp_rank=place.tp_rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=place.gpu_id))
    for initialize in (
        initialize_moe_config,
        initialize_fp8_gemm_config,
        initialize_bf16_gemm_config,
        initialize_fp4_gemm_config,
    ):
        initialize()
    return server_args


def _register_algorithm() -> None:
    """An algorithm that drafts nothing here. As `is_ngram` it has SGLang take trees of any shape, and keep no drafter's KV."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Treewire(CustomSpecAlgo):  # type: ignore[misc] # SGLang has no types
        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=Treewire)  # type: ignore[untyped-decorator]
    def no_worker(server_args: Any) -> Any:
        raise RuntimeError("treewire drafts in a service of its own, SGLang's scheduler has no part in it")


def _resolved(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _check_model(model_config: Any) -> None:
    """What config.json may not have told is known to SGLang."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(model_config) is not None:
        raise Unsupported("the model keeps a recurrent state, which a tree would need forked for each branch")


def _check_runner(runner: Any) -> None:
    if runner.is_hybrid_swa or (runner.sliding_window_size or 0) > 0:
        raise Unsupported(
            f"the model has sliding-window attention (of {runner.sliding_window_size}), whose KV slots SGLang keeps apart and "
            "this engine does not"
        )


def _check_backends(runner: Any) -> None:
    """SGLang may have put other backends in the place of those that it was given."""
    names = {runner.decode_attention_backend_str, runner.prefill_attention_backend_str}
    reasons = [reason for name in sorted(names) for reason in backend_refusals(name, is_mla=runner.use_mla_backend)]
    if reasons:
        raise Unsupported("; ".join(reasons))


def _check_attributes(runner: Any, paths: Sequence[str]) -> None:
    found = []
    for path in paths:
        value = runner
        try:
            for attribute in path.split("."):
                value = getattr(value, attribute)
        except AttributeError:
            found.append(f"no ModelRunner.{path}")
    if found:
        raise Unsupported(mismatch(installed_version(), found))


def _tap(runner: Any, tap_layers: Sequence[int]) -> None:
    """Have the model hand out the outputs of these layers. Before backends and graphs are made."""
    if not tap_layers:
        return
    if not hasattr(runner.model, "set_dflash_layers_to_capture"):
        raise Unsupported(f"{type(runner.model).__name__} of sglang {VERSION} hands out no hidden states of inner layers")
    runner.spec_aux_config.dflash_use_aux_hidden_state = True
    runner.spec_aux_config.dflash_target_layer_ids = list(tap_layers)


def _width_states(runner: Any, widths: Sequence[int]) -> Iterator[tuple[int, _WidthState]]:
    """The widest is what the runner has captured already; the others are made as SGLang makes adaptive widths."""
    from sglang.srt.runtime_context import get_context

    widest = max(widths)
    yield widest, _WidthState(runner.attn_backend, runner.decode_cuda_graph_runner)
    for width in widths:
        if width == widest:
            continue
        _override_width(get_context(), width)
        attention = runner._get_attention_backend(init_new_workspace=True)
        graphs = None
        if runner.decode_cuda_graph_runner is not None:
            graphs = runner._decode_cuda_graph_runner_cls()(
                runner,
                attn_backend=attention,
                speculative_num_steps=width - 1,
                speculative_num_draft_tokens=width,
            )
        yield width, _WidthState(attention, graphs)
    _override_width(get_context(), widest)


def _override_width(context: Any, width: int) -> None:
    context.override("treewire.tree_width", speculative_num_steps=width - 1, speculative_num_draft_tokens=width)
