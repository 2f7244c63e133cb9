"""What adapters of other people's libraries share: the device, a group of NCCL, what is loaded, what a call takes."""

import ctypes
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from epcross.harness.backends.base import Group
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, Phase, RowFormat, Sharing
from epcross.kernels.extras import Extra

SHARING_NCCL = (2, 30)
"""The first NCCL that takes several ranks on one GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1."""

LEAST_SMS = 114
"""Multiprocessors of the smallest GPU of compute capability 9.0, the H100 for PCIe: what ranks that share a GPU may
hold together, whichever it is."""

_NCCL = re.compile(r"/libnccl\.so[.\d]*$")
_NCCL_NAMES_PARTS = 10_000  # a version is 10000 major + 100 minor + patch, since 2.9
_groups: "WeakKeyDictionary[Group, dict[str, Any]]" = WeakKeyDictionary()


def device() -> str:
    """The CUDA device of this process as torch names it, or the CPU where there is none (tests)."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU; on the CPU everything has happened already."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def torch_group(group: Group, backend: str = "nccl") -> Any:
    """A torch group of these ranks. Collective the first time; one for all points of a process group, as a communicator
    takes a second and memory to make. `backend` is gloo for a library that only has objects gathered over it: NCCL's
    group may refuse what the library itself does not, such as two ranks on a GPU. On the CPU it is always gloo."""
    backend = "gloo" if device() == "cpu" else backend

    def made() -> Any:
        torch_group = group.torch(backend)
        if backend == "nccl":
            _connect(torch_group)
        return torch_group

    return kept(group, backend, made)


def kept(group: Group, name: str, make: Callable[[], Any]) -> Any:
    """What `make` made under this name for all points of a process group. It ends with the process."""
    made = _groups.setdefault(group, {})
    if name not in made:
        made[name] = make()
    return made[name]


def _connect(torch_group: Any) -> None:
    """Have torch make its NCCL communicator now. It does so at the first collective, and until then hands out a null
    pointer, which a library that goes on with the communicator follows."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device()), group=torch_group)
    synchronize()


def no_gpu(least: tuple[int, int] = (0, 0)) -> str | None:
    """Why no GPU of at least this compute capability can be used, as a sentence; None if one can."""
    try:
        import torch
    except Exception as error:  # a CUDA build without its libraries raises OSError
        return f"torch cannot be imported ({error}): install it for CUDA, {Extra.GPU.install}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU: a CUDA build of torch, a driver and a GPU are needed"
    capability = torch.cuda.get_device_capability()
    if capability < least:
        return f"it needs compute capability {least[0]}.{least[1]} and this GPU has {capability[0]}.{capability[1]}"
    return None


def no_module(name: str, remedy: str) -> str | None:
    """Why `name` cannot be imported, as a sentence with what to do; None if it can. Never raises."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        what = f"{name} is not installed" if missing == name.split(".")[0] else f"{name} needs the module {missing}"
        return f"{what}; {remedy}"
    except Exception as error:  # an assertion about NCCL, a missing shared library: whatever a vendor does at import
        text = " ".join(str(error).split())
        return f"importing {name} fails with {type(error).__name__}: {text}; {remedy}"
    return None


def lacks(what: str, function: Callable[..., Any], *names: str) -> str | None:
    """Which of these parameters a vendor's callable does not take, as a sentence; None if it takes all."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled code may tell nothing; then the call itself will
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    if missing := [name for name in names if name not in parameters]:
        return f"{what} takes no {', '.join(missing)}: this version is not one the adapter is written for"
    return None


def version_of(*distributions: str) -> str:
    """Name and version of the first of these that is installed: third parties rebuild libraries under other names."""
    for name in distributions:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def loaded_nccl(maps: str | None = None) -> dict[str, str]:
    """The libnccl that this process has loaded, as {"nccl": "2.30.7 /path/libnccl.so.2"}; empty if none is.

    What torch was compiled with says nothing about it: another one may have been loaded first. Several are all named.
    `maps` is the text of /proc/self/maps, for tests.
    """
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    paths = sorted({line.split(maxsplit=5)[5] for line in text.splitlines() if line.count("/")})
    found = [f"{_nccl_version(path)} {path}" for path in paths if _NCCL.search(path)]
    return {"nccl": " and ".join(found)} if found else {}


