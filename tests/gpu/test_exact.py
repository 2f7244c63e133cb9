"""The one-sided exchange is exact: every format, protocol, group size and token count that fits, all in one launch."""

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="needs torch for CUDA and a GPU")

from tests.gpu._rounds import FORMS, Case, make_inputs, play  # noqa: E402

from epcross.kernels.errors import DoesNotFit, InvalidArguments  # noqa: E402
from epcross.kernels.formats import RowFormat  # noqa: E402
from epcross.kernels.onesided import OneSidedAllToAll  # noqa: E402

pytestmark = pytest.mark.gpu(1)

TOKENS = (0, 1, 3, 31, 32, 33, 128, 513)
PROTOCOLS = FORMS


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def fits(case: Case) -> bool:
    """Workspaces, inputs and the oracle's copies, in what is free."""
    workspace = OneSidedAllToAll.workspace_bytes(
        ep_size=case.ep_size,
        max_tokens_per_rank=case.capacity,
        top_k=case.top_k,
        hidden=case.hidden,
        dispatch_format=case.dispatch_format,
        protocol=case.named,
    )
    oracle = 16 * case.ep_size**2 * case.capacity * case.hidden
    return case.ep_size * workspace + oracle < 0.8 * torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("ep_size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dispatch_format", RowFormat)
