"""The model checker on the protocols, and on every fault that it must find."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from epcross.kernels.model import check, trace
from epcross.kernels.model.runs import FAULTS, PROOFS, Run, Verdict

MODEL = Path(check.__file__).parent
NEEDS_SPIN = pytest.mark.skipif(check.unavailable() is not None, reason=str(check.unavailable()))
RUNS = PROOFS + FAULTS
PROTOCOLS = ("fence", "sentinel", "fence_gpu", "sentinel_gpu")
LEADS = {p: replace(FAULTS[0], protocol=p, expects=Verdict.AHEAD, defines=("LEAD=0",)) for p in PROTOCOLS}
"""With a bound that no rank may get ahead of the others at all."""
(ONE_SET,) = (run for run in FAULTS if run.slug == "sentinel_gpu-one-set-of-headers")
TWO_STORES = replace(ONE_SET, expects=Verdict.TWICE, defines=(*ONE_SET.defines, "ALONE"))


@pytest.fixture(scope="module")
def outcomes() -> dict[Run, check.Outcome]:
    """Every run, once."""
    return {outcome.run: outcome for outcome in check.check_all((*RUNS, *LEADS.values(), TWO_STORES))}


@NEEDS_SPIN
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.slug}-{run.ranks}")
def test_run_ends_as_expected(outcomes: dict[Run, check.Outcome], run: Run) -> None:
    outcome = outcomes[run]
    assert outcome.verdict is run.expects, outcome.trace
    assert bool(outcome.trace) == (run.expects is not Verdict.HOLDS)


@NEEDS_SPIN
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", FAULTS, ids=lambda run: run.slug)
def test_the_kept_trace_is_the_one_that_is_found(outcomes: dict[Run, check.Outcome], run: Run) -> None:
    assert (MODEL / "traces" / f"{run.slug}.txt").read_text() == outcomes[run].trace


@NEEDS_SPIN
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ranks_do_get_one_dispatch_ahead(outcomes: dict[Run, check.Outcome], protocol: str) -> None:
    """So the bound is tight, and its assertion one that can fail."""
    found = outcomes[LEADS[protocol]]
    assert found.verdict is Verdict.AHEAD, found.trace


@NEEDS_SPIN
@pytest.mark.timeout(900)
def test_proofs_look_at_many_states_and_the_table_fits(outcomes: dict[Run, check.Outcome]) -> None:
    assert all(outcomes[run].states > 30_000 for run in PROOFS)
    table = check.table([outcomes[run] for run in RUNS]).splitlines()
    assert max(map(len, table)) <= 100
    assert not any(line.startswith("!") for line in table)


def test_both_sizes_of_all_protocols_are_proved() -> None:
    sizes = {(run.protocol, run.ranks, run.tokens, run.rounds) for run in PROOFS}
    assert sizes == {(protocol, *size) for protocol in PROTOCOLS for size in ((2, 2, 4), (3, 1, 3))}


@pytest.mark.parametrize("run", FAULTS, ids=lambda run: run.slug)
def test_a_trace_of_every_fault_is_kept_and_ends_with_its_verdict(run: Run) -> None:
    text = (MODEL / "traces" / f"{run.slug}.txt").read_text()
    assert text.startswith(f"{run.protocol}, seeded fault: {run.name}")
    assert text.endswith(f"\n{run.expects}.\n")


@NEEDS_SPIN
@pytest.mark.timeout(900)
def test_two_stores_under_way_to_one_word_of_a_peer_are_noticed(outcomes: dict[Run, check.Outcome]) -> None:
    """Headers in one set: the next round's follows while the one before may be under way."""
    assert outcomes[TWO_STORES].verdict is Verdict.TWICE


def test_early_re_arming_is_found_by_a_row() -> None:
    """Not by a count, which the implementation looks at once."""
    text = (MODEL / "traces" / "sentinel-re-arm-too-early.txt").read_text()
    assert "has seen 1 row(s)" in text or "has seen 2 row(s)" in text


@NEEDS_SPIN
@pytest.mark.timeout(900)
def test_without_a_release_fence_re_armings_may_arrive_and_need_not(outcomes: dict[Run, check.Outcome]) -> None:
    """The reduction delivers quiet stores at a fence: without one they would never arrive, which proves too much."""
    (run,) = (run for run in FAULTS if run.slug == "sentinel-no-release-fence")
    assert outcomes[run].states > 100_000  # with it, 7,060


