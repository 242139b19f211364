"""Triton's kernels without a GPU: run in the interpreter, what they read and write counted, and compiled for GPUs."""

import multiprocessing as mp
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

TRITON_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@contextmanager
def interpreting() -> Iterator[Callable[..., Any]]:
    """Give a function that calls another in a process of its own, in which Triton interprets its kernels."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as environment:
            # Triton reads this when it is first imported, so the process must be born with it.
            environment.setenv("TRITON_INTERPRET", "1")
            pool.submit(torch.set_num_threads, 1).result(timeout=60)
        # Memory that nobody has written then holds NaN.
        pool.submit(torch.use_deterministic_algorithms, True).result(timeout=60)
        yield lambda function, *args: pool.submit(function, *args).result(timeout=180)


class Moved(NamedTuple):
    """Bytes that kernels read and wrote."""

    read: int
    written: int


@contextmanager
def counted_bytes() -> Iterator[Callable[[], Moved]]:
    """Count what the interpreter's loads and stores move, numbers masked out not."""
    from triton.runtime.interpreter import InterpreterBuilder

    moved = {"load": 0, "store": 0}

    def counting(kind: str, mask_at: int) -> Any:
        name = f"create_masked_{kind}"
        real = getattr(InterpreterBuilder, name)

        def counted(self: Any, *args: Any) -> Any:
            moved[kind] += int(args[mask_at].data.sum()) * args[0].get_element_ty().primitive_bitwidth // 8
            return real(self, *args)

        return patch.object(InterpreterBuilder, name, counted)

    with counting("load", 1), counting("store", 2):
        yield lambda: Moved(moved["load"], moved["store"])


class Usage(NamedTuple):
    """What a compiled kernel takes: registers of a thread, bytes of them spilled, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compile_for(
    capability: int,
    kernel: Any,
    *,
    types: dict[str, str],
    known: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Usage:
    """Compile a kernel for a GPU that need not be there.

    types  of the arguments that are no int32, as Triton names them; pointers and whole numbers are taken for aligned
    """
    import triton
    from triton.backends.compiler import GPUTarget

    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in known else types.get(name, "i32") for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name not in known]
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=known, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", said)[-1]) for name in ("REG", "STACK", "LOCAL"))
    return Usage(registers, stack + local, compiled.metadata.shared)
