"""The checker's replay of an error, in words."""

import re
from dataclasses import dataclass

from epcross.kernels.model.runs import Run, Verdict

STEPS = {
    "dispatch": "rank {0} begins the dispatch of round {1}: its stores are under way",
    "received": "rank {0} has seen {2} row(s) of rank {1}",
    "read": "rank {0} reads the rows of round {1}",
    "combine": "rank {0} has read its rows and begins the combine of round {1}",
    "pull": "rank {0} pulls the partials of round {1}",
    "sum": "rank {0} has the partials of round {1}",
    "settle": "rank {0}'s stores to its own words are in memory, its release fence is passed",
}


def verdict(replay: str) -> Verdict:
    """What a replay ends with."""
    if not replay:
        return Verdict.HOLDS
    found = re.search(r"assertion violated \(?(\S*)", replay)
    if found is None:
        return Verdict.STUCK
    if ".address[i_]!=" in found[1]:
        return Verdict.TWICE
    for sign, meaning in (
        ("mem[at_]==", Verdict.LOST),
        ("begun[", Verdict.AHEAD),
        ("buffer[", Verdict.OVERFLOW),
        ("i_<", Verdict.OVERFLOW),
    ):
        if found[1].startswith(sign):
            return meaning
    return Verdict.WRONG


def readable(run: Run, replay: str) -> str:
    """The steps of a replay, one a line, and its end."""
    lines = [f"{run.protocol}, seeded fault: {run.name} ({run.size})", ""]
    for step, numbers in re.findall(r"@(\w+)((?: -?\d+)+)", replay):
        values = [int(number) for number in numbers.split()]
        if step == "arrive":
            kind, name = _word(run, values[1])
            lines.append(f"  memory: {name} <- {_value(run, kind, values[2])}, stored by rank {values[0]}")
        else:
            lines.append("  " + STEPS[step].format(*values))
    return "\n".join([*lines, "", f"{verdict(replay)}.", ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The words of one owner and peer, as the models place them: sets of words and slots, then words of no set."""

    before: tuple[str, ...] = ()  # of each set
    slot: tuple[str, ...]  # behind the payload words
    sets: int
    after: tuple[str, ...] = ()


def _pair(run: Run) -> _Pair:
    tokens = range(run.tokens)
    match run.protocol:
        case "fence":
            return _Pair(before=("dispatch flag", "combine flag"), slot=("header", "partial"), sets=1)
        case "sentinel":
            return _Pair(before=("count",), slot=("header", "bitmap", "partial"), sets=2)
        case "fence_gpu":
            flags = tuple(f"flag of block {block}" for block in tokens)
            return _Pair(before=(*flags, "combine flag"), slot=("header", "partial"), sets=1)
        case _:
            return _Pair(slot=("header", "bitmap"), sets=2, after=tuple(f"return of token {token}" for token in tokens))


def _word(run: Run, address: int) -> tuple[str, str]:
    """Kind of a word, and its full name."""
    pair = _pair(run)
    slot_words = run.payload + len(pair.slot)
    set_words = run.tokens * slot_words + len(pair.before)
    number, part = divmod(address, pair.sets * set_words + len(pair.after))
    owner, place = divmod(number, run.ranks - 1)
    where = f"of rank {(owner + 1 + place) % run.ranks} at rank {owner}"
    if part >= pair.sets * set_words:
        return "return", f"{pair.after[part - pair.sets * set_words]} {where}"
    landing_set, part = divmod(part, set_words)
    if pair.sets > 1:
        where += f", set {landing_set}"
    if part < len(pair.before):
        return "flag", f"{pair.before[part]} {where}"
    slot, word = divmod(part - len(pair.before), slot_words)
    kind = "payload" if word < run.payload else pair.slot[word - run.payload]
    return kind, f"{kind}{f' {word}' if kind == 'payload' else ''} {where}, slot {slot}"


def _value(run: Run, kind: str, value: int) -> str:
    known = {255: "armed", 254: "the sentinel's bits, restored"} if run.protocol.startswith("sentinel") else {}
    if run.protocol.endswith("_gpu"):
        known |= {30 + n: "the escape word" for n in range(run.rounds)} if kind == "payload" and known else {}
        if kind == "header" and value:
            epoch, rest = divmod(value - 1, 6)
            return f"epoch {epoch}, {rest // 2} token(s), {'this one too' if rest % 2 else 'not this one'}"
        if kind == "flag" and value:
            return f"epoch {(value - 1) // 3}, {(value - 1) % 3} flag(s)"
    return known.get(value, f"value {value}")
