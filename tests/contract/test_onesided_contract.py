"""The adapter of the one-sided exchange, with the exchange replaced by one in torch: the contract, and what it says."""

from dataclasses import replace

import pytest
from tests._points import small_point
from tests.contract.threads import on_ranks

from epcross.harness.backends import onesided
from epcross.harness.backends.onesided import OneSidedFence, OneSidedSentinel
from epcross.harness.backends.onesided_auto import OneSidedAuto
from epcross.harness.point import Placement
from epcross.harness.terms import Domain, PlacementKind, RowFormat, Sharing
from epcross.harness.verification.cases import cases
from epcross.harness.verification.contract import run_case
from epcross.harness.verification.gpu_contract import GpuVisit
from epcross.kernels.onesided.layout import MAX_LOCAL_RANKS

pytest.importorskip("torch", reason="torch is not installed, which the one-sided exchange on a GPU needs")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The stand-in exchange; what it was made with is in `made`."""
    from tests._fake_exchange import stand_in

    return stand_in(monkeypatch)


def backend(kind: type[onesided.OneSided] = OneSidedSentinel, **options):
    return kind({**kind.option_defaults(), **options})


def shared(point, sharing=Sharing.ONE_LAUNCH):
    return replace(point, domain=Domain.SHARED_GPU, sharing=sharing)


@pytest.mark.parametrize(("kind", "ep_size"), [(OneSidedFence, 1), (OneSidedSentinel, 3), (OneSidedAuto, 2)])
def test_the_contract(kind, ep_size):
    found = {}
    for case in cases(ep_size, kind.name):
        case = replace(case, point=shared(case.point))
        if backend(kind).unsupported(case.point):
            assert case.point.model.hidden % 8 or case.point.model.top_k > 16
            continue
        (problems,) = on_ranks(
            1, lambda group, case=case: run_case(lambda: backend(kind), case, group, 30, visit_type=GpuVisit)
        )
        if problems:
            found[case.name] = problems
    assert found == {}


def test_the_exchange_is_asked_for_what_the_point_says(on_the_cpu):
    case = next(case for case in cases(4, "x") if case.name == "replicated")
    options = {"num_sms": 12, "programmatic_launch": False, "timeout_s": 3.0}
    point = shared(replace(case.point, dispatch_format=RowFormat.FP8))
    case = replace(case, point=point)
    on_ranks(1, lambda group: run_case(lambda: backend(**options), case, group, 30, visit_type=GpuVisit))
    (exchange,) = on_the_cpu
    assert exchange.given == {
        "num_experts": 20,
        "top_k": 3,
        "hidden": 128,
        "max_tokens_per_rank": 6,
        "dispatch_format": RowFormat.FP8,
        "protocol": "sentinel",
        "placement": [slot // 5 for slot in range(20)],
        "local_ranks": 4,
        "ranks_per_gpu": 1,
        "timeout_s": 3.0,
        "num_sms": 12,
        "programmatic_launch": False,
    }
    assert exchange.closed
    assert exchange.checked > 10  # whoever waits for the device also asks whether a wait ran out


def test_what_ran_is_described():
    described, reached = [], []

    class Described(OneSidedSentinel):
        def close(self):
            if self._exchange is not None:
                described.append(self.describe())
                came = [source.tolist() for source, _ in self._arrived[0]]
                reached.append((self._slot_rank[self._inputs[0]["ids"].long()], self._counts, came))
            super().close()

    case = cases(4, "x")[0]
    case = replace(case, point=shared(case.point))
    on_ranks(1, lambda group: run_case(lambda: backend(Described), case, group, 30, visit_type=GpuVisit))
    (said,) = described
    assert (said.version, said.transport, said.workspace_bytes) == ("0123456789abcdef", "local", 4096)
    assert said.kernels == ("fake_dispatch", "fake_combine")
    assert said.algorithm == "dispatch by 7 blocks, combine by 7 blocks"
    assert said.num_sms == 4  # seven blocks lie on four multiprocessors
    ((ranks, counts, came),) = reached
    goes = [[{*token} - {-1} for token in of[:count]] for of, count in zip(ranks.tolist(), counts, strict=True)]
    shape = onesided._shape(case.point)
    assert said.protocol_bytes == max(
        # headers and notes to four ranks, padding of records, and words armed for what others sent and return
        (8 + 4) * 4 * len(own)
        + sum(map(len, own)) * (16 * shape.record_vectors - shape.row_bytes - 8 * shape.top_k)
        + sum(source != rank for source in came[rank]) * 16 * shape.record_vectors
        + sum(len(to - {rank}) for to in own) * 2 * shape.hidden
        for rank, own in enumerate(goes)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"combine_format": RowFormat.FP8}, "combine_format=fp8"),
        ({"top_k": 17, "experts": 32}, "top_k=17 must be 1 to 16"),
        ({"hidden": 67}, "hidden=67 must be a multiple of 8"),
        ({"experts": 4100}, "4100 slots are above 4096"),
        ({"top_k": 9, "experts": 8}, "top_k=9 is above the number of slots 8"),
    ],
)
def test_limits_are_sentences(change, words):
    reason = backend().unsupported(shared(small_point((2,) * 4, **change)))
    assert reason is not None
    assert words in reason


def test_one_launch_has_so_many_ranks_and_no_more():
    def point(ranks):
        placement = Placement(kind=PlacementKind.REPLICATED, num_slots=ranks)
        return shared(small_point((1,) * ranks, experts=8, placement=placement))

    assert backend().unsupported(point(MAX_LOCAL_RANKS)) is None
    reason = backend().unsupported(point(MAX_LOCAL_RANKS + 1))
    assert reason is not None
    assert f"at most {MAX_LOCAL_RANKS} ranks" in reason


@pytest.mark.parametrize(("name", "value"), [("timeout_s", 0.0), ("timeout_s", 3601.0), ("num_sms", -1)])
def test_options_that_mean_nothing_are_refused(name, value):
    reason = backend(**{name: value}).unsupported(shared(small_point()))
    assert reason is not None
    assert f"{name}={value}" in reason


def test_what_can_never_fit_is_refused_with_both_sizes(monkeypatch):
    import torch

    point = shared(small_point((4,) * 8, experts=8, hidden=512))
    needed = 8 * backend().workspace_bytes(point)  # all ranks share the GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, needed))
    assert backend().unsupported(point) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, needed - 1))
    reason = backend().unsupported(point)
    assert reason == (
        f"its workspaces need {needed} bytes of one GPU, which has {needed - 1}: lower max_tokens_per_rank or ep_size"
    )
    assert backend().unsupported(replace(point, domain=Domain.NVLINK, sharing=Sharing.NONE)) is None


def test_a_workspace_holds_every_row_that_may_come():
    point = shared(small_point((4,) * 8, experts=8, hidden=512))
    row_bytes = 2 * 512
    fence, sentinel = (backend(kind).workspace_bytes(point) for kind in (OneSidedFence, OneSidedSentinel))
    assert fence >= 8 * 4 * 2 * row_bytes  # records and partials
    assert sentinel >= 8 * 4 * 4 * row_bytes  # two landing sets, partials, and those that come back


def test_auto_hands_the_file_on_and_says_what_it_chose(on_the_cpu):
    described = []

    class Described(OneSidedAuto):
        def close(self):
            if self._exchange is not None:
                described.append(self.describe())
            super().close()

    case = cases(4, "x")[0]
    case = replace(case, point=shared(case.point))
    on_ranks(
        1,
        lambda group: run_case(lambda: backend(Described, crossover="/a/b.json"), case, group, 30, visit_type=GpuVisit),
    )
    (exchange,) = on_the_cpu
    assert (exchange.given["protocol"], exchange.given["crossover"]) == ("auto", "/a/b.json")
    assert described[0].algorithm == "fence by /a/b.json; dispatch by 7 blocks, combine by 7 blocks"


def test_autos_workspace_is_the_larger_of_the_two():
    point = shared(small_point((4,) * 8, experts=8, hidden=512))
    sizes = [backend(kind).workspace_bytes(point) for kind in (OneSidedFence, OneSidedSentinel)]
    assert backend(OneSidedAuto).workspace_bytes(point) == max(sizes) > min(sizes)
