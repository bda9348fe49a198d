"""Kernels that let time pass on the GPU."""

import triton
import triton.language as tl


@triton.jit
def stamp(began):
    """began[0] = now, in nanoseconds."""
    at = tl.arange(0, 1)
    now = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,l", [at.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(began + at, now)


@triton.jit(do_not_specialize=["nanoseconds"])
def hold(began, nanoseconds):
    """Every program lasts until `nanoseconds` after began[0], on 512 threads."""
    end = tl.load(began + tl.zeros([512], tl.int32)) + nanoseconds
    tl.inline_asm_elementwise(
        """{
        .reg .pred early;
        again:
        mov.u64 $0, %globaltimer;
        setp.lt.u64 early, $0, $1;
        @early bra again;
        }""",
        "=&l,l",
        [end],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