def test_every_row_arrives_and_every_sum_is_right(dispatch_format: RowFormat, protocol: str, ep_size: int) -> None:
    case = Case(ep_size=ep_size, capacity=513, dispatch_format=dispatch_format, protocol=protocol)
    exchange = case.exchange()
    try:
        for seed, tokens in enumerate(TOKENS):
            play(exchange, make_inputs(case, [tokens] * ep_size, seed), case.linear())
            uneven = random.Random(seed)
            counts = [uneven.choice((0, tokens, uneven.randint(0, tokens))) for _ in range(ep_size)]
            play(exchange, make_inputs(case, counts, 100 + seed), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("ep_size", [2, 8, 32])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dispatch_format", RowFormat)
def test_wide_rows(dispatch_format: RowFormat, protocol: str, ep_size: int) -> None:
    case = Case(
        ep_size=ep_size,
        capacity=512 if ep_size <= 8 else 64,
        hidden=7168,
        dispatch_format=dispatch_format,
        protocol=protocol,
    )
    if not fits(case):
        pytest.skip(f"needs a GPU with more free memory than this one for {case}")
    exchange = case.exchange()
    try:
        for seed, tokens in enumerate(sorted({1, 8, 33, case.capacity})):
            play(exchange, make_inputs(case, [tokens] * ep_size, seed), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("ep_size", [1, 3, 5, 9, 33, 65, 72])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_group_sizes_around_the_borders_of_mask_words(protocol: str, ep_size: int) -> None:
    case = Case(
        ep_size=ep_size, capacity=9, hidden=128, num_slots=2 * ep_size, top_k=min(8, 2 * ep_size), protocol=protocol
    )
    exchange = case.exchange()
    try:
        for seed, tokens in enumerate((1, 9, 0, 2)):
            play(exchange, make_inputs(case, [tokens] * ep_size, seed, routing="masked"), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("routing", ["skewed", "masked", "beyond", "empty"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_routing_of_every_kind(protocol: str, routing: str) -> None:
    case = Case(ep_size=8, capacity=64, hidden=512, protocol=protocol)
    exchange = case.exchange()
    try:
        for seed, tokens in enumerate((1, 64, 17, 2)):
            play(exchange, make_inputs(case, [tokens] * 8, seed, routing=routing), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_replicas_and_any_placement(protocol: str) -> None:
    """288 slots for 256 experts on 6 ranks, in no order; one rank has none."""
    case = Case(ep_size=6, capacity=33, num_slots=288, protocol=protocol)
    placement = [random.Random(slot).randrange(5) for slot in range(288)]
    exchange = case.exchange(placement)
    try:
        for seed in range(4):
            play(exchange, make_inputs(case, [33, 0, 1, 5, 33, 9], seed), torch.tensor(placement, device="cuda"))
    finally:
        exchange.close()


@pytest.mark.parametrize("top_k", [1, 2, 5, 16])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_top_k(protocol: str, top_k: int) -> None:
    case = Case(ep_size=4, capacity=20, top_k=top_k, protocol=protocol)
    exchange = case.exchange()
    try:
        for seed in range(3):
            play(exchange, make_inputs(case, [20, 3, 0, 7], seed), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("hidden", [8, 24, 136, 1000, 2880])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rows_that_fill_no_warp_evenly(protocol: str, hidden: int) -> None:
    case = Case(ep_size=4, capacity=40, hidden=hidden, protocol=protocol)
    exchange = case.exchange()
    try:
        for seed, tokens in enumerate((1, 40, 3)):
            play(exchange, make_inputs(case, [tokens] * 4, seed), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("ep_size", [2, 4, 8, 16])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dispatch_format", RowFormat)
def test_any_bits_arrive(dispatch_format: RowFormat, protocol: str, ep_size: int) -> None:
    """Half of all words are armed words, escapes, NaNs, -0 and the like, in rows, scales, weights and partials."""
    case = Case(ep_size=ep_size, capacity=200, dispatch_format=dispatch_format, hidden=1024, protocol=protocol)
    exchange = case.exchange()
    try:
        for seed, tokens in enumerate((1, 7, 200, 2, 64)):
            play(exchange, make_inputs(case, [tokens] * ep_size, seed, reserved=True), case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("word", [0, 1])
def test_rows_of_nothing_but_a_reserved_word(word: int) -> None:
    from tests.gpu._rounds import RESERVED

    case = Case(ep_size=4, capacity=5, hidden=512)
    exchange = case.exchange()
    try:
        for seed in range(4):
            inputs = make_inputs(case, [5] * 4, seed)
            for tensor in (inputs.rows, inputs.partials, inputs.weights):
                words = tensor.view(torch.int64)
                words.fill_(RESERVED[word] - (1 << 64 if RESERVED[word] >> 63 else 0))
            play(exchange, inputs, case.linear())
    finally:
        exchange.close()


@pytest.mark.parametrize("programmatic_launch", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_few_blocks_serve_many_tokens(protocol: str, programmatic_launch: bool) -> None:
    case = Case(ep_size=4, capacity=300, hidden=512, protocol=protocol)
    num_sms = 4 if protocol == "fence_row" else 2  # an SM holds fewer of larger blocks
    exchange = case.exchange(num_sms=num_sms, programmatic_launch=programmatic_launch)
    try:
        row = exchange.describe()["kernels"]["dispatch"]["name"] == "fence_dispatch_row"
        assert row == (protocol == "fence_row")
        for kernel in exchange.describe()["kernels"].values():
            assert 8 <= kernel["blocks"] <= num_sms * 16, "a block of each role for each rank, and what the SMs hold"
        for seed, tokens in enumerate((300, 1, 299)):
            play(exchange, make_inputs(case, [tokens] * 4, seed), case.linear())
    finally:
        exchange.close()


def test_bad_calls_are_refused_and_leave_the_exchange_usable() -> None:
    case = Case(ep_size=2, capacity=4, hidden=64, num_slots=8, top_k=2)
    exchange = case.exchange()
    inputs = make_inputs(case, [4, 4], 1)
    with pytest.raises(InvalidArguments, match="combine has no dispatch before it"):
        exchange.combine(inputs.partials[0])
    with pytest.raises(InvalidArguments, match=r"rows is on cpu and must be on cuda:0"):
        exchange.dispatch(inputs.rows.cpu(), inputs.ids, inputs.weights)
    wrong = inputs.ids.clone()
    wrong[1, 3, 0] = 8
    with pytest.raises(InvalidArguments, match="1 ids of local rank 1 are outside -1 to 7; the first is 8"):
        exchange.dispatch(inputs.rows, wrong, inputs.weights, check_ids=True)
    play(exchange, inputs, case.linear())
    exchange.dispatch(inputs.rows, inputs.ids, inputs.weights)
    with pytest.raises(InvalidArguments, match="dispatch follows a dispatch: call combine first"):
        exchange.dispatch(inputs.rows, inputs.ids, inputs.weights)
    exchange.combine(torch.empty_like(inputs.partials[0]))
    with pytest.raises(InvalidArguments, match="combine has no dispatch before it"):
        exchange.combine(torch.empty_like(inputs.partials[0]))
    play(exchange, inputs, case.linear())
    exchange.close()
    exchange.close()
    with pytest.raises(InvalidArguments, match="closed"):
        exchange.combine_buffer()


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # of this process: others may use the GPU meanwhile
    with pytest.raises(DoesNotFit, match=r"take \d+ bytes and \d+ bytes are free"):
        Case(ep_size=64, capacity=8192, hidden=7168).exchange()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert abs(torch.cuda.memory_reserved() - before) < 64 << 20


def test_memory_comes_back() -> None:
    case = Case(ep_size=8, capacity=128, hidden=2048)
    case.exchange().close()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # one launch for all ranks: workspaces are torch's
    for _ in range(5):
        case.exchange().close()
    torch.cuda.empty_cache()
    assert abs(torch.cuda.memory_reserved() - before) < 64 << 20
