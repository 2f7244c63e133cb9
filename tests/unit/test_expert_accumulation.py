"""What tensor cores may lose is within the oracle's slack, and a fault beside it, or cruder sums, are not."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from epcross.kernels.experts import oracle
from epcross.kernels.experts.formats import Arithmetic, WeightFormat
from epcross.kernels.experts.weights import make_weights
from epcross.kernels.formats import RowFormat

from tests import _tensor_core  # isort: skip
from tests._experts import rank_major, shape_of  # isort: skip
from tests.benchmark import fp8_accumulation  # isort: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_sum_keeps_what_lies_within_its_bits() -> None:
    x, w = torch.zeros(1, 128), torch.ones(1, 128)
    x[0, :3] = torch.tensor([256.0, 2.0**-5, 2.0**-6])  # 13 binades below the largest, and 14
    assert _tensor_core.added(x, w, 13).item() == 256 + 2.0**-5
    x[0, :3] *= -1
    assert _tensor_core.added(x, w, 13).item() == -256 - 2.0**-5
    assert _tensor_core.added(x, w, 8).item() == -256
    x[0, 32] = 256.0  # the next 32: the sum so far is what is left of it
    assert _tensor_core.added(x, w, 13).item() == -(2.0**-5)


def test_right_tokens_pass_and_faults_do_not() -> None:
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, first_slot=0, num_local_experts=4, top_k=2, capacity_rows=60
    )  # fmt: skip
    copy = make_weights(shape, seed=1, device="cpu").copies[0]
    rows = rank_major(shape, seed=2, headers=False, share=1.0, slots=4)
    _, wanted = oracle.expected_of_rows(shape, copy, rows, Arithmetic(intermediate=RowFormat.FP8))
    plain = oracle.judge(wanted.plain, wanted)
    judged = oracle.judge(_tensor_core.layer(shape, copy, rows, 13), wanted)
    assert judged.ok, judged.sentence()
    assert judged.error.max() > 2 * plain.error.max()  # so the slack is what lets them pass
    assert not oracle.judge(_tensor_core.layer(shape, copy, rows, 10), wanted).ok
    for name, (bad_copy, bad_rows) in fp8_accumulation.faults(copy, rows).items():
        judged = oracle.judge(_tensor_core.layer(shape, bad_copy, bad_rows, 13), wanted)
        assert not judged.ok, name
