"""FlashInfer's paged wrapper as its sources (0.6.18 to 0.7.2) say that it reads its buffers, in plain loops, in float64.

Names, order and checks of `plan` and `run` are those of `BatchPrefillWithPagedKVCacheWrapper` in CUDA graph mode; the mask is
read as `DefaultAttention` in variants.cuh does: byte (q * keys + k) // 8 behind the session's start, bit (q * keys + k) % 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Only what is used of it: graph mode, layout NHD, a mask that lies in its buffer."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_cuda_graph
        assert kv_layout == "NHD"
        assert backend == "fa2"
        assert float_workspace_buffer.dtype == torch.uint8
        assert custom_mask_buf is not None
        assert custom_mask_buf.dtype == torch.uint8
        self.buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self.mask, self.mask_starts = custom_mask_buf, mask_indptr_buf
        self.num_rows: int | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Into the buffers, as far as they reach; rows and sessions are the same in every plan."""
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(numbers.dtype == torch.int32 for numbers in given)
        assert self.num_rows in (None, int(qo_indptr[-1]))
        self.num_rows = int(qo_indptr[-1])
        for buffer, numbers in zip(self.buffers, given, strict=True):
            assert buffer is not None
            if buffer is not self.buffers[2]:
                assert len(buffer) == len(numbers)
            buffer[: len(numbers)].copy_(numbers)
        self.page_size, self.heads, self.dtype = page_size, (num_qo_heads, num_kv_heads, head_dim_qk), q_data_type
        assert kv_data_type == q_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], **unknown: Any) -> Tensor:
        """Attention of rows [rows, heads, size] over keys and values [pages, page size, KV heads, size]."""
        assert not unknown
        num_heads, num_kv_heads, size = self.heads
        assert q.shape == (self.num_rows, num_heads, size)
        assert q.dtype == self.dtype
        row_starts, page_starts, pages, last_lengths = (buffer.tolist() for buffer in self.buffers if buffer is not None)
        assert self.mask_starts is not None
        mask, starts, out = self.mask.tolist(), self.mask_starts.tolist(), torch.zeros_like(q)
        for session, last_length in enumerate(last_lengths):
            own = pages[page_starts[session] : page_starts[session + 1]]
            num_keys = (len(own) - 1) * self.page_size + last_length
            keys, values = (cache[own].flatten(0, 1)[:num_keys].double() for cache in paged_kv_cache)
            keys, values = (rows.repeat_interleave(num_heads // num_kv_heads, dim=1) for rows in (keys, values))
            for row in range(row_starts[session + 1] - row_starts[session]):
                bits = [row * num_keys + key for key in range(num_keys)]
                seen = torch.tensor([mask[starts[session] + bit // 8] >> bit % 8 & 1 for bit in bits], dtype=torch.bool)
                query = q[row_starts[session] + row].double()
                scores = torch.einsum("hd,khd->hk", query, keys) * size**-0.5
                weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
                out[row_starts[session] + row] = torch.einsum("hk,khd->hd", weights, values).to(q.dtype)
        return out
