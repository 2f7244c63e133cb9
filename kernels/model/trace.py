"""The checker's replay of an error, in words."""

import re

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
            lines.append(f"  memory: {_word(run, values[1])} <- {_value(run, values[2])}, stored by rank {values[0]}")
        else:
            lines.append("  " + STEPS[step].format(*values))
    return "\n".join([*lines, "", f"{verdict(replay)}.", ""])


def _word(run: Run, address: int) -> str:
    """Name of a word; the arithmetic of COUNT_AT, FLAG_AT and SLOT_AT."""
    fence = run.protocol == "fence"
    head, slot_words = (2, run.payload + 2) if fence else (1, run.payload + 3)
    pair_words = head + run.tokens * slot_words
    pair, part = divmod(address, pair_words)
    pair, landing_set = (pair, 0) if fence else divmod(pair, 2)
    owner, place = divmod(pair, run.ranks - 1)
    peer = (owner + 1 + place) % run.ranks
    where = f"of rank {peer} at rank {owner}" + ("" if fence else f", set {landing_set}")
    if part < head:
        return (("dispatch flag", "combine flag")[part] if fence else "count") + f" {where}"
    slot, word = divmod(part - head, slot_words)
    rest = ("header", "partial") if fence else ("header", "bitmap", "partial")
    name = f"payload {word}" if word < run.payload else rest[word - run.payload]
    return f"{name} {where}, slot {slot}"


def _value(run: Run, value: int) -> str:
    if run.protocol == "fence":
        return f"value {value}"
    return {255: "armed", 254: "the sentinel's bits, restored"}.get(value, f"value {value}")
