"""This file is tree attention in torch under SGLang's attention interface, for models too large for interpreted Triton."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class SdpaTreeBackend(TorchNativeAttnBackend):
    """SGLang's torch backend, and trees: it reads the same table, slots and mask that the Triton backend reads."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """As every backend has it."""
        return 1

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **unused: Any
    ) -> Tensor:
        """Attention of chunks, or of trees under their mask; [tokens, heads x size]."""
        if not forward_batch.forward_mode.is_target_verify():
            output: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return output
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        width, mask = forward_batch.spec_info.draft_token_num, forward_batch.spec_info.custom_mask
        queries = q.view(forward_batch.batch_size, width, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        outputs = queries.new_empty(queries.shape)
        start = 0
        for number, prefix_length in enumerate(forward_batch.seq_lens.tolist()):
            length = prefix_length + width
            slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[number], :length].long()
            outputs[number] = scaled_dot_product_attention(
                queries[number],
                keys[slots].transpose(0, 1),
                values[slots].transpose(0, 1),
                attn_mask=mask[start : start + width * length].view(1, width, length),
                scale=layer.scaling,
                enable_gqa=True,
            )
            start += width * length
        return outputs.transpose(1, 2).reshape(q.shape[0], -1)


def replace_triton() -> None:
    """From now on SGLang makes this backend where "triton" is asked for."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("triton")(SdpaTreeBackend)
