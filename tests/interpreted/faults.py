"""What Triton 3.6's interpreter gets wrong, put right: it is the kernels that are on trial.

Narrowing drops the carry of a mantissa that rounds up and truncates to bf16; products of bf16 take bits for integers;
and an index of the size-1 arrays that hold scalars is refused by numpy from 2.4 on.
"""

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


def mend() -> None:
    """Once for a process."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    assert tl.tensor is not None
