"""This file is GPU targets from published figures: what a step takes by the roofline of memory, arithmetic and links.

Published figures, per GPU, dense (without structured sparsity):

- H100 SXM, H200 SXM: NVIDIA H100 and H200 Tensor Core GPU data sheets. 3.35 and 4.8 TB/s; 989 TFLOPS in BF16, 1,979 in FP8;
  NVLink 900 GB/s in both directions together.
- B200 (HGX, 1,000 W): NVIDIA Blackwell architecture brief and HGX B200 data sheet. 8 TB/s; 2,250 TFLOPS in BF16, 4,500 in FP8;
  NVLink 1,800 GB/s.

Models are those of their published `config.json`. What is not published is assumed, and says so where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from treewire.core.budget import PriceTable, StepPrice

ATTAINED_BANDWIDTH = 0.8
"""Assumed: the share of the published bandwidth that weights and KV are read with."""
ATTAINED_FLOPS = 0.6
"""Assumed: the share of the published arithmetic that matrix products reach."""
STEP_OVERHEAD_SECONDS = 0.0004
"""Assumed: of a step, for scheduling, launching its CUDA graph, and reading the result."""
COLLECTIVE_SECONDS = 0.000008
"""Assumed: the least that one all-reduce or all-to-all inside a node takes."""
COLLECTIVES_PER_LAYER = 2
ACTIVATION_BYTES = 2

TABLE_NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TABLE_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Weights(Enum):
    """The type that weights are kept and multiplied in."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        """Of one weight."""
        return 2 if self is Weights.BF16 else 1


@dataclass(frozen=True)
class Gpu:
    """What one GPU is published to do: bytes and operations a second, bytes a second to the others of its node one way."""

    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float
    link_bytes_per_second: float

    def flops(self, weights: Weights) -> float:
        """Operations a second in that type."""
        return self.bf16_flops if weights is Weights.BF16 else self.fp8_flops


@dataclass(frozen=True)
class Model:
    """A model's sizes. `common_parameters` are read for every step: all but the embedding table, and but the routed experts.

    Of `num_experts` routed experts in each of `num_expert_layers` layers, each of `expert_parameters`, a token uses
    `experts_per_token`; a dense model has none. `kv_bytes_per_token` are those of one position, all layers together.
    """

    common_parameters: float
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: int
    num_experts: int = 0
    experts_per_token: int = 0
    num_expert_layers: int = 0
    expert_parameters: float = 0.0

    @property
    def active_parameters(self) -> float:
        """Weights that one token is multiplied with."""
        return self.common_parameters + self.num_expert_layers * self.experts_per_token * self.expert_parameters

    def touched_parameters(self, num_tokens: int) -> float:
        """Weights that a step over so many tokens reads, with experts drawn evenly: E (1 - (1 - k / E)^n) of each layer."""
        if not self.num_experts:
            return self.common_parameters
        distinct = self.num_experts * (1.0 - (1.0 - self.experts_per_token / self.num_experts) ** num_tokens)
        return self.common_parameters + self.num_expert_layers * distinct * self.expert_parameters


GPUS: Mapping[str, Gpu] = {
    "h100": Gpu(3.35e12, 989e12, 1979e12, 450e9),
    "h200": Gpu(4.8e12, 989e12, 1979e12, 450e9),
    "b200": Gpu(8.0e12, 2250e12, 4500e12, 900e9),
}

MODELS: Mapping[str, Model] = {
    # 8.19e9 parameters, of which the embedding table has 151,936 x 4,096; 8 KV heads of 128.
    "qwen3-8b": Model(7.57e9, 36, 4096, 36 * 2 * 8 * 128 * 2),
    # 70.55e9, of which the embedding table has 128,256 x 8,192; 8 KV heads of 128.
    "llama-3.1-70b": Model(69.5e9, 80, 8192, 80 * 2 * 8 * 128 * 2),
    # 30.53e9: 48 layers of 128 experts of 3 x 2,048 x 768, 8 a token; 4 KV heads of 128.
    "qwen3-30b-a3b": Model(1.23e9, 48, 2048, 48 * 2 * 4 * 128 * 2, 128, 8, 48, 3 * 2048 * 768),
    # 1.03e12, 33e9 a token: 60 of 61 layers of 384 experts of 3 x 7,168 x 2,048, 8 a token; latent KV of 512 + 64.
    "kimi-k2": Model(10.55e9, 61, 7168, 61 * (512 + 64) * 2, 384, 8, 60, 3 * 7168 * 2048),
}


@dataclass(frozen=True)
class Roofline:
    """Steps of a model on GPUs of one node. Weights, experts and KV are spread evenly over them.

    Each session has `context_tokens` committed positions, whose keys and values a step reads once.
    """

    model: Model
    gpu: Gpu
    num_gpus: int
    weights: Weights
    context_tokens: int

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """Of a step that computes so many new positions of so many sessions together."""
        model, gpu = self.model, self.gpu
        read = model.touched_parameters(num_tokens) * self.weights.num_bytes
        read += batch_size * self.context_tokens * model.kv_bytes_per_token
        memory = read / (self.num_gpus * gpu.bytes_per_second * ATTAINED_BANDWIDTH)
        arithmetic = 2.0 * model.active_parameters * num_tokens
        arithmetic /= self.num_gpus * gpu.flops(self.weights) * ATTAINED_FLOPS
        return STEP_OVERHEAD_SECONDS + max(memory, arithmetic) + self._links(num_tokens)

    def _links(self, num_tokens: int) -> float:
        """All-reduces of the activations, two a layer."""
        if self.num_gpus == 1:
            return 0.0
        sent = 2.0 * (self.num_gpus - 1) / self.num_gpus * num_tokens * self.model.hidden_size * ACTIVATION_BYTES
        collectives = self.model.num_layers * COLLECTIVES_PER_LAYER
        return collectives * (COLLECTIVE_SECONDS + sent / self.gpu.link_bytes_per_second)

    def table(self, max_batch_size: int) -> PriceTable:
        """The prices that a service would have measured of these steps."""
        sizes = [size for size in TABLE_BATCH_SIZES if size <= max_batch_size]
        return PriceTable(
            StepPrice(num_nodes, size, self.seconds(num_nodes * size, size)) for size in sizes for num_nodes in TABLE_NODES
        )


@dataclass(frozen=True)
class BlockDrafter:
    """A block drafter of DFlash's kind on one GPU of the target's kind: so many of the target's layers and its output head,
    over `block_size` positions of each session."""

    parameters: float
    block_size: int
    gpu: Gpu

    def seconds(self, num_tokens: int, batch_size: int) -> float:
        """Of a step for so many sessions that takes in `num_tokens` new positions of them together."""
        memory = self.parameters * Weights.BF16.num_bytes / (self.gpu.bytes_per_second * ATTAINED_BANDWIDTH)
        computed = batch_size * self.block_size + num_tokens
        arithmetic = 2.0 * self.parameters * computed / (self.gpu.bf16_flops * ATTAINED_FLOPS)
        return STEP_OVERHEAD_SECONDS + max(memory, arithmetic)


DRAFTER_PARAMETERS: Mapping[str, float] = {
    # DFlash for Qwen3-8B: 5 layers of 193e6 and the target's head of 622e6. The others: assumed alike, 5 dense layers of the
    # target's width (12 x hidden size squared each) and its head.
    "qwen3-8b": 1.59e9,
    "llama-3.1-70b": 5 * 12 * 8192**2 + 128256 * 8192,
    "qwen3-30b-a3b": 5 * 12 * 2048**2 + 151936 * 2048,
    "kimi-k2": 5 * 12 * 7168**2 + 163840 * 7168,
}
BLOCK_SIZE = 16
