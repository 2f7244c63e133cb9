"""Everything that needs a GPU, in one command, for a machine that is at hand for minutes:

    python tests/gpu/check.py [--steps tests,smoke,...] [--out FOLDER] [--limit-s SECONDS] [--all-s SECONDS]
                              [--peers FOLDER]

Needs no install: it runs from the checkout with the interpreter that started it, which must have the light core, torch
for CUDA, cuda-core and nvidia-ml-py. Steps, in this order unless named otherwise:

    facts       GPUs, driver, topology, versions; what each backend says
    tests       tests/gpu
    smoke       the harness without a kernel of ours, then both protocols: every regime, seconds
    check       the contract, by the command line
    one_launch  sweeps/onesided_h200.yaml        EP 2 and 8, steady          about 7 minutes
    wide        sweeps/onesided_h200_wide.yaml   EP 16, 32 and 64, steady    about 7 minutes
    doctor      what `epcross doctor` says of this machine, alone and for a sweep
    counters    what the kernels wait for, by Nsight Compute, one GPU               about 3 minutes
    graphs      what the length of a CUDA graph does to NCCL's collectives, two GPUs         under a minute
    variants    every variant of the kernels, all ranks in one launch, then a GPU for each   about 5 minutes
    entry       sweeps/onesided_h200_entry.yaml  entry and spans             about 4 minutes
    mps_smoke   one process for each rank, under MPS: both protocols, every regime; the contract
    processes   sweeps/onesided_mps.yaml         under MPS                   about 5 minutes
    two_smoke   two GPUs: both protocols, every regime; the contract
    nvlink      sweeps/onesided_nvlink.yaml      two GPUs                    about 5 minutes
    soak        sweeps/soak_nvlink.yaml      two GPUs, every round verified    9 minutes: give --limit-s 590
    peers       sweeps/baselines_smoke.yaml      every exchange once, two GPUs                about 6 minutes
    peers_check the contract, for every other exchange, two GPUs
    peers_nvlink, peers_entry                    sweeps/baselines_nvlink.yaml, a regime each
    peers_mps   sweeps/baselines_mps.yaml        two processes on one GPU, under MPS
    baselines_warm what baselines compiles by shape, many at a time             about 2 minutes
    baselines   sweeps/baselines_nvlink.yaml     two GPUs, BASELINES_WORDS may say otherwise   about 15 minutes: resume
    experts     bits of fp8 sums, tests/gpu/test_experts.py with EXPERT_TESTS (such as -k gather_gemm), and
                tests/benchmark/gpu_experts.py with EXPERT_WORDS                              3 minutes
    experts_warm  what experts_sweep compiles, many at a time: tests/gpu/warm.py   about 2 minutes
    experts_sweep sweeps/experts_h200.yaml       one GPU, EXPERT_SWEEP_WORDS may say otherwise   about 6 minutes
    layer_one   one GPU: our layer with each expert stage, all ranks in one launch, and its contract
    layer_smoke sweeps/layer_smoke.yaml          every layer once, two GPUs                   about 8 minutes
    layer_warm  what layer compiles, many at a time                             about 2 minutes
    layer       sweeps/layer_h200x2.yaml         two GPUs, LAYER_WORDS may say otherwise       about 15 minutes: resume
    ep          sweeps/nvlink_ep8.yaml           a GPU for each of --ep ranks: the exchanges, a launch at a time
    ep_soak     sweeps/soak_nvlink.yaml          a soak of them
    resume      goes on with the runs of baselines, layers and experts in FOLDER/runs, as on a machine lent anew

--peers names a folder with vendors' libraries (tests/gpu/peers.py says which); without it their environments are those
that `make env-NAME` built. Without --steps: facts, tests, smoke, check.

A step that ends badly does not keep later ones from running. --all-s is for machines that end a command at some time:
what runs then is asked to end, keeps what it has, and is taken up by `resume` in the next call. Runs go to
FOLDER/runs and are packed as FOLDER/runs.tar.gz after each step, so that a machine taken away loses one step at most;
what each step printed is in FOLDER/STEP.log.
"""

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from peers import prepare

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "tests/gpu/config"
SCRATCH = Path(tempfile.gettempdir()) / f"epcross-peers-{os.getuid()}"
"""The same for each call on a machine: libraries look for what they compiled by where they lie."""
EXPERT_WORDS = "--limit-s 200"
COMPILE_BY_SHAPE = "deepep_v2,deepep_v2_max,nccl_ep,nccl_ep_ht"
LAST_WORDS_S = 20.0
PEERS = (
    *(
        "flashinfer_one_sided",
        "flashinfer_two_sided",
        "deepep_v2",
        "deepep_normal",
        "deepep_ll",
        "nccl_ep",
        "nccl_ep_ht",
    ),
    *("nccl_a2a", "nccl_a2a_padded", "ag_rs"),
)