def nccl_version(text: str) -> tuple[int, ...]:
    """The numbers of what `loaded_nccl` says; empty where it says none."""
    found = re.match(r"[\d.]+", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _nccl_version(path: str) -> str:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return "unknown version"
    major, rest = divmod(number.value, _NCCL_NAMES_PARTS)
    return f"{major}.{rest // 100}.{rest % 100}"


def boundaries(
    dispatch: Iterable[Boundary], combine: Iterable[Boundary], pair: Iterable[Boundary] = ()
) -> Mapping[Phase, frozenset[Boundary]]:
    """What lies inside each phase, and inside both together; `pair` is what lies between them."""
    first, second = frozenset(dispatch), frozenset(combine)
    return {Phase.DISPATCH: first, Phase.COMBINE: second, Phase.ROUND_TRIP: first | second | frozenset(pair)}


def format_problems(name: str, point: Point, formats: Mapping[RowFormat, int]) -> list[str]:
    """What rules a point out: a dispatch format not in `formats`, rows not a multiple of that format's values, sums
    that are not bf16, or one launch for all ranks."""
    problems = []
    row_format, hidden = point.dispatch_format, point.model.hidden
    if row_format not in formats:
        problems.append(f"{name} dispatches {' and '.join(formats)} rows, not {row_format}")
    elif hidden % formats[row_format]:
        problems.append(f"{name} takes {row_format} rows of a multiple of {formats[row_format]} values, not {hidden}")
    if point.combine_format is not RowFormat.BF16:
        problems.append(f"{name} adds bf16 partials; combine_format={point.combine_format} is not one")
    if point.sharing is Sharing.ONE_LAUNCH:
        problems.append(f"{name} holds one rank in each process; use device=cuda or cuda_processes")
    if point.model.top_k > point.placement.num_slots:
        problems.append(f"top_k={point.model.top_k} is above num_slots={point.placement.num_slots}")
    return problems


def nccl_refuses_sharing(point: Point) -> str | None:
    """Why the NCCL that this process has loaded does not take several ranks on a GPU, if it does not. A question for
    `Backend.refused_here`: a process that plans has that of torch, or none, whatever the ranks will have."""
    loaded = loaded_nccl().get("nccl", "")
    if point.sharing is not Sharing.PROCESSES or not () < nccl_version(loaded) < SHARING_NCCL:
        return None
    return f"NCCL {loaded} refuses several ranks on one GPU; 2.30 takes them with NCCL_MULTI_RANK_GPU_ENABLE=1"


def crowding_problems(name: str, point: Point, blocks: int, remedy: str) -> list[str]:
    """Whether ranks that share a GPU cannot all be on it at once, each with so many blocks that fill a multiprocessor
    and wait for those of the others: the last to come would never start, and the first never end."""
    if point.sharing is not Sharing.PROCESSES or blocks * point.ep_size <= LEAST_SMS:
        return []
    return [
        f"{name} has {blocks} blocks of each of {point.ep_size} ranks wait for one another, which are to be on one GPU"
        f" at once and fill a multiprocessor each, of {LEAST_SMS}; {remedy}"
    ]


def too_small(options: Mapping[str, Scalar], **least: int) -> list[str]:
    """Which options are below the least value given for each."""
    return [
        f"{option}={options[option]} must be at least {value}"
        for option, value in least.items()
        if integer(options[option]) < value
    ]


def not_among(options: Mapping[str, Scalar], **allowed: Iterable[str]) -> list[str]:
    """Which options are none of the words given for each."""
    return [
        f"{option}={options[option]} must be {' or '.join(words)}"
        for option, words in allowed.items()
        if options[option] not in list(words)
    ]


def tensor_bytes(held: Any) -> int:
    """Of all tensors in what a library returned, however nested in tuples and lists."""
    if isinstance(held, tuple | list):
        return sum(map(tensor_bytes, held))
    return int(getattr(held, "nbytes", 0))


def sm_count() -> int:
    """Multiprocessors of the current GPU; 0 on the CPU."""
    import torch

    return torch.cuda.get_device_properties(device()).multi_processor_count if torch.cuda.is_available() else 0


def integer(value: Scalar) -> int:
    """An option that the loader has checked to be a number."""
    assert isinstance(value, int | float)
    return int(value)
