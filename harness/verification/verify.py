"""What one rank must receive and combine, and the first thing that differs. The harness is the experts.

Received rows, ids and weights are compared bit for bit, in any order. The harness' experts then make one partial for
each received row: the decoded row times `slot_scale` of the slot's expert, in fp32, rounded to bf16 once. Which of the
token's selections count depends on who multiplies the weights:

    EXPERTS   partial = row * (sum over the token's selections here of weight * scale); combine adds partials
    COMBINE   partial = row * (scale of the token's first selection here); combine adds weight * partial for each
              selection here. An adapter whose library takes an input per selection gives each of them the same partial.
              A product is rounded to fp32 before it is added; a library that fuses the two declares exact=False

Sums are compared bit for bit under `Payload.EXACT` and `ADVERSARIAL`, whatever the order, and under RANDOM if the
backend declares its arithmetic exact; NaN equals NaN of any payload, and zeros are equal. Else RANDOM is held to a
bound for every value: with P the magnitudes of its n terms added, u = 2**-8 of bf16 and v = 2**-24 of fp32 (half a unit
in the last place), a sum in any order is off by at most n v P, or n u P if it accumulates in bf16, and its rounding at
the end adds u |sum|; ours, which it is compared to, is off by n v P, and n v P more covers second-order terms.
Source: Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epcross.harness.backends.base import BF16Bits, Bytes, Float32, Int32, Received, Reduction
from epcross.harness.errors import ConfigError
from epcross.harness.point import Point
from epcross.harness.terms import RowFormat, WeightsBy
from epcross.harness.verification.sums import Sums, differ
from epcross.harness.verification.symptoms import symptom
from epcross.harness.workload.batches import GroupBatch, slot_scale
from epcross.harness.workload.placement import Slots
from epcross.harness.workload.tape import Payload
from epcross.kernels.codecs import bf16_to_float, decode, float_to_bf16
from epcross.kernels.formats import row_size

_CHUNK_VALUES = 2**17  # fp32 values of a few arrays of this length stay in a core's own cache
_U_BF16, _U_FP32 = 2.0**-8, 2.0**-24

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first thing found wrong on a rank. Prints as one sentence."""

    what: str
    rank: int
    wrong: int  # how many of `total` are
    total: int
    unit: str  # of what there are `total`
    source: int | None = None
    token: int | None = None
    column: int | None = None
    got: str = ""
    want: str = ""

    def __str__(self) -> str:
        place = f" (source {self.source}, token {self.token}" if self.source is not None else ""
        place += f", column {self.column}" if self.column is not None else ""
        place += ")" if place else ""
        values = f": got {self.got}" if self.got else ""
        values += f", want {self.want}" if self.want else ""
        return f"rank {self.rank}: {self.what}{place}{values}; {self.wrong} of {self.total} {self.unit}"


