"""Vendors' libraries for a GPU machine without a package index, from a folder that travels with the checkout.

The folder holds any of

    flashinfer-*.tar.xz              fi/: what goes on PYTHONPATH
    deepep-*.tar.xz                  deepep/: v2_wheel/, ncclep/, and ncclsite/nvidia/nccl, the NCCL of both
    tokenspeed_deepep-1.2.1*.whl     DeepEP's first generation
    tokenspeed_deepgemm-*.whl        DeepGEMM, for the experts of layers: found by every interpreter
    sgl_deep_gemm-*.whl and apache_tvm_ffi-*.whl     DeepGEMM with MegaMoE for sm_90: found by .venv/envs/deepgemm alone

FlashInfer is then found by this interpreter. The others get a command in .venv/envs/NAME/bin/python, where
`make env-NAME` would put their interpreter: this one, told where the library and its NCCL are.
"""

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

SHARED_HOST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink multicast may be somebody else's on such a machine."""

_WHEELS = (
    ("tokenspeed_deepep-1.2.1*", "deepep_v1"),
    ("tokenspeed_deepgemm-*", "gemm"),
    ("sgl_deep_gemm-*", "mega"),
    ("apache_tvm_ffi-*", "mega"),
)
"""Names of wheels, and where each is unpacked to."""


def prepare(folder: Path, scratch: Path, envs: Path) -> dict[str, str]:
    """Unpack what is in `folder` to `scratch`, make commands in `envs`; returns what the harness itself needs set."""
    _unpack(folder, scratch)
    gemm = [scratch / "gemm"] if (scratch / "gemm").is_dir() else []
    site = Path(sysconfig.get_paths()["purelib"])
    common = {**SHARED_HOST, **_compiler(scratch, site)}
    nvshmem = str(site / "nvidia" / "nvshmem" / "lib")
    deepep = scratch / "deepep"
    if deepep.is_dir():
        nccl = deepep / "ncclsite" / "nvidia" / "nccl"
        with_nccl = {
            **common,
            "LD_PRELOAD": str(nccl / "lib" / "libnccl.so.2"),  # before the one that torch would load by its full path
            "EP_NCCL_ROOT_DIR": str(nccl),
            "NCCL_HOME": str(nccl),
            "EP_JIT_CACHE_DIR": str(scratch / "deepep_jit"),
            "LD_LIBRARY_PATH": nvshmem,
        }
        first = deepep / "ncclsite"
        _command(envs / "deepep_v2", with_nccl, [first, deepep / "v2_wheel", deepep / "ncclep", *gemm])
        _command(envs / "nccl_ep", with_nccl, [first, deepep / "ncclep"])
    if (scratch / "deepep_v1").is_dir():
        _command(envs / "deepep_v1", {**common, "LD_LIBRARY_PATH": nvshmem}, [scratch / "deepep_v1", *gemm])
    if (scratch / "mega").is_dir():
        _command(envs / "deepgemm", common, [scratch / "mega"])
    own = dict(common)
    flashinfer = [scratch / "fi"] if (scratch / "fi").is_dir() else []
    if flashinfer:
        # the archive's compiled modules were linked without the driver's library, which the real ones are linked with
        own |= {"FLASHINFER_WORKSPACE_BASE": str(scratch / "flashinfer"), "LD_PRELOAD": "libcuda.so.1"}
    if found := [*flashinfer, *gemm]:
        own |= {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, found), os.environ.get("PYTHONPATH")]))}
    return own


def _unpack(folder: Path, scratch: Path) -> None:
    """Each archive once: what is there already stays, with all that was compiled from it, though the folder no longer
    holds its archive, as where they are too large to travel together."""
    scratch.mkdir(parents=True, exist_ok=True)
    marker = scratch / "unpacked"
    done = set(marker.read_text().splitlines()) if marker.exists() else set()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        given = f"{path.name} {path.stat().st_size}"
        if given in done:
            continue
        if path.name.endswith(".tar.xz"):
            with tarfile.open(path) as opened:
                opened.extractall(scratch, filter="fully_trusted")
        elif place := next((place for pattern, place in _WHEELS if path.match(f"{pattern}.whl")), None):
            with zipfile.ZipFile(path) as opened:
                opened.extractall(scratch / place)
        with marker.open("a") as file:
            file.write(f"{given}\n")


def _command(env: Path, variables: Mapping[str, str], imports: list[Path]) -> None:
    """A `python` that is this one with these set, its imports first."""
    lines = [f'export {name}="{value}"' for name, value in variables.items()]
    found = os.pathsep.join(map(str, imports))
    lines.append(f'export PYTHONPATH="{found}${{PYTHONPATH:+:$PYTHONPATH}}"')
    command = env / "bin" / "python"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text("\n".join(["#!/bin/sh", *lines, f'exec "{sys.executable}" "$@"', ""]))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)


def _compiler(scratch: Path, site: Path) -> dict[str, str]:
    """Where compilers at run time find CUDA: images for running programs lack links and headers for building them."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return {}
    home = Path(nvcc).resolve().parents[1]
    stub = scratch / "stub"
    stub.mkdir(exist_ok=True)
    cuda13 = site / "nvidia" / "cu13"
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    driver = next((line.split()[-1] for line in listed.splitlines() if "libcuda.so.1" in line), "")
    links = {
        "libcuda.so": driver,
        "libnvrtc.so": str(cuda13 / "lib" / "libnvrtc.so.13"),
        "libcudart.so": str(cuda13 / "lib" / "libcudart.so.13"),
    }
    for name, target in links.items():
        (stub / name).unlink(missing_ok=True)
        if target:
            (stub / name).symlink_to(target)
    variables = {"CUDA_HOME": str(home), "LIBRARY_PATH": str(stub)}
    if not (home / "include" / "cublasLt.h").exists():
        variables["CPATH"] = str(cuda13 / "include")
    return variables