def commands(out: Path, ep_size: int = 8) -> dict[str, list[list[str]]]:
    python = [sys.executable]
    epcross = [*python, "-m", "epcross.harness.cli"]
    runs = f"output_dir={out / 'runs'}"

    def sweep(name: str, *words: str) -> list[str]:
        return [*epcross, "run", f"sweep={name}", *words, runs]

    variants = [*python, "tests/benchmark/gpu_variants.py"]
    expert_words, layer_words, baseline_words = (
        shlex.split(os.environ.get(f"{name}_WORDS", "")) for name in ("EXPERT_SWEEP", "LAYER", "BASELINES")
    )
    warm = [*python, "tests/gpu/warm.py", "--runs", "14"]

    def smoke(device: str) -> list[list[str]]:
        names = ("onesided_fence", "onesided_sentinel")
        regimes = "regime=steady,entry,spans"
        run = [*sweep("onesided_smoke"), f"device={device}", "ep_size=2", "tokens_per_rank=1,8,128", regimes]
        return [run, *([*epcross, "check", f"backend={name}", "ep_size=2", f"device={device}"] for name in names)]

    return {
        "facts": [
            ["nvidia-smi"],
            ["nvidia-smi", "topo", "-m"],
            [*epcross, "backends"],
            [*python, "-c", "import sys, torch, cuda.core as c; print(sys.version, torch.__version__, c.__version__)"],
        ],
        "tests": [[*python, "-m", "pytest", "tests/gpu", "-q", "--durations=10", "-p", "no:cacheprovider"]],
        "smoke": [
            [*epcross, "run", "sweep=gpu_smoke", runs, "--config-dir", CONFIG],
            sweep("onesided_smoke"),
        ],
        "check": [
            [*epcross, "check", f"backend={name}", "ep_size=4"] for name in ("onesided_fence", "onesided_sentinel")
        ],
        "one_launch": [sweep("onesided_h200")],
        "wide": [sweep("onesided_h200_wide")],
        "doctor": [[*epcross, "doctor"], [*epcross, "doctor", "sweep=onesided_h200"]],
        "counters": [[*python, "tests/benchmark/gpu_counters.py", "--json", str(out / "counters.json")]],
        "graphs": [
            [
                *(*python, "-m", "torch.distributed.run", "--nproc_per_node", "2", "tests/benchmark/gpu_graphs.py"),
                *("--json", str(out / "graphs.json")),
            ]
        ],
        "variants": [
            [*variants, "--one-launch", "--ep", "2", "--tokens", "128,512", "--json", str(out / "variants_2.json")],
            [*variants, "--one-launch", "--ep", "8", "--tokens", "8,128,512", "--json", str(out / "variants_8.json")],
            [*variants, "--json", str(out / "variants.json")],
        ],
        "entry": [sweep("onesided_h200_entry")],
        "mps_smoke": smoke("cuda_processes"),
        "processes": [sweep("onesided_mps")],
        "two_smoke": smoke("cuda"),
        "nvlink": [sweep("onesided_nvlink")],
        "soak": [sweep("soak_nvlink")],
        "peers": [[*epcross, "backends"], sweep("baselines_smoke", "timing.wall_limit_s=100")],
        "peers_check": [[*epcross, "check", f"backend={name}", "ep_size=2", "device=cuda"] for name in PEERS],
        "peers_nvlink": [sweep("baselines_nvlink", "regime=steady", "timing.wall_limit_s=120")],
        "peers_entry": [sweep("baselines_nvlink", "regime=entry", "timing.wall_limit_s=120")],
        "peers_mps": [sweep("baselines_mps")],
        "baselines_warm": [[*warm, "--backends", COMPILE_BY_SHAPE, "sweep=baselines_nvlink", *baseline_words]],
        "baselines": [sweep("baselines_nvlink", *baseline_words)],
        "experts": [
            [*python, "tests/benchmark/gpu_fp8_bits.py", "--json", str(out / "fp8_bits.json")],
            [
                *(*python, "-m", "pytest", "tests/gpu/test_experts.py"),
                *("-q", "--durations=5", "-p", "no:cacheprovider"),
                *shlex.split(os.environ.get("EXPERT_TESTS", "")),
            ],
            [
                *python,
                "tests/benchmark/gpu_experts.py",
                "--out",
                str(out / "experts.jsonl"),
                *shlex.split(os.environ.get("EXPERT_WORDS", EXPERT_WORDS)),
            ],
        ],
        "experts_warm": [[*warm, "sweep=experts_h200", *expert_words]],
        "experts_sweep": [sweep("experts_h200", *expert_words)],
        "layer_one": [
            sweep("layer_one_gpu"),
            *(
                [*epcross, "check", "backend=layer_onesided", f"compute={name}", "--limit-s", "120"]
                for name in ("gather_gemm", "deepgemm")
            ),
        ],
        "layer_smoke": [[*epcross, "backends"], sweep("layer_smoke", "timing.wall_limit_s=150")],
        "layer_warm": [[*python, "tests/gpu/warm.py", "sweep=layer_h200x2", *layer_words]],
        "layer": [
            sweep("layer_h200x2", *layer_words),
        ],
        "ep": [sweep("nvlink_ep8", f"ep_size={ep_size}", "timing.wall_limit_s=120")],
        "ep_soak": [sweep("soak_nvlink", f"ep_size={ep_size}")],
        "resume": [
            [*epcross, "run", "--resume", str(run)] for run in sorted((out / "runs").glob("*-*_*")) if _is_long(run)
        ],
    }


