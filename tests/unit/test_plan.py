"""The plan: which points a sweep means, which cannot run, which jobs run the rest, and that all of it is stable."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import FIXTURES, plan_of, problems_of, sweep_file, the_problem

from epcross.harness.backends import loader, vendor
from epcross.harness.planning import assemble, impossible
from epcross.harness.planning.build import build
from epcross.harness.planning.grid import block_problems, excluded, expand, override_axis
from epcross.harness.planning.library import Library
from epcross.harness.planning.plan import Plan
from epcross.harness.planning.schema import BackendConfig, Block
from epcross.harness.terms import Domain, PlacementKind, Regime, RoutingKind, RowFormat, Sharing, Status

LAYERS = ("experts_h200", "layer_h200x2", "layer_one_gpu", "layer_smoke")


def words_that_stand_in(sweep: str) -> list[str]:
    """Fixture backends in place of those a sweep names, so that it is planned wherever it runs. Layers stay: what such
    a sweep says of expert stages is for no other backend."""
    if sweep == "floor":
        return []
    return [f"sweep={sweep}", *([] if sweep in LAYERS else ["backend=plain,small"])]


@pytest.mark.parametrize("sweep", [s for s in Library().names("sweep") if s != "floor"])
def test_every_sweep_is_planned(sweep: str):
    plan = plan_of(*words_that_stand_in(sweep))
    assert len(plan.points) >= 4
    assert sum(len(job.points) for job in plan.jobs) + len(plan.impossible) == len(plan.points)


@pytest.mark.parametrize("sweep", [s for s in Library().names("sweep") if s != "floor"])
def test_every_sweep_is_planned_with_its_own_backends(sweep: str):
    given = [block.grid["backend"] for block in Library().get("sweep", sweep).products()]
    named = {name for names in given for name in ([names] if isinstance(names, str) else names)}
    plan = build([f"sweep={sweep}"])
    assert {point.backend for point in plan.points} == named - set(plan.config["absent_backends"])


def test_quickstart_is_what_the_first_run_promises():
    plan = plan_of("sweep=quickstart", "backend=plain")
    assert {(p.ep_size, p.tokens_per_rank) for p in plan.points} == {
        *((2, n) for n in (1, 8, 32, 128, 512)),
        *((4, n) for n in (1, 32)),
    }
    assert {p.regime for p in plan.points} == {Regime.STEADY, Regime.ENTRY}
    assert {(p.model.name, p.model.hidden, p.model.top_k) for p in plan.points} == {("deepseek_v3", 7168, 8)}
    assert plan.timing.repeats == 9
    assert [(job.ep_size, len(job.points)) for job in plan.jobs] == [(2, 10), (4, 2)]


def test_floor_has_jobs_and_no_points():
    plan = plan_of("sweep=floor", "ep_size=3")
    assert plan.points == ()
    assert [(job.ep_size, job.domain, job.backends) for job in plan.jobs] == [(3, Domain.CPU, ())]
    assert "ep_size=0" in the_problem("sweep=floor", "ep_size=0")


def test_an_override_replaces_an_axis_in_every_block_and_keeps_its_place():
    plan = plan_of("sweep=quickstart", "backend=plain", "regime=entry", "tokens_per_rank=3,2")
    assert [(p.ep_size, p.tokens_per_rank) for p in plan.points] == [(2, 3), (2, 2), (4, 3), (4, 2)]
    # two blocks that now say the same leave one point each
    assert len(plan_of("sweep=quickstart", "backend=plain", "ep_size=2").points) == 10


def test_grid_zip_exclude_and_blocks(tmp_path: Path):
    config_dir = sweep_file(
        tmp_path,
        """
description: all parts together
grid: {backend: [plain, other], model: tiny, regime: [steady, entry]}
zip:
  - {ep_size: [2, 4], tokens_per_rank: [8, 16]}
exclude:
  - {backend: other, ep_size: [4]}
  - {regime: entry, tokens_per_rank: 8, backend: plain}
blocks:
  - exclude: [{regime: entry, ep_size: 4}]
  - grid: {dispatch_format: fp8, backend: plain, regime: steady}
