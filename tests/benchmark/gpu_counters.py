"""What holds the one-sided kernels up: the GPU's own counters, by Nsight Compute, all ranks in one launch.

    python tests/benchmark/gpu_counters.py [--ep 2,8] [--tokens 128,512] [--protocols fence,sentinel] [--json FILE]

Prints a line for each kernel: its time, bytes from and to memory and through the L2, how near each of them is to its
peak, how many warps there were, and what they waited for most. Needs `ncu` on the PATH and the right to read counters.
Nsight Compute runs a kernel several times, one after another with the same memory, so times are longer than those of a
chain (`epcross run` measures those); caches are left as they are.
"""

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, SLOTS, TOP_K = 7168, 256, 8
WARM_PAIRS, SEEN_PAIRS = 6, 1
TIME = "gpu__time_duration.sum"
SHOWN = {
    "memory read MB": "dram__bytes_read.sum",
    "written MB": "dram__bytes_write.sum",
    "of peak %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 MB": "lts__t_bytes.sum",
    "L2 of peak %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1 of peak %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
STALLS = ("long_scoreboard", "lg_throttle", "membar", "drain", "wait", "barrier", "sleeping", "short_scoreboard")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
MEGA = {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}
MICRO = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def run_pairs(ep: int, tokens: int, protocol: str) -> None:
    """What is looked at: dispatch and combine, a few times."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    import torch
    from tests.gpu._rounds import Case, random_ids

    case = Case(ep_size=ep, capacity=tokens, hidden=HIDDEN, top_k=TOP_K, num_slots=SLOTS, protocol=protocol)
    exchange = case.exchange()
    generator = torch.Generator("cuda").manual_seed(1)
    rows = torch.randn((ep, tokens, HIDDEN), device="cuda", generator=generator).to(torch.bfloat16)
    ids = random_ids(case, tokens, generator)[:ep].view(ep, tokens, TOP_K).contiguous()
    weights, out = torch.rand((ep, tokens, TOP_K), device="cuda"), torch.empty_like(rows)
    exchange.combine_buffer().normal_()
    for _ in range(WARM_PAIRS + SEEN_PAIRS):
        exchange.dispatch(rows, ids, weights, group_tokens=tokens)
        exchange.combine(out)
    torch.cuda.synchronize()
    exchange.check()
    exchange.close()


def command(ncu: str, ep: int, tokens: int, protocol: str) -> list[str]:
    """The same script under Nsight Compute."""
    metrics = [TIME, *SHOWN.values(), *(STALL.format(name) for name in STALLS)]
    how = ["--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
    which = ["--kernel-name", f"regex:{protocol}_(dispatch|combine)", "--launch-skip", str(2 * WARM_PAIRS)]
    inner = [sys.executable, __file__, "--inner", "--ep", str(ep), "--tokens", str(tokens), "--protocols", protocol]
    return [ncu, *how, *which, "--launch-count", str(2 * SEEN_PAIRS), "--metrics", ",".join(metrics), *inner]


def read(text: str) -> list[dict[str, Any]]:
    """The kernels that Nsight Compute tells of, in MB and us. Raises `ValueError` if it tells of none."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in what ncu printed: " + " ".join(text.split())[-600:])
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, kernels = table[0], table[1:]
    found = []
    for kernel in kernels:
        values = {name: number(kernel.get(metric, ""), units.get(metric, "")) for name, metric in SHOWN.items()}
        stalls = {name: number(kernel.get(STALL.format(name), ""), "") for name in STALLS}
        name = re.sub(r"\(.*", "", kernel["Kernel Name"])
        us = number(kernel.get(TIME, ""), units.get(TIME, ""))
        found.append({"kernel": name, "us": us, **values, "stalls": {n: v for n, v in stalls.items() if v is not None}})
    return found


def number(text: str, unit: str) -> float | None:
    """A value in us, MB or as it is; None where a GPU does not have the counter."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value * {**MEGA, **MICRO}.get(unit, 1.0)


def table(title: str, kernels: list[dict[str, Any]]) -> str:
    """One case."""
    text = f"{title}\n{'kernel':24}{'us':>8}" + "".join(f"{name:>15}" for name in SHOWN) + "  waits for, per issue\n"
    for kernel in kernels:
        cells = "".join("              -" if kernel[name] is None else f"{kernel[name]:15.1f}" for name in SHOWN)
        most = sorted(kernel["stalls"].items(), key=lambda item: -item[1])[:3]
        us = "-" if kernel["us"] is None else f"{kernel['us']:.1f}"
        waits = ", ".join(f"{name} {value:.1f}" for name, value in most)
        text += f"{kernel['kernel']:24}{us:>8}{cells}  {waits}\n"
    return text + "\n"


def provenance() -> dict[str, str]:
    """What the numbers are of: asked of the tools, so that this process holds no GPU."""
    sys.path[:0] = [str(ROOT / "src")]
    from epcross.kernels.onesided.jit import sources_hash

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    seen = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    words = ["python", "tests/benchmark/gpu_counters.py", *sys.argv[1:]]
    return {
        "gpu": seen[0] if seen else "unknown", "commit": commit.strip() or "unknown", "sources": sources_hash(),
        "command": " ".join(words),
    }  # fmt: skip


def main() -> int:
    """Read the words, run every case under Nsight Compute, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", default="2,8", help="ranks, with commas")
    parser.add_argument("--tokens", default="128,512", help="tokens of each rank, with commas")
    parser.add_argument("--protocols", default="fence,sentinel", help="with commas")
    parser.add_argument("--json", type=Path, help="store everything there, too")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.inner:
        run_pairs(int(words.ep), int(words.tokens), words.protocols)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu is not on the PATH; it comes with CUDA's Nsight Compute")
    found, failed, about = [], False, provenance()
    for ep in words.ep.split(","):
        for tokens in words.tokens.split(","):
            for protocol in words.protocols.split(","):
                title = f"{protocol}, EP {ep} in one launch, {tokens} tokens"
                ran = subprocess.run(
                    command(ncu, int(ep), int(tokens), protocol), capture_output=True, text=True, check=False
                )
                try:
                    kernels = read(ran.stdout)
                except ValueError as error:
                    failed = True
                    sys.stdout.write(f"{title}: {error} {ran.stderr[-600:]}\n")
                    continue
                found.append({"protocol": protocol, "ep_size": int(ep), "tokens": int(tokens), "kernels": kernels})
                sys.stdout.write(table(title, kernels))
                sys.stdout.flush()
                if words.json:
                    words.json.write_text(json.dumps({**about, "cases": found}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
