"""What Triton 3.6's interpreter gets wrong, put right: it is the kernels that are on trial.

Narrowing drops the carry of a mantissa that rounds up and truncates to bf16; products of bf16 take bits for integers;
and an index of the size-1 arrays that hold scalars is refused by numpy from 2.4 on.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_NUMPY = {"fp8e4nv": ml_dtypes.float8_e4m3fn, "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def _convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of `data` in the target type, to the nearest, ties to even."""
    bits = f"u{target.primitive_bitwidth // 8}"
    with np.errstate(invalid="ignore"):
        return data.view(_NUMPY[source.name]).astype(np.float32).astype(_NUMPY[target.name]).view(bits)


def _floats(handle: Any) -> Any:
    return handle.data.view(_NUMPY[handle.dtype.scalar.name]).astype(np.float32)


def _create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    with np.errstate(invalid="ignore", over="ignore"):
        return interpreter.TensorHandle(np.matmul(_floats(a), _floats(b)) + d.data, d.dtype.scalar)


class _OncePerLaunch:
    """A launch patches the language for its function, and each function that is called there did so again, which took a
    fifth of all time. It does now where it uses a part of the language (`tl`, `tl.core`) that nobody before it did."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.done: set[int] = set()

    def __call__(self, function: Any) -> Any:
        parts = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if parts and parts <= self.done:
            return None  # of a function that is called: only a launch, which is the first, asks for what it may restore
        scope = self.patch(function)
        restore = scope.restore

        def ended() -> None:
            self.done.clear()
            restore()

        scope.restore = ended
        self.done |= parts
        return scope


def mend() -> None:
    """Once for a process."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang)
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    assert tl.tensor is not None