class Checker:
    """Checks the outputs of one rank at one point."""

    def __init__(
        self, point: Point, rank: int, slots: Slots, weights_by: WeightsBy, reduction: Reduction | None = None
    ) -> None:
        """Remember what the backend declares.

        Raises:
            ConfigError: a combine format or reduction that no check is known for.
        """
        self.point, self.rank, self.slots, self.weights_by = point, rank, slots, weights_by
        self.reduction = reduction or Reduction()
        problems = []
        if point.combine_format is not RowFormat.BF16:
            problems.append(f"combine_format={point.combine_format} cannot be verified yet; use bf16")
        if self.reduction.accumulate not in ("fp32", "bf16"):
            problems.append(f"reduction.accumulate={self.reduction.accumulate!r} is unknown; declare fp32 or bf16")
        if self.reduction.order not in ("rank_ascending", "unordered"):
            problems.append(f"reduction.order={self.reduction.order!r} is unknown; declare rank_ascending or unordered")
        if self.reduction.exact and self.reduction.order == "unordered":
            problems.append("an unordered reduction cannot be exact; declare exact=False")
        if problems:
            raise ConfigError(problems)
        self._scale = slot_scale(slots)
        self._size = row_size(point.dispatch_format, point.model.hidden)
        self._chunk = max(1, _CHUNK_VALUES // point.model.hidden)

    def expected(self, gb: GroupBatch) -> tuple[Int32, Int32, Int32, Float32]:
        """Source [N], token [N], ids [N, top_k] and weights [N, top_k] this rank must receive, by (source, token)."""
        first = self.rank * self.slots.slots_per_rank
        sources, tokens, ids, weights = [], [], [], []
        for source, chosen in enumerate(gb.ids):
            here = (chosen >= first) & (chosen < first + self.slots.slots_per_rank)
            token = np.flatnonzero(here.any(axis=1)).astype(np.int32)
            sources.append(np.full(len(token), source, np.int32))
            tokens.append(token)
            ids.append(np.where(here[token], chosen[token], np.int32(-1)))
            weights.append(np.where(here[token], gb.weights[source][token], np.float32(0)))
        return np.concatenate(sources), np.concatenate(tokens), np.concatenate(ids), np.concatenate(weights)

    def check_received(self, gb: GroupBatch, received: Received) -> Mismatch | None:
        """Whether this rank holds the right rows, once each, with the right ids, weights and scales."""
        source, token, ids, weights = self.expected(gb)
        if malformed := self._malformed_received(received):
            return self._whole(malformed, "the received arrays")
        stride = max(1, *self.point.tokens)
        want_key = source.astype(np.int64) * stride + token
        outside = (received.source < 0) | (received.source >= self.point.ep_size) | (received.token < 0)
        outside |= received.token >= stride
        got_key = received.source.astype(np.int64) * stride + received.token
        keyed = [("a row that was not sent here", outside | ~np.isin(got_key, want_key))]
        order = np.argsort(got_key, kind="stable")
        again = np.zeros(len(order), np.bool_)
        again[order[1:]] = got_key[order[1:]] == got_key[order[:-1]]
        keyed.append(("a row received twice", again))
        for what, bad in keyed:
            if bad.any():
                n = int(np.argmax(bad))
                return self._row(what, int(received.source[n]), int(received.token[n]), bad, "received rows are such")
        missing = ~np.isin(want_key, got_key)
        if missing.any():
            n = int(np.argmax(missing))
            return self._row("a missing row", int(source[n]), int(token[n]), missing, "expected rows are missing")
        if (found := self._compare(gb, "ids", source, token, received.ids[order], ids)) is None:
            got_bits = np.ascontiguousarray(received.weights[order]).view(np.uint32)
            found = self._compare(gb, "weights", source, token, got_bits, weights.view(np.uint32))
        return found or self._check_rows(gb, received, order, source, token)

    def partials(self, gb: GroupBatch, received: Received) -> BF16Bits:
        """What the experts make of the received rows, [N, hidden] in their order. Only for rows found right."""
        if gb.payload is Payload.ADVERSARIAL:
            here = np.full(len(received.source), self.rank)
            return gb.adversarial_partials(here, received.source, received.token)
        here, scale = received.ids >= 0, self._scale[received.ids]
        if self.weights_by is WeightsBy.COMBINE:
            factor = np.take_along_axis(scale, here.argmax(axis=1)[:, None], axis=1)[:, 0]
        else:
            factor = np.zeros(len(here), np.float32)
            for term in np.where(
                here, received.weights * scale, np.float32(0)
            ).T:  # in the token's order, as the oracle
                factor += term
        out = np.empty((len(factor), self.point.model.hidden), np.uint16)
        for at in self._chunks(len(factor)):
            out[at] = float_to_bf16(self._decode(received.rows[at], received.scales[at]) * factor[at, None])
        return out

    def check_combined(self, gb: GroupBatch, combined: BF16Bits) -> Mismatch | None:
        """Whether this rank's sums are those of its tokens' partials."""
        shape = (self.point.tokens[self.rank], self.point.model.hidden)
        if malformed := _malformed("combined is", combined, shape, np.uint16):
            return self._whole(malformed, "the combined array")
        by_bits = self.reduction.exact or gb.payload is not Payload.RANDOM
        sums = Sums(gb, self.rank, self.slots, self.weights_by, self.reduction)
        wrong_rows, first = 0, None
        for at in self._chunks(shape[0]):
            total, magnitude = sums.of(at)
            want, got = float_to_bf16(total), combined[at]
            if by_bits:
                bad = differ(got, want)
            else:
                values = bf16_to_float(np.ascontiguousarray(got))
                bound = sums.terms.count * (self._unit() + 2 * _U_FP32) * magnitude + _U_BF16 * np.abs(total)
                # the written form is false for NaN, which no bound may let through
                bad = ~(np.abs(values - total) <= bound)
            if bad.any():
                wrong_rows += int(bad.any(axis=1).sum())
                if first is None:
                    n, column = np.argwhere(bad)[0].tolist()
                    first = (at.start + n, column, _bf16_text(int(got[n, column])), _bf16_text(int(want[n, column])))
        if first is None:
            return None
        like = symptom(gb, self.rank, self.slots, self.weights_by, first[0], combined[first[0]])
        return Mismatch(
            what="a wrong combined sum",
            rank=self.rank,
            source=self.rank,
            token=first[0],
            column=first[1],
            got=first[2],
            want=first[3],
            wrong=wrong_rows,
            total=shape[0],
            unit="combined rows are wrong" + like,
        )

    def _unit(self) -> float:
        return _U_BF16 if self.reduction.accumulate == "bf16" else _U_FP32

    def _decode(self, rows: Bytes, scales: Bytes) -> Float32:
        return decode(self.point.dispatch_format, rows, scales, self.point.model.hidden)

    def _chunks(self, count: int) -> list[slice]:
        return [slice(first, min(count, first + self._chunk)) for first in range(0, count, self._chunk)]

    def _check_rows(
        self, gb: GroupBatch, received: Received, order: Int64, source: Int32, token: Int32
    ) -> Mismatch | None:
        for what, got_all, want_of in (("row", received.rows, gb.rows), ("scale row", received.scales, gb.scales)):
            wrong, first = 0, None
            for at in self._chunks(len(order)):
                got, want = got_all[order[at]], want_of(source[at], token[at])
                if np.array_equal(got, want):
                    continue
                bad = (got != want).any(axis=1)
                wrong += int(bad.sum())
                if first is None:
                    first = at.start + int(np.argmax(bad))
            if first is not None:
                got, want = got_all[order[first]], want_of(source[first : first + 1], token[first : first + 1])[0]
                column = int(np.argmax(got != want))
                owner = self._owner(got, want_of, source, token)
                return Mismatch(
                    what=f"wrong bytes in a {what}" + (f", which is that of {owner}" if owner else ""),
                    rank=self.rank,
                    source=int(source[first]),
                    token=int(token[first]),
                    column=column,
                    got=f"0x{got[column]:02x}",
                    want=f"0x{want[column]:02x}",
                    wrong=wrong,
                    total=len(order),
                    unit=f"received {what}s are wrong",
                )
        return None

    def _owner(self, got: Bytes, want_of: Callable[[Int32, Int32], Bytes], source: Int32, token: Int32) -> str:
        """Whose row of those expected here `got` is, as words; empty if nobody's."""
        for at in self._chunks(len(source)):
            same = (want_of(source[at], token[at]) == got).all(axis=1)
            if same.any():
                n = at.start + int(np.argmax(same))
                return f"source {source[n]}, token {token[n]}"
        return ""

    def _compare(
        self,
        gb: GroupBatch,
        what: str,
        source: Int32,
        token: Int32,
        got: NDArray[np.generic],
        want: NDArray[np.generic],
    ) -> Mismatch | None:
        bad = got != want
        if not bad.any():
            return None
        n, column = np.argwhere(bad)[0].tolist()
        shown = [values[n, column] for values in (got, want)]
        if what == "weights":
            shown = [np.uint32(bits).view(np.float32) for bits in shown]
        return Mismatch(
            what=f"wrong {what} of a row",
            rank=self.rank,
            source=int(source[n]),
            token=int(token[n]),
            column=column,
            got=str(shown[0]),
            want=str(shown[1]),
            wrong=int(bad.any(axis=1).sum()),
            total=len(bad),
            unit=f"received rows have wrong {what}",
        )

    def _row(self, what: str, source: int, token: int, bad: NDArray[np.bool_], unit: str) -> Mismatch:
        return Mismatch(
            what=what, rank=self.rank, source=source, token=token, wrong=int(bad.sum()), total=len(bad), unit=unit
        )

    def _whole(self, what: str, unit: str) -> Mismatch:
        return Mismatch(what=what, rank=self.rank, wrong=1, total=1, unit=f"of {unit} is malformed")

    def _malformed_received(self, received: Received) -> str:
        count, top_k = np.size(getattr(received, "source", ())), self.point.model.top_k
        shapes = {
            "source": ((count,), np.int32),
            "token": ((count,), np.int32),
            "ids": ((count, top_k), np.int32),
            "weights": ((count, top_k), np.float32),
            "rows": ((count, self._size.padded_row_bytes), np.uint8),
            "scales": ((count, self._size.padded_scale_bytes), np.uint8),
        }
        found = [
            _malformed(f"received {name} are", getattr(received, name, None), shape, dtype)
            for name, (shape, dtype) in shapes.items()
        ]
        return "; ".join(filter(None, found))


def _malformed(what: str, array: object, shape: tuple[int, ...], dtype: type[np.generic]) -> str:
    """How an array differs from its declared form; empty if it does not. Backends are other people's code."""
    if isinstance(array, np.ndarray) and array.shape == shape and array.dtype == dtype:
        return ""
    got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
    return f"{what} {got}, not {np.dtype(dtype)} {shape}"


def _bf16_text(bits: int) -> str:
    return f"{bf16_to_float(np.array([bits], np.uint16))[0]} (0x{bits:04x})"
