"""Who may import what, what an import may drag in, and who may read the environment."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERY = {
    "epcross." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("harness", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PROGRAMS = {name for name in EVERY if "_kernel" in name.rsplit(".", 1)[1] and ".experts.gather." in name}
"""Triton programs: their decorators run when they are imported, so whoever launches one imports it then."""
SOURCES = {name: path for name, path in EVERY.items() if name not in PROGRAMS}
BACKENDS = {
    name: path
    for name, path in SOURCES.items()
    if name.startswith("epcross.harness.backends.") and not name.endswith((".base", ".loader", ".computes"))
}

VENDOR = {
    "cuda",
    "cupy",
    "deep_ep",
    "deep_gemm",
    "flashinfer",
    "mpi4py",
    "nccl",
    "nvshmem",
    "pynvml",
    "torch",
    "triton",
}
"""Libraries that most machines lack: imported by the code that calls them, when it is called."""

SLOW = VENDOR | {"IPython", "matplotlib", "pandas", "seaborn", "scipy", "submitit"}
"""What `epcross plan` and a rank that supervises must not wait for."""

QUICK = {"epcross", "epcross.kernels", "epcross.harness", "epcross.harness.cli", "epcross.harness.running.supervisor"}

READ_THE_ENVIRONMENT = {
    "epcross.harness.backends.loader": "hands its own on to another interpreter",
    "epcross.harness.measuring.link_counters": "hands its own on to a reader, with nothing preloaded",
    "epcross.harness.running.child": "hands its own on to a worker, with what the backend's YAML adds",
    "epcross.harness.running.group": "tells gloo which interface is the loopback",
    "epcross.harness.running.lock_file": "EPCROSS_LOCKS names the folder in which those who measure meet",
    "epcross.harness.slurm.start": "who Slurm says that this rank is",
    "epcross.harness.slurm.variables": "hands its own on to Slurm's commands, without what describes another job",
    "epcross.harness.storing.probe": "what a run records of it",
    "epcross.harness.storing.provenance": "runs git without the caller's GIT_ variables",
    "epcross.kernels.cache": "where compiled kernels are kept",
    "epcross.kernels.onesided.buffers": "whether torch lets processes share a GPU",
    "epcross.kernels.shm.build": "CXX names the compiler",
}
"""Every file that may, and what for."""


def imports(tree: ast.AST, *, at_import: bool) -> Iterator[str]:
    """Modules that a file names. `at_import` leaves out functions and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_import and runs_later(node)):
            yield from imports(node, at_import=at_import)


def runs_later(node: ast.AST) -> bool:
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return function or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_the_rules_see_this_package() -> None:
    assert "epcross.harness.backends.gloo" in BACKENDS
    assert "torch.distributed" in set(imports(parse(BACKENDS["epcross.harness.backends.gloo"]), at_import=False))


def test_kernels_import_nothing_of_the_harness() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, path in SOURCES.items()
        if inside(name, "epcross.kernels")
        for module in imports(parse(path), at_import=False)
        if inside(module, "epcross.harness")
    ]
    assert wrong == []


def test_triton_programs_are_imported_when_they_are_launched() -> None:
    assert len(PROGRAMS) == 10
    assert {module for name in PROGRAMS for module in imports(parse(EVERY[name]), at_import=True)} >= {"triton"}
    eager = {module for path in SOURCES.values() for module in imports(parse(path), at_import=True)}
    assert not eager & PROGRAMS


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_knows_only_the_contract_and_the_kernels(name: str) -> None:
    allowed = (
        *(f"epcross.harness.{value}" for value in ("point", "terms", "errors")),
        "epcross.harness.backends",  # the contract, and a base shared by a family of backends
        "epcross.kernels",
    )
    own = {module for module in imports(parse(BACKENDS[name]), at_import=False) if inside(module, "epcross")}
    assert {m for m in own if not any(inside(m, package) for package in allowed)} == set()
    assert not any(inside(m, "epcross.harness.backends.loader") for m in own)
    eager = {module.split(".")[0] for module in imports(parse(BACKENDS[name]), at_import=True)}
    assert eager <= sys.stdlib_module_names | {"epcross", "numpy", "ml_dtypes"}


def reads_environment(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "getenvb"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
        for node in ast.walk(tree)
    )


def test_environment_variables_are_read_in_named_files_only() -> None:
    assert reads_environment(ast.parse("import os\nos.getenv('HOME')"))
    assert reads_environment(ast.parse("from os import environ"))
    readers = {name for name, path in SOURCES.items() if reads_environment(parse(path))}
    assert readers == READ_THE_ENVIRONMENT.keys()


IMPORT_EACH = """
import importlib, json, os, sys
import numpy  # which most of them import, and none may not: paid for once
for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:  # a fresh interpreter for each module, without paying for its start
        try:
            importlib.import_module(name)
            error = None
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        loaded = sorted({module.split(".")[0] for module in sys.modules})
        print(json.dumps({"name": name, "error": error, "loaded": loaded}), flush=True)
        os._exit(0)
    os.wait()
"""


def test_every_module_imports_alone_with_an_empty_environment_and_nothing_heavy(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    ran = subprocess.run(
        [
            sys.executable,
            "-Xpycache_prefix=" + str(tmp_path / "bytecode"),  # none beside the sources
            "-Werror",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{IMPORT_EACH}",
            "epcross",
            *SOURCES,
        ],
        env={},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    seen = {entry["name"]: entry for entry in map(json.loads, ran.stdout.splitlines())}
    assert seen.keys() == {"epcross", *SOURCES}
    assert {name: entry["error"] for name, entry in seen.items() if entry["error"]} == {}
    heavy = {name: set(entry["loaded"]) & (SLOW if name in QUICK else VENDOR) for name, entry in seen.items()}
    assert {name: found for name, found in heavy.items() if found} == {}
    assert list(folder.iterdir()) == []  # and leaves nothing behind