""",
    )
    plan = plan_of("sweep=mine", more=(config_dir,))
    assert [(p.backend, p.regime, p.ep_size, p.tokens_per_rank, p.dispatch_format) for p in plan.points] == [
        ("plain", "steady", 2, 8, "bf16"),
        ("plain", "steady", 4, 16, "bf16"),
        ("other", "steady", 2, 8, "bf16"),
        ("other", "entry", 2, 8, "bf16"),
        ("plain", "steady", 2, 8, "fp8"),
        ("plain", "steady", 4, 16, "fp8"),
    ]
    # an override takes the factor out of its zip; the other half of the zip stays
    assert [
        p.tokens_per_rank for p in plan_of("sweep=mine", "ep_size=2", "backend=plain", more=(config_dir,)).points
    ] == [
        8,
        16,
        16,
        8,
        16,
    ]


def test_fields_and_options_vary_where_they_are_read():
    plan = plan_of(
        "sweep=crossover",
        "backend=plain,other",
        "tokens_per_rank=8",
        "regime=steady",
        "routing=uniform,zipf",
        "routing.exponent=0.5,1.5",
        "backend.options.chunk=2,4",
    )
    assert [(p.backend, p.routing.kind, p.routing.exponent, dict(p.options).get("chunk")) for p in plan.points] == [
        ("plain", "uniform", 0.0, 2),
        ("plain", "uniform", 0.0, 4),
        ("plain", "zipf", 0.5, 2),
        ("plain", "zipf", 0.5, 4),
        ("plain", "zipf", 1.5, 2),
        ("plain", "zipf", 1.5, 4),
        ("other", "uniform", 0.0, None),
        ("other", "zipf", 0.5, None),
        ("other", "zipf", 1.5, None),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["routing.exponent=1.0"], "routing.exponent is read by routing=zipf only"),
        (["placement.num_slots=300"], "placement.num_slots is read by placement=replicated only"),
        (["backend.options.chunks=2"], "no backend of the sweep has the option 'chunks'"),
        (["backend.options.chunk=big"], "option chunk is 'big', but must be an integer"),
        (["backend.options.algorithm=true"], "option algorithm is True, but must be text"),
    ],
)
def test_a_field_that_nothing_reads_is_refused(words: list[str], says: str):
    assert says in the_problem("sweep=crossover", "backend=plain", *words)


def test_a_changed_shape_has_a_name_of_its_own():
    point = plan_of("sweep=smoke", "backend=plain", "model=tiny", "model.hidden=128").points[0]
    assert (point.model.name, point.model.hidden) == ("tiny,hidden=128", 128)


def test_short_names_and_masks():
    plan = plan_of("sweep=crossover", "backend=plain", "tokens_per_rank=1", "masked_fraction=0.5", "routing=perfect")
    assert {(p.routing.kind, p.routing.masked_fraction) for p in plan.points} == {(RoutingKind.PERFECT, 0.5)}
    assert "given twice" in the_problem("masked_fraction=0.5", "routing.masked_fraction=0.1", "backend=plain")


def test_the_content_of_a_trace_is_the_factor_and_its_name_is_not(tmp_path: Path):
    words = ["sweep=crossover", "backend=plain", "tokens_per_rank=1", "regime=steady", "routing=trace", "model=tiny"]
    ids = []
    for name, first in (("a.npz", 1), ("b.npz", 1), ("c.npz", 2)):
        np.savez(tmp_path / name, ids=np.array([[first, 0]], np.int32))
        (point,) = plan_of(*words, f"routing.path={tmp_path / name}").points
        ids.append(point.point_id)
    assert ids[0] == ids[1] != ids[2]
    assert "routing=trace needs a file; add routing.path=FILE" in the_problem(*words)
    assert "give the path of a readable file" in the_problem(*words, f"routing.path={tmp_path}/none.npz")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[8, 0]], "ids are outside [-1, 8)"),
        ([[1, 0, 2]], "this model needs [N, top_k=2]"),
        ([[3, 3]], "choices of a token must be distinct"),
        (np.zeros((0, 2), int), "holds no token"),
        (None, "t.npz"),
    ],
)
def test_a_faulty_trace_is_found_before_anything_runs(tmp_path: Path, ids: object, says: str):
    path = tmp_path / "t.npz"
    if ids is None:
        path.write_bytes(b"PK cut off")
    else:
        np.savez(path, ids=np.asarray(ids))
    words = ("sweep=smoke", "backend=plain", "model=tiny", "tokens_per_rank=1", "routing=trace")
    assert says in the_problem(*words, f"routing.path={path}")


def test_replicas_of_the_published_placement():
    words = ["sweep=crossover", "backend=plain", "tokens_per_rank=1", "regime=steady", "ep_size=72"]
    (point,) = plan_of(*words, "placement=replicated").points
    assert (point.placement.kind, point.placement.num_slots, point.experts_per_rank) == (
        PlacementKind.REPLICATED,
        288,
        4,
    )
    (point,) = plan_of(*words, "placement=replicated", "placement.num_slots=360").points
    assert point.experts_per_rank == 5


def test_impossible_points_stay_in_the_plan_with_their_reason():
    plan = plan_of(
        "sweep=crossover", "backend=plain,small,absent,gpu,careless", "tokens_per_rank=8,128", "regime=entry"
    )
    assert len(plan.points) == 10
    assert [(i.point.backend, i.point.tokens_per_rank, i.status, i.reason) for i in plan.impossible] == [
        ("small", 128, Status.UNSUPPORTED, "max_tokens_per_rank=128 is above its limit 64"),
        ("absent", 8, Status.UNAVAILABLE, "the library libabsent is not installed; pip install libabsent"),
        ("absent", 128, Status.UNAVAILABLE, "the library libabsent is not installed; pip install libabsent"),
        ("gpu", 8, Status.UNSUPPORTED, "gpu runs in domain nvlink, not in cpu: take device=cuda"),
        ("gpu", 128, Status.UNSUPPORTED, "gpu runs in domain nvlink, not in cpu: take device=cuda"),
        ("careless", 8, Status.UNAVAILABLE, "its check failed with RuntimeError: driver not loaded"),
        ("careless", 128, Status.UNAVAILABLE, "its check failed with RuntimeError: driver not loaded"),
    ]
    (job,) = plan.jobs
    assert [(p.backend, p.tokens_per_rank) for p in job.points] == [("plain", 8), ("plain", 128), ("small", 8)]
    assert job.backends == ("plain", "small")


def test_what_the_planning_process_has_loaded_rules_nothing_out(monkeypatch: pytest.MonkeyPatch):
    """Torch comes into it with the first backend that is asked here, and its NCCL is not that of other interpreters."""
    monkeypatch.setattr(impossible.loader, "unavailable", lambda config, compute="": None)
    words = ("sweep=baselines_mps", "backend=onesided_fence,nccl_ep,nccl_ep_ht,nccl_a2a,nccl_a2a_padded,ag_rs")
    monkeypatch.setattr(vendor, "loaded_nccl", lambda: {})
    before = plan_of(*words)
    monkeypatch.setattr(vendor, "loaded_nccl", lambda: {"nccl": "2.28.9 /opt/torch/lib/libnccl.so.2"})
    assert plan_of(*words) == before
    assert before.impossible == ()
    assert {point.sharing for point in before.points} == {Sharing.PROCESSES}


def test_interpreters_are_asked_at_the_same_time_and_each_once(monkeypatch: pytest.MonkeyPatch):
    """Nine of the exchanges between GPUs have one or an environment of their own, and each imports torch."""
    together, asked = threading.Barrier(2, timeout=20), []

    def unavailable(config: BackendConfig, compute: str) -> str:
        asked.append(config.name)
        if loader.asks_another(config):
            together.wait()
        return f"{config.name} is not here"

    monkeypatch.setattr(loader, "unavailable", unavailable)
    words = ["sweep=baselines_smoke", "backend=onesided_fence,nccl_ep_ht,nccl_a2a", "tokens_per_rank=1,8"]
    plan = build([*words, "dispatch_format=bf16", "regime=steady"])
    assert sorted(asked) == ["nccl_a2a", "nccl_ep_ht", "onesided_fence"]
    assert [item.point for item in plan.impossible] == list(plan.points)
    assert all(item.reason == f"{item.point.backend} is not here" for item in plan.impossible)


def test_the_devices_that_are_named_are_those_there_are():
    found = {}
    for path in sorted((Path(__file__).parents[2] / "conf" / "device").glob("*.yaml")):
        found.setdefault(Domain(yaml.safe_load(path.read_text())["domain"]), []).append(path.stem)
    assert {domain: tuple(names) for domain, names in found.items()} == impossible._DEVICES


def test_a_plan_survives_json():
    plan = plan_of("sweep=quickstart", "backend=plain,small,absent", "dispatch_format=bf16,nvfp4")
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert [p.point_id for p in again.points] == [p.point_id for p in plan.points]
    assert again.points[-1].dispatch_format is RowFormat.NVFP4
    assert again.output_dir == Path.cwd() / "results" / "runs"


def test_two_thousand_points_in_two_seconds():
    start = time.process_time()  # of this process alone: neighbours on the machine do not count
    plan = plan_of("sweep=crossover", "backend=plain,other,small,absent", "tokens_per_rank=range(1,251)")
    ids = {point.point_id for point in plan.points}
    elapsed_s = time.process_time() - start
    assert len(ids) == 2000
    assert elapsed_s < 2.0


AXES = st.fixed_dictionaries(
    {},
    optional={
        "backend": st.lists(st.sampled_from(["plain", "other", "small"]), min_size=1, max_size=3, unique=True),
        "ep_size": st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3, unique=True),
        "tokens_per_rank": st.lists(st.integers(1, 200), min_size=1, max_size=4),
        "regime": st.lists(st.sampled_from(["steady", "entry"]), min_size=1, max_size=2, unique=True),
        "token_skew": st.lists(st.sampled_from([1.0, 1.25, 2.0]), min_size=1, max_size=2, unique=True),
    },
)


@settings(max_examples=4, deadline=None)
@given(axes=AXES)
def test_the_same_words_give_the_same_points_in_the_same_order(axes: dict[str, list]):
    words = [f"{name}={','.join(map(str, values))}" for name, values in axes.items()]
    words += [] if "backend" in axes else ["backend=plain"]
    first, second = (build(["sweep=crossover", "model=tiny", *words], [FIXTURES]) for _ in range(2))
    ids = [point.point_id for point in first.points]
    assert ids == [point.point_id for point in second.points]
    assert len(set(ids)) == len(ids)
    assert first == second


FACTORS = st.sampled_from("abcd")
GRID = st.dictionaries(FACTORS, st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4)
EXCLUDE = st.lists(st.dictionaries(FACTORS, st.lists(st.integers(0, 3), max_size=3), max_size=3), max_size=4)


@given(grid=GRID, exclude=EXCLUDE, more=EXCLUDE)
def test_exclusion_never_adds_points(grid: dict, exclude: list, more: list):
    everything = list(expand(Block(grid=grid)))
    some = [point for point in everything if not excluded(point, exclude)]
    fewer = [point for point in everything if not excluded(point, [*exclude, *more])]
    assert [point for point in some if point in fewer] == fewer
    for point in everything:
        matched = any(m and all(f in point and point[f] in values for f, values in m.items()) for m in exclude)
        assert (point in some) is not matched


@given(grid=GRID, zipped=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_the_size_of_a_product(grid: dict, zipped: list):
    columns: dict[str, list[int]] = {"x": [x for x, _ in zipped], "y": [y for _, y in zipped]}
    block = Block(grid=grid, zip=(columns,))
    assert block_problems(block) == []
    expected = len(zipped)
    for values in grid.values():
        expected *= len(values)
    points = list(expand(block))
    assert len(points) == expected
    assert {(point["x"], point["y"]) for point in points} == set(zipped)
    replaced = list(expand(override_axis(block, "x", [9])))
    assert {point["x"] for point in replaced} == {9}
    assert len(replaced) == expected


def test_the_sweep_reports_every_impossible_combination_once():
    problems = problems_of("sweep=crossover", "backend=plain", "ep_size=3,5,2", "model=deepseek_v3,tiny")
    assert len(problems) == 4
    assert all("does not divide" in problem for problem in problems)


def test_a_sweep_beyond_all_measure_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(assemble, "MAX_POINTS", 6)
    words = ("sweep=crossover", "backend=plain", "regime=steady")
    assert len(plan_of(*words, "tokens_per_rank=1,2,3,4,5,6").points) == 6
    said = "the sweep has more than 6 points; split it, or give fewer values"
    assert the_problem(*words, "tokens_per_rank=1,2,3,4,5,6,7") == said
