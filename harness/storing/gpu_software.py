"""What torch and the driver say of the GPUs here, as JSON; run as a module, so that only its process loads CUDA.

Nothing is allocated on a GPU and no context is made.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

_LIBRARIES = re.compile(r"/(lib(?:cuda|cudart|nccl|nvshmem|nvrtc|cupti)[-.\w]*\.so[^/]*)$")


def collect() -> dict[str, Any]:
    """Versions, the libraries that torch loaded, and every GPU with the peers that it can address."""
    import torch

    cuda: Any = torch.cuda
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(cuda),
        "gpus": [],
    }
    if cuda.is_available():
        count = cuda.device_count()
        found["gpus"] = [
            {
                "name": properties.name,
                "uuid": str(getattr(properties, "uuid", "")),
                "capability": f"{properties.major}.{properties.minor}",
                "sm_count": properties.multi_processor_count,
                "cache_bytes": getattr(properties, "L2_cache_size", None),
                "memory_bytes": properties.total_memory,
                "peers": [peer for peer in range(count) if peer != index and cuda.can_device_access_peer(index, peer)],
            }
            for index in range(count)
            if (properties := cuda.get_device_properties(index))
        ]
    found["libraries"] = loaded_libraries(Path("/proc/self/maps").read_text())
    return found


def loaded_libraries(maps: str) -> dict[str, str]:
    """GPU libraries among the mapped files of a process: name to path."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    return {match[1]: path for path in sorted(paths) if (match := _LIBRARIES.search(path))}


def _nccl_version(cuda: Any) -> str | None:
    try:
        return ".".join(map(str, cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a build without NCCL
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(collect()) + "\n")
