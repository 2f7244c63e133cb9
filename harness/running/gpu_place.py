"""The GPU of a worker, chosen once, before anything else touches CUDA."""

from epcross.kernels.extras import Extra


def use_gpu(index: int) -> str | None:
    """Make GPU `index` (as this process sees them) current; why that fails, as a sentence, or None."""
    try:
        import torch
    except ImportError as error:
        return (
            f"a GPU is used through torch, which cannot be imported ({error}); install it for CUDA, {Extra.GPU.install}"
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here; it needs a CUDA build of torch, a driver and a GPU"
    count = torch.cuda.device_count()
    if index >= count:
        return f"this rank needs GPU {index}, and torch sees {count} here; use a smaller ep_size or more GPUs"
    torch.cuda.set_device(index)
    return None
