"""Compiles our Triton kernels to machine code for GPUs on a machine without one, and says what came out, a line each."""

from __future__ import annotations

from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verify_service.attention import triton_attention

_POINTERS = {"pages": "*i64", "slots": "*i64", "lengths": "*i64", "visible": "*u8", "statistics": "*fp32", "parts": "*fp32"}
_SCALARS = {"scale": "fp32", "num_nodes": "i32", "num_pages": "i32"}
_SIZES = {"GROUP": 2, "SIZE": 64, "PAGE_SIZE": 16, "BLOCK_ROWS": 16, "BLOCK_KEYS": 64, "BLOCK_SIZE": 64}
_WARP_SIZE = 32


def compiled(kernel: Any, capability: int, num_splits: int) -> Any:
    """A kernel in bfloat16, for GPUs of that compute capability."""
    constants = {name: size for name, size in {**_SIZES, "NUM_SPLITS": num_splits}.items() if name in kernel.arg_names}
    types = {**_POINTERS, **_SCALARS, **dict.fromkeys(constants, "constexpr")}
    if num_splits > 1 and "parts" not in kernel.arg_names:
        types["out"] = "*fp32"  # parts, for the other kernel
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return compile_kernel(source, target=GPUTarget("cuda", capability, _WARP_SIZE), options={"num_stages": 2})


def main() -> None:
    """Everything, or an error."""
    for kernel, capability, num_splits in (
        (triton_attention._attend, 80, 1),
        (triton_attention._attend, 90, 1),
        (triton_attention._attend, 90, 4),
        (triton_attention._together, 90, 4),
    ):
        made = compiled(kernel, capability, num_splits)
        print(f"{made.metadata.name} for sm_{capability}, {num_splits} splits: {len(made.asm['cubin'])} bytes of machine code")


if __name__ == "__main__":
    main()
