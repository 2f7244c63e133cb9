"""What rank-major rows cost around DeepGEMM's products, verified and timed on one GPU: to experts, SwiGLU, sums back.

    python tests/benchmark/gpu_permute.py [--tree DIR] [--out FILE] [--formats fp8] [--form masked] [--points 8x1,...]

A point is EPxTOKENS, as of gpu_experts.py. `--tree` names a folder whose src/epcross has the kernels of another state
of this repository, for old beside new:

    mkdir -p .bench/before/src/epcross && git archive COMMIT kernels | tar -x -C .bench/before/src/epcross
    git show COMMIT:src/epcross/__init__.py > .bench/before/src/epcross/__init__.py

The products are stood in for: first by those of tests/fakes, whose result the oracle judges; then, for timing, by one
pass over 256 MB, which leaves the L2 as weights do. Each line has the median of seven replays of a graph of 20 layers,
less that of the passes alone (`around_us`, SwiGLU included), and the time of each kernel by itself.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TREE = Path(sys.argv[sys.argv.index("--tree") + 1]).resolve() if "--tree" in sys.argv else ROOT
sys.path[:0] = [str(_TREE / "src"), str(ROOT)]

import torch  # noqa: E402

from epcross.kernels.experts import oracle  # noqa: E402
from epcross.kernels.experts.deepgemm import DeepGemm  # noqa: E402
from epcross.kernels.experts.formats import Layout  # noqa: E402
from epcross.kernels.experts.weights import ExpertWeights, make_weights  # noqa: E402

from tests.benchmark.expert_points import Place, Point, kernels_us, places_of, provenance, replays_us  # noqa: E402  # isort: skip
from tests.fakes import grouped_products  # noqa: E402  # isort: skip

POINTS = ",".join(f"{ep}x{tokens}" for ep in (8, 16, 32, 64) for tokens in (1, 128))
LAYERS, PASS_BYTES = 20, 256 << 20


def main() -> None:
    """Read the words and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", default=str(ROOT))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu-check" / "permute.jsonl")
    parser.add_argument("--formats", default="fp8")
    parser.add_argument("--form", default="masked", choices=["masked", "contiguous"])
    parser.add_argument("--points", default=POINTS)
    words = parser.parse_args()
    if not Path(sys.modules[DeepGemm.__module__].__file__ or "").is_relative_to(Path(words.tree).resolve()):
        parser.error(f"the kernels are not those of --tree {words.tree}: it needs src/epcross, and no '=' before it")
    words.out.parent.mkdir(parents=True, exist_ok=True)
    stand_in = SimpleNamespace(**vars(grouped_products.deep_gemm()))
    sys.modules["deep_gemm"] = stand_in  # type: ignore[assignment]
    passed = torch.ones(PASS_BYTES // 8, device="cuda")  # read and written: twice its size

    def one_pass(*_: Any, **__: Any) -> None:
        passed.add_(0.0)

    real = dict(vars(stand_in))
    with words.out.open("a") as file:
        for place in places_of(words.points, words.formats):
            vars(stand_in).update(real)
            weights = make_weights(place.shape(), seed=1, device="cuda", copies=1)
            row = measured(place, weights, words.form, stand_in, one_pass)
            row |= {"tree": words.tree, "form": words.form, **place.named()}
            file.write(json.dumps({**row, **provenance()}) + "\n")
            file.flush()
            sys.stdout.write(f"{words.tree} {place}: {row}\n")
            sys.stdout.flush()


def measured(
    place: Place, weights: ExpertWeights, form: str, library: SimpleNamespace, one_pass: Any
) -> dict[str, Any]:
    """One point: judged, then timed."""
    point = Point(place, weights, (Layout.RANK_MAJOR,))
    landings = point.landings[Layout.RANK_MAJOR]
    compute = DeepGemm(form)
    compute.prepare(point.shape, Layout.RANK_MAJOR, weights)
    for landing in landings:
        landing.rows.out.fill_(float("nan"))
        compute.run(landing.rows)
        rows, wanted = oracle.expected_of_rows(
            point.shape, weights.copies[0], landing.rows, compute.arithmetic(point.shape)
        )
        judged = oracle.judge(landing.rows.out[rows], wanted)
        if not judged.ok:
            return {"wrong": judged.sentence()}
    for name in list(vars(library)):
        if name.startswith("m_grouped"):
            setattr(library, name, one_pass)

    def layers() -> None:
        for number in range(LAYERS):
            compute.run(landings[number % 2].rows)

    def passes() -> None:
        for _ in range(2 * LAYERS):
            one_pass()

    whole, alone = (replayed_us(work) / LAYERS for work in (layers, passes))
    spans = {name: us for name, us in kernels_us(layers, LAYERS).items() if "elementwise" not in name}
    compute.release()
    return {"around_us": round(whole - alone, 2), "kernels_us": spans, "pairs": int(pairs_of(point))}


def pairs_of(point: Point) -> float:
    """Pairs of a set, the mean of both."""
    shape, counts = point.shape, []
    for landing in point.landings[Layout.RANK_MAJOR]:
        ids = landing.rows.sets[0].ids
        here = landing.rows.present()[:, None] & (ids >= shape.first_slot) & (ids <= shape.last_slot)
        counts.append(int(here.sum()))
    return statistics.mean(counts)


def replayed_us(work: Any) -> float:
    """The median of replays of a graph of it."""
    torch.cuda.synchronize()  # what was prepared is filled, before another stream reads it
    with torch.cuda.stream(torch.cuda.Stream()):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return statistics.median(replays_us(graph))


if __name__ == "__main__":
    main()
