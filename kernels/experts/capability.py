"""What the GPU at hand asks of formats; nothing is asked where there is none."""

import sys

from epcross.kernels.formats import RowFormat


def major_capability() -> int | None:
    """Major compute capability of the current device, or of the first one where torch has not chosen any; None without
    a GPU. Never raises.

    Plans ask, too, in the process of a command. So torch is not started for it: its context would hold half a gigabyte
    of the GPU for as long as the command runs, and stand among the GPU's processes as a stranger to the ranks.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.get_device_capability()[0]
    return _of_first_gpu()


def power_of_two_scales(row_format: RowFormat) -> bool:
    """Whether experts are given fp8 scales that are powers of two: tensor cores of compute capability 10 read no
    others (e8m0). All that is compared on a machine is given the same."""
    return row_format is RowFormat.FP8 and (major_capability() or 0) >= 10


def _of_first_gpu() -> int | None:
    """By the driver alone, which makes no context for this."""
    try:
        from cuda.bindings import driver

        name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        (started,) = driver.cuInit(0)
        found, device = driver.cuDeviceGet(0)
        told, major = driver.cuDeviceGetAttribute(name, device)
    except Exception:  # not installed, or no library of the driver
        return None
    return int(major) if [started, found, told] == [driver.CUresult.CUDA_SUCCESS] * 3 else None
