"""This file is what the verify service can be told."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from treewire.runtime.settings import Address, ServiceSettings

_SGLANG_ONLY = frozenset(
    {
        "model_path",
        "mem_fraction_static",
        "max_total_tokens",
        "attention_backend",
        "quantization",
        "kv_cache_dtype",
        "trust_remote_code",
        "tree_widths",
        "sglang_args",
    }
)

_RANKS_ONLY = frozenset({"tp_size", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id"})
_ENGINES_WITH_RANKS = ("transformers", "sglang")


class VerifySettings(ServiceSettings):
    """Settings of the verify service. Flags are the names with dashes, environment variables TREEWIRE_VERIFY_NAME."""

    service: ClassVar[str] = "verify"

    bind: Address = Field(
        "127.0.0.1:50052", description="Where to listen: host:port, [ipv6]:port or unix:/path; port 0 is any."
    )
    engine: Literal["transformers", "sglang", "simulated"] = Field("transformers", description="What runs the target.")
    model: str = Field("smollm2-135m", description="Alias, directory, GGUF file or hub id of the target.")
    device: str = Field("cpu", description="PyTorch device of the target.")
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32", description="Type of the target's weights; int8 on x86 CPUs, for Llama, Qwen2 and Qwen3."
    )
    forward: Literal["auto", "lean", "transformers"] = Field(
        "auto", description="Whose forward: our lean one, or transformers' modules; auto is lean where it computes the model."
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="Whether trees run on static buffers, captured as graphs on CUDA; auto is on CUDA; transformers."
    )
    attention: Literal["auto", "sdpa", "triton", "flashinfer"] = Field(
        "auto",
        description="Attention on static buffers; auto is sdpa, PyTorch's own: triton (ours) and flashinfer were never run on "
        "a GPU, make gpu-check compares them there; transformers.",
    )
    feature_projection: str = Field(
        "", description="Checkpoint of the drafter that context features are made for: name or directory; empty makes none."
    )
    threads: int = Field(0, ge=0, description="CPU threads of the target; 0 is one a core.")
    max_sessions: int = Field(256, ge=1, description="Sessions that may be open at once.")
    max_tree_nodes: int = Field(257, ge=1, le=4097, description="Largest tree, root included.")
    max_context: int = Field(0, ge=0, description="Longest sequence, prompt included; 0 is the model's own.")
    kv_tokens: int = Field(
        32768, ge=2, description="Token positions whose keys and values fit in memory, all sessions together."
    )
    kv_page_size: Literal[1, 8, 16] = Field(
        1, description="Token positions in a page of KV memory; prefixes are shared by whole pages."
    )
    prefill_chunk_tokens: int = Field(128, ge=1, description="Tokens of a prompt that one step computes.")
    max_step_tokens: int = Field(512, ge=1, description="Positions that one step computes; what is above it waits.")
    max_queue_length: int = Field(1024, ge=1, description="Chunks and trees that may wait for a step.")
    max_structure_characters: int = Field(65_536, ge=1, description="Longest JSON schema, regular expression or grammar.")
    structure_compile_seconds: float = Field(5.0, gt=0, description="Longest that compiling one of them may take.")
    measure_prices: Literal["auto", "on", "off"] = Field(
        "auto", description="Measure at start-up what steps take, once for a model and machine; auto: not if simulated."
    )
    simulated_seed: int = Field(0, ge=0, description="Which simulated language; simulated engine only.")
    simulated_step_seconds: float = Field(0.0, ge=0, description="Least duration of a step; simulated engine only.")

    # Names that SGLang has too mean the same there.
    model_path: str = Field("", description="Another name for model; sglang engine only.")
    tp_size: int = Field(1, ge=1, description="Tensor-parallel ranks, each a process, on GPUs one each.")
    nnodes: int = Field(1, ge=1, description="Machines that the ranks are spread over.")
    node_rank: int = Field(0, ge=0, description="Which of the machines this is; 0 serves.")
    dist_init_addr: str = Field("", description="host:port of machine 0 where the ranks of several machines meet.")
    base_gpu_id: int = Field(0, ge=0, description="The first GPU of this machine that ranks use.")
    mem_fraction_static: float = Field(
        0.0, ge=0, lt=1, description="Share of GPU memory for weights and KV; 0 leaves it to SGLang; sglang engine only."
    )
    max_total_tokens: int = Field(
        0, ge=0, description="Token positions in KV memory, in place of kv_tokens; 0 is what fits; sglang engine only."
    )
    attention_backend: str = Field("triton", description="SGLang's attention backend; sglang engine only.")
    quantization: str = Field("", description="As SGLang's; empty is what the checkpoint says; sglang engine only.")
    kv_cache_dtype: str = Field("auto", description="Type of keys and values; sglang engine only.")
    trust_remote_code: bool = Field(False, description="Run code from the model's repository; sglang engine only.")
    tree_widths: tuple[int, ...] = Field(
        (9, 17, 33, 65, 129), description="Sizes that trees are padded to, root included; sglang engine only."
    )
    sglang_args: str = Field("", description="JSON object of further arguments of SGLang's server; sglang engine only.")

    @property
    def sglang_arguments(self) -> dict[str, Any]:
        """`sglang_args`, parsed."""
        arguments: dict[str, Any] = json.loads(self.sglang_args or "{}")
        return arguments

    @model_validator(mode="after")
    def _check_sglang(self) -> Self:
        given = sorted(self.model_fields_set & _SGLANG_ONLY)
        if given and self.engine != "sglang":
            raise ValueError(f"{given[0]} is for the sglang engine, the engine is {self.engine}")
        ranked = sorted(self.model_fields_set & _RANKS_ONLY)
        if ranked and self.engine not in _ENGINES_WITH_RANKS:
            raise ValueError(f"{ranked[0]} is for the engines {' and '.join(_ENGINES_WITH_RANKS)}, this one is {self.engine}")
        if self.graphs == "on" and self.engine != "transformers":
            raise ValueError(f"graphs is on, it is for the transformers engine, this one is {self.engine}")
        if self.attention not in ("auto", "sdpa") and self.engine != "transformers":
            raise ValueError(f"attention is {self.attention}, it is for the transformers engine, this one is {self.engine}")
        try:
            is_object = isinstance(self.sglang_arguments, dict)
        except json.JSONDecodeError as error:
            raise ValueError(f"sglang_args is not JSON: {error}") from error
        if not is_object:
            raise ValueError("sglang_args is not a JSON object")
        return self
