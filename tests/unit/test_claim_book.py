"""The shipped claims are whole, and a claim that cannot be judged is refused before anything is."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from epcross.harness.claims.book import SHIPPED_CLAIMS, Book, read_book
from epcross.harness.claims.claim import APART, OF_PUBLISHED
from epcross.harness.claims.sources import SHIPPED
from epcross.harness.errors import ConfigError

BOOK = read_book([SHIPPED])
CLAIM: dict[str, Any] = {
    "id": "X01",
    "statement": "Twice as fast.",
    "source": "trtllm_blog18",
    "kind": "ratio",
    "subject": "one_sided",
    "baseline": "deepep",
    "quantity": "speedup",
    "phase": "round_trip",
    "operator": "about",
    "stated": "2",
    "lower": 1.8,
    "upper": 2.2,
    "bounds_from": "10 % around the number",
    "hardware": "any NVLink",
}


def book(folder: Path, *claims: Any, **more: Any) -> Book:
    """The shipped sources, with a page of these claims."""
    page = yaml.safe_load(SHIPPED_CLAIMS.read_text()) | {"claims": list(claims)} | more
    (folder / "claims.yaml").write_text(yaml.safe_dump(page))
    return read_book([SHIPPED], shipped=folder / "claims.yaml")


def test_the_shipped_claims() -> None:
    ids = [claim.id for claim in BOOK.claims]
    assert len(ids) == 26
    assert ids[0] == "P01"
    assert sum(claim.kind in APART for claim in BOOK.claims) == 4
    assert all(claim.bounds_from and claim.stated for claim in BOOK.claims)


@pytest.mark.parametrize(
    ("name", "lower", "upper"),
    [
        ("P01", 1.2, 3.0),
        ("P03", 2.4 * 0.9, 2.4 * 1.1),
        ("P04", 128, None),
        ("P05", None, 256),
        ("P06", 17.4, 47.9),
        ("P07", 16.6, 17.8),
        ("P08", 18.1 / 36.7 * 0.9, 18.1 / 36.7 * 1.1),
        ("P09", 35.0 / 183.3 * 0.9, 35.0 / 183.3 * 1.1),
        ("P10", 103 / 182 * 0.9, 103 / 182 * 1.1),
        ("P16", 35.0 / 18.1 * 0.9, 35.0 / 18.1 * 1.1),
        ("B02", None, 18.9 / 17.6),
        ("B03", None, 32.7 / 31.0),
        ("B04", 3.06 * 0.9, 3.06 * 1.1),
        ("B07", 588.34 / 753.28 * 0.9, 588.34 / 753.28 * 1.1),
        ("D01", 24.5 * 0.85, 24.5 * 1.15),
    ],
)
def test_bounds_follow_from_the_quoted_numbers_by_the_rule(name: str, lower: float | None, upper: float | None) -> None:
    claim = BOOK.claim(name)
    for found, expected in ((claim.lower, lower), (claim.upper, upper)):
        assert found == pytest.approx(expected, rel=0.006) if expected is not None else found is None


def test_what_is_usual_is_filled_in_and_what_is_said_stays() -> None:
    claim = BOOK.claim("B01")
    assert claim.where == {
        "scope": "scale_up", "placement": "contiguous", "token_spread": "even",
        "ep_size": 8, "tokens_per_rank": 2048, "dispatch_format": "bf16",
    }  # fmt: skip
    assert claim.open["regime"] == ("entry", "spans")
    assert claim.open["routing"] == ("uniform", "perfect")
    assert "dispatch_format" not in claim.open
    assert "dispatch_format" not in BOOK.claim("B04").open  # what changes is not open
    for published in (one for one in BOOK.claims if one.quantity in OF_PUBLISHED):
        assert "scope" not in published.where


def test_an_unknown_claim_is_named() -> None:
    with pytest.raises(ConfigError, match="no claim 'P13'"):
        BOOK.claim("P13")


def test_a_good_claim_is_read(tmp_path: Path) -> None:
    (claim,) = book(tmp_path, CLAIM).claims
    assert (claim.id, claim.lower, claim.better) == ("X01", 1.8, "neither")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": "trtllm_blog"}, "no source 'trtllm_blog'; did you mean 'trtllm_blog18'"),
        ({"hardware": "H20O"}, "no system 'H20O'"),
        ({"subject": "onesided"}, "no actor 'onesided'"),
        ({"subject": None}, "subject is None"),
        ({"baseline": ""}, "baseline is missing; quantity speedup needs one"),
        ({"quantity": "latency_us"}, "baseline 'deepep' is of no use with quantity latency_us"),
        ({"quantity": "speed"}, "quantity is 'speed'; did you mean 'speedup'"),
        ({"kind": "nominal"}, "kind nominal and quantity speedup do not go together"),
        ({"phase": "roundtrip"}, "did you mean 'round_trip'"),
        ({"quantity": "share", "baseline": ""}, "phase round_trip is of no use with quantity share"),
        ({"operator": "at most", "lower": None}, None),
        ({"operator": "at most", "better": "lower"}, None),
        ({"operator": "at most"}, "lower is given with operator 'at most', so what lies beyond it would be outside"),
        ({"operator": "at least"}, "upper is given with operator 'at least'"),
        ({"operator": "at least", "better": "lower"}, "leave it out, or say better: higher"),
        ({"operator": "up to", "lower": None}, "lower is missing; operator 'up to' needs it"),
        ({"lower": 3.0}, "lower 3 is above upper 2.2"),
        ({"lower": float("nan")}, "lower is nan, but must be a finite number"),
        ({"upper": float("inf")}, "upper is inf, but must be a finite number"),
        ({"lower": "1.8"}, "lower is '1.8', but must be a number"),
        ({"better": "up"}, "better is 'up'"),
        ({"kind": "absolute"}, "an absolute claim needs the hardware it was made on"),
        ({"where": {"ep": 8}}, "where: unknown factor 'ep'"),
        ({"where": {"ep_size": 8}, "open": {"ep_size": [8]}}, "ep_size is stated (where) and open at once"),
        ({"where": {"ep_size": "8"}}, "where: ep_size is '8', but must be a positive whole number"),
        ({"where": {"ep_size": True}}, "where: ep_size is True"),
        ({"where": {"ep_size": []}}, "where: ep_size names no value"),
        ({"where": {"ep_size": [8, 16, 8]}}, "where: ep_size names 8 twice"),
        ({"open": {"regime": ["steady", "steady"]}}, "open: regime names 'steady' twice"),
        ({"where": {"ep_size": {"from": 64, "to": 8}}}, "must be {from: A, to: B} with whole numbers"),
        ({"where": {"ep_size": {"from": 8, "till": 64}}}, "must be {from: A, to: B}"),
        ({"where": {"regime": {"from": 8}}}, "a range {from, to} is for numbers"),
        ({"open": {"regime": ["stead"]}}, "open: regime is 'stead'; did you mean 'steady'"),
        ({"open": {"routing": [1]}}, "open: routing is 1, but must be text"),
        ({"open": "regime"}, "open is 'regime', but must be a mapping"),
        ({"change": {"factor": "ep_size", "base": 8, "to": [64]}}, "change goes with the quantities change"),
        ({"quantity": "change", "baseline": ""}, "change goes with the quantities change"),
        (
            {"quantity": "change", "baseline": "", "change": {"factor": "ep_size", "base": 8, "to": [8]}},
            "each once and other than `base`",
        ),
        (
            {"quantity": "change", "baseline": "", "change": {"factor": "ep", "base": 8, "to": [8]}},
            "change: unknown factor 'ep'; did you mean 'ep_size'",
        ),
        (
            {"evidence": [{"source": "trtllm_blog18", "system": "x", "hardware": "y"}]},
            "evidence goes with quantity nominal",
        ),
        ({"quantity": "crossover_tokens", "lower": 0.5}, "a crossover lies at 1 token per rank or above"),
        (
            {"quantity": "wire_multiple", "baseline": "", "phase": "layer"},
            "quantity wire_multiple needs a phase whose bytes are counted, not layer",
        ),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"id": 5}, "id is 5, but must be text"),
        ({"id": ""}, "id is '', but must be up to 16 letters, digits"),
        ({"id": "--json"}, "id is '--json'"),
        ({"id": "a b"}, "id is 'a b'"),
        ({"id": "X" * 17}, "id is 'XXXXXXXXXXXXXXXXX'"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(tmp_path: Path, change: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert book(tmp_path, CLAIM | change).claims
        return
    with pytest.raises(ConfigError) as caught:
        book(tmp_path, CLAIM | change)
    assert words in str(caught.value)
    assert "claims.yaml, claim " in str(caught.value)


def test_missing_keys_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        book(tmp_path, {"id": "X01", "statement": "?"})
    assert [p.rpartition(": ")[2] for p in caught.value.problems] == [
        f"{name} is missing" for name in ("source", "kind", "quantity", "operator", "stated", "bounds_from", "hardware")
    ]


def test_problems_of_several_claims_come_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        book(tmp_path, CLAIM | {"subject": "a"}, CLAIM | {"id": "X02", "hardware": "b"}, CLAIM | {"id": "X02"})
    assert len(caught.value.problems) == 3
    assert "claim 'X02' stands twice" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"claims": {"X": 1}}, "claims is dict, but must be a list"),
        ({"claims": None}, "claims is empty, but must be a list"),
        ({"claims": ["X"]}, "claim number 1: is 'X', but must be a mapping"),
        ({"actors": []}, "actors is list, but must be a mapping"),
        ({"actors": {"x": {"reproduces": ["a"]}}}, "actor 'x': says is missing"),
        ({"actors": {"x": {"says": "y", "reproduces": [{"options": {}}]}}}, "backend is missing"),
        ({"systems": {"x": {"products": "B200"}}}, "products is 'B200', but must be a list"),
        ({"usual": {"where": []}}, "where is [], but must be a mapping"),
        ({"claim": []}, "unknown key 'claim'; did you mean 'claims'"),
        (
            {"systems": {"any NVLink": {"products": [], "nominal": {"source": "no", "system": "a", "hardware": "b"}}}},
            "system 'any NVLink': no source 'no'",
        ),
    ],
)
def test_a_page_that_cannot_be_read_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        book(tmp_path, *([] if "claims" in more else [CLAIM]), **more)
    assert words in str(caught.value)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text("claims: []\nactors: {}\nclaims: []\n")
    with pytest.raises(ConfigError, match="the key 'claims' stands twice"):
        read_book([SHIPPED], shipped=tmp_path / "claims.yaml")


@pytest.mark.parametrize(
    ("group", "made", "claim", "words"),
    [
        ("actors", {"says": "y"}, {}, "actor 'mine' names no backend; list those that stand for it"),
        (
            "actors",
            {"says": "y", "replicates": ["a"]},
            {"baseline": "mine"},
            "baseline 'mine' has no backend under `reproduces`",
        ),
        (
            "systems",
            {"products": ["H200", ""]},
            {},
            "system 'mine': product '' must begin and end with a letter or digit",
        ),
        ("systems", {"products": [" "]}, {}, "system 'mine': product ' '"),
    ],
)
def test_what_would_judge_nothing_or_anything_is_refused(
    tmp_path: Path, group: str, made: dict[str, Any], claim: dict[str, Any], words: str
) -> None:
    """Such a claim would be passed over in silence, or an absolute one be judged on any GPU."""
    shipped = yaml.safe_load(SHIPPED_CLAIMS.read_text())[group]
    with pytest.raises(ConfigError) as caught:
        book(tmp_path, CLAIM | claim, **{group: shipped | {"mine": made}})
    assert words in str(caught.value)


@pytest.mark.parametrize("number", ["1_2", "012", "0x12", "0b11", "1:30", "1:30.5", "1_0.5"])
def test_a_number_that_yaml_reads_as_another_is_refused(tmp_path: Path, number: str) -> None:
    page = yaml.safe_dump(yaml.safe_load(SHIPPED_CLAIMS.read_text()) | {"claims": [CLAIM | {"upper": "HERE"}]})
    (tmp_path / "claims.yaml").write_text(page.replace("HERE", number))
    with pytest.raises(ConfigError, match=f"has the number {number}, which YAML reads as another one than it looks"):
        read_book([SHIPPED], shipped=tmp_path / "claims.yaml")


@pytest.mark.parametrize(("number", "value"), [("12", 12), ("2.5e+1", 25), ("12.", 12), ("+12.5", 12.5)])
def test_a_plain_number_is_read(tmp_path: Path, number: str, value: float) -> None:
    page = yaml.safe_dump(yaml.safe_load(SHIPPED_CLAIMS.read_text()) | {"claims": [CLAIM | {"upper": "HERE"}]})
    (tmp_path / "claims.yaml").write_text(page.replace("HERE", number))
    (claim,) = read_book([SHIPPED], shipped=tmp_path / "claims.yaml").claims
    assert claim.upper == value
