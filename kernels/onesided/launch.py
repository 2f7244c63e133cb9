"""Loading a cubin and launching its kernels through the CUDA driver: structs by value, dependent launch, occupancy.

cuda.bindings rather than cuda.core: parameter structs of kilobytes go by value, and a launch costs the host little.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from epcross.kernels.errors import EpcrossError
from epcross.kernels.onesided.jit import Cubin


class DriverError(EpcrossError):
    """The CUDA driver refused a call; the message has the call, the driver's name for the error and its words."""


def call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """The result of a driver call: nothing, the one value, or the tuple of values.

    Raises:
        DriverError: anything but success.
    """
    status, *values = function(*arguments)
    if int(status):
        raise DriverError(f"{function.__name__} failed: {_describe(status)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def _describe(status: Any) -> str:
    from cuda.bindings import driver

    _, words = driver.cuGetErrorString(status)
    return f"{status.name}: {words.decode() if words else 'no words for it'}"


Launcher = Callable[[tuple[int, int, int], int], None]
"""Enqueues a kernel: blocks in each direction, stream handle."""


class Arguments:
    """What a kernel is given, each argument by value; kept alive and in place, so that a launch copies from here.

    `values` are zero-dimensional numpy arrays, a structured one for a struct; writing to one changes the next launch.
    """

    def __init__(self, *values: np.ndarray) -> None:
        self.values = values
        self._pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))

    @property
    def address(self) -> int:
        """Of the array of pointers that the driver reads."""
        return ctypes.addressof(self._pointers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A loaded kernel, to be launched with `block` threads."""

    name: str
    function: Any
    block: int

    def blocks_per_sm(self, shared_bytes: int = 0) -> int:
        """How many blocks a multiprocessor holds at once; needs the context that the kernel was loaded in."""
        from cuda.bindings import driver

        return int(call(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor, self.function, self.block, shared_bytes))

    def launcher(self, arguments: Arguments, *, dependent: bool, shared_bytes: int = 0) -> Launcher:
        """A function that enqueues the kernel with what `arguments` holds by then.

        Args:
            arguments: copied at each launch.
            dependent: the kernel itself waits (griddepcontrol) for what was launched before it, so it may be let in
                ahead of that.
            shared_bytes: dynamic shared memory.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = self.block, shared_bytes
        if dependent:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs = [attribute]
            config.numAttrs = 1
        function, address = self.function, arguments.address

        def launch(grid: tuple[int, int, int], stream: int) -> None:
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.hStream = driver.CUstream(stream)
            status = driver.cuLaunchKernelEx(config, function, address, 0)[0]
            if int(status):
                raise DriverError(
                    f"{self.name} was not launched (grid {grid}, {self.block} threads a block): {_describe(status)}"
                )

        return launch


class Module:
    """A cubin loaded into the current context."""

    def __init__(self, cubin: Cubin) -> None:
        from cuda.bindings import driver

        self.cubin = cubin
        self._code = cubin.read()
        self._module: Any = call(driver.cuModuleLoadData, self._code)

    def kernel(self, name: str, block: int) -> Kernel:
        """The kernel `name`, to be launched with `block` threads.

        Raises:
            DriverError: the module has no such kernel.
        """
        from cuda.bindings import driver

        function = call(driver.cuModuleGetFunction, self._module, name.encode())
        return Kernel(name=name, function=function, block=block)

    def close(self) -> None:
        """Unload. Idempotent. Nothing of it may be running or captured in a graph that will be replayed."""
        from cuda.bindings import driver

        if self._module is not None:
            module, self._module = self._module, None
            call(driver.cuModuleUnload, module)