def _is_long(run: Path) -> bool:
    """Whether it is of a sweep that may take more than one call."""
    names = ("baselines_nvlink", "baselines_mps", "nvlink_ep8", "layer_h200x2", "experts_h200")
    return any(f"-{name}-" in run.name for name in names)


def run(step: str, command: list[str], log: Path, limit_s: float) -> int:
    """The command's exit status; 124 if it had to be stopped. Its words go to the log and to the terminal."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    sys.stdout.write(f"== {step}: {shlex.join(command)}\n")
    sys.stdout.flush()
    with log.open("ab") as file:
        try:
            code = _ended(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file), limit_s)
        except OSError as error:
            file.write(f"{error}\n".encode())
            code = 127
    lines = log.read_text(errors="replace").splitlines()
    sys.stdout.write("\n".join(lines[-60:]) + f"\n== {step}: exit {code} after {time.monotonic() - begin:.0f} s\n")
    sys.stdout.flush()
    return code


def _left_s(limit_s: float, until: float) -> float:
    """What a command may take, so that it has ended with its last words by `until`; 0 if that is nothing."""
    return max(0.0, min(limit_s, until - time.monotonic() - LAST_WORDS_S))


def _ended(process: "subprocess.Popen[bytes]", limit_s: float) -> int:
    """How it ended; asked to end when its time is over, as a run then keeps what it has, and killed if it does not."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return 124


def pack(out: Path) -> None:
    if (out / "runs").is_dir():
        with tarfile.open(out / "runs.tar.gz", "w:gz") as archive:
            archive.add(out / "runs", arcname="runs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="facts,tests,smoke,check")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu-check")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of each command")
    parser.add_argument("--all-s", type=float, default=math.inf, help="of all of them together")
    parser.add_argument("--ep", type=int, default=8, help="ranks of the steps ep and ep_soak, a GPU for each")
    parser.add_argument("--peers", type=Path, help="a folder with vendors' libraries")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where they are unpacked, and compile to")
    given = parser.parse_args()
    until = time.monotonic() + given.all_s
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.peers:
        os.environ.update(prepare(given.peers, given.scratch, ROOT / ".venv" / "envs"))
    known = commands(out, given.ep)
    steps = given.steps.split(",")
    if unknown := [step for step in steps if step not in known]:
        parser.error(f"unknown step {unknown[0]}; choose from {', '.join(known)}")
    codes = {}
    for step in steps:
        log = out / f"{step}.log"
        # a step that the time does not reach is one that had to be stopped
        codes[step] = max(
            (run(step, c, log, limit_s) if (limit_s := _left_s(given.limit_s, until)) else 124 for c in known[step]),
            default=0,
        )
        pack(out)
    sys.stdout.write("".join(f"{step:12} {'ok' if code == 0 else f'exit {code}'}\n" for step, code in codes.items()))
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