@pytest.mark.parametrize(
    ("replay", "verdict"),
    [
        ("", Verdict.HOLDS),
        ("pan:1: assertion violated (mem[at_]==255) (at depth 47)", Verdict.LOST),
        ("pan:1: assertion violated (mem[((((r*(2-1))+((0+2)-1))*7)+3)]==24) (at depth 47)", Verdict.WRONG),
        ("pan:1: assertion violated (view[base_]==254) (at depth 26)", Verdict.WRONG),
        ("pan:1: assertion violated (begun[r]<=(begun[k_]+1)) (at depth 9)", Verdict.AHEAD),
        ("pan:1: assertion violated (buffer[r].n<22) (at depth 9)", Verdict.OVERFLOW),
        ("pan:1: assertion violated (i_<24) (at depth 9)", Verdict.OVERFLOW),
        ("pan:1: assertion violated (((7==255)||((7/14)==r))||(buffer[1].address[i_]!=7)) (at depth 9)", Verdict.TWICE),
        ("pan:1: invalid end state (at depth 60)", Verdict.STUCK),
    ],
)
def test_verdicts(replay: str, verdict: Verdict) -> None:
    assert trace.verdict(replay) is verdict


def test_a_replay_in_words() -> None:
    (run,) = (run for run in FAULTS if run.slug == "fence-no-release")
    text = trace.readable(run, "@dispatch 1 0 0\n@arrive 1 2 1\n@arrive 1 0 11\nassertion violated (mem[x]==1)")
    assert "rank 1 begins the dispatch of round 0" in text
    assert "payload 0 of rank 1 at rank 0, slot 0 <- value 1, stored by rank 1" in text
    assert "dispatch flag of rank 1 at rank 0 <- value 11, stored by rank 1" in text


def test_a_replay_of_the_gpu_models_in_words() -> None:
    """Addresses by hand: a pair of sentinel_gpu is 2 sets x 2 slots of payload, header, bitmap, then 2 returns."""
    (run,) = (run for run in FAULTS if run.slug == "sentinel_gpu-one-landing-set")
    steps = ["@arrive 1 7 24", "@arrive 1 6 30", "@arrive 1 11 40", "@arrive 0 27 255"]
    text = trace.readable(run, "\n".join(steps) + "\nassertion violated (mem[at_]==255)")
    assert text.splitlines()[2:6] == [
        "  memory: header of rank 1 at rank 0, set 1, slot 0 <- epoch 3, 2 token(s), this one too, stored by rank 1",
        "  memory: payload 0 of rank 1 at rank 0, set 1, slot 0 <- the escape word, stored by rank 1",
        "  memory: bitmap of rank 1 at rank 0, set 1, slot 1 <- value 40, stored by rank 1",
        "  memory: return of token 1 of rank 0 at rank 1 <- armed, stored by rank 0",
    ]
    (run,) = (run for run in FAULTS if run.slug == "fence_gpu-no-release")
    text = trace.readable(run, "@arrive 1 1 12\n@arrive 1 2 11\n@arrive 0 12 31\nassertion violated (mem[x]==1)")
    assert text.splitlines()[2:5] == [
        "  memory: flag of block 1 of rank 1 at rank 0 <- epoch 3, 2 flag(s), stored by rank 1",
        "  memory: combine flag of rank 1 at rank 0 <- epoch 3, 1 flag(s), stored by rank 1",
        "  memory: payload 0 of rank 0 at rank 1, slot 0 <- value 31, stored by rank 0",
    ]


SOURCES = MODEL.parent / "onesided" / "csrc"


def test_the_model_names_what_the_kernels_have() -> None:
    """Every function and macro that the README's table of the GPU protocol names is in the sources."""
    page = (MODEL / "README.md").read_text().split("## The kernels follow the model")[1].split("\n## ")[0]
    models = "".join((MODEL / f"{name}.pml").read_text() for name in ("sentinel_gpu", "fence_gpu", "memory", "routing"))
    rows = [row.strip("|").split("|") for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) >= 15
    for left, files, right in rows:
        for name in re.findall(r"`(\w+)`", left):
            assert re.search(rf"\b{name}\b", models), f"{name} is in no model"
        text = "".join((SOURCES / name).read_text() for name in re.findall(r"`(\w+\.cuh)`", files))
        for name in re.findall(r"`(\w+)`", right):
            assert re.search(rf"\b{name}\b", text), f"{name} is not in {files}"


def test_without_spin_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    assert check.main([]) == 2
    assert "apt-get install spin" in capsys.readouterr().err
