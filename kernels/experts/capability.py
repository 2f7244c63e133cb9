"""What the GPU at hand asks of formats; nothing is asked where there is none."""

from epcross.kernels.formats import RowFormat


def major_capability() -> int | None:
    """Major compute capability of the current device, if there is one. Never raises."""
    try:
        import torch
    except Exception:  # a CUDA build without its libraries raises OSError
        return None
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def power_of_two_scales(row_format: RowFormat) -> bool:
    """Whether experts are given fp8 scales that are powers of two: tensor cores of compute capability 10 read no
    others (e8m0). All that is compared on a machine is given the same."""
    return row_format is RowFormat.FP8 and (major_capability() or 0) >= 10
