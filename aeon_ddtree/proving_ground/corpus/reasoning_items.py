# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  (sentence templates stay on one line)
"""Generated reasoning: orders, tracked objects, nonsense syllogisms, calendars, moves, rules, truth values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from aeon_ddtree.proving_ground.corpus import words as w
from aeon_ddtree.proving_ground.corpus.math_items import Item


def order(rng: random.Random) -> Item:
    people = w.names(rng, rng.randint(3, 6))
    more, most, least = rng.choice(
        (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"),
         ("heavier", "heaviest", "lightest"), ("richer", "richest", "poorest"))
    )  # fmt: skip
    facts = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(people)]
    shuffled = facts[:]
    rng.shuffle(shuffled)
    end = rng.choice((most, least))
    who = people[0] if end == most else people[-1]
    text = " ".join(shuffled) + rng.choice((f" Who is the {end}?\n", f" Name the {end} of them.\n"))
    return text, f"From {most} to {least}: {', '.join(people)}. The {end} is {who}.\n"


def tracking(rng: random.Random) -> Item:
    people, things = w.names(rng, 3), rng.sample(w.THING, 3)
    holds = dict(zip(people, things, strict=True))
    text = ", ".join(f"{p} has the {t}" for p, t in holds.items()) + ". "
    for _ in range(rng.randint(1, 4)):
        a, b = rng.sample(people, 2)
        holds[a], holds[b] = holds[b], holds[a]
        text += rng.choice((f"{a} and {b} swap. ", f"{a} trades with {b}. ", f"Then {b} exchanges with {a}. "))
    asked = rng.choice(people)
    log = "; ".join(f"{p}: {t}" for p, t in holds.items())
    return text + f"What does {asked} have now?\n", f"At the end {log}. So {asked} has the {holds[asked]}.\n"


def syllogism(rng: random.Random) -> Item:
    chain = [w.nonce(rng, 2) + "s" for _ in range(rng.randint(3, 5))]
    who = w.nonce(rng).capitalize()
    facts = [f"All {a} are {b}." for a, b in itertools.pairwise(chain)]
    yes = rng.random() < 0.6
    asked = chain[-1] if yes else w.nonce(rng, 2) + "s"
    rng.shuffle(facts)
    text = " ".join(facts) + f" {who} is one of the {chain[0]}. Is {who} one of the {asked}?\n"
    proof = ", ".join(f"hence of the {c}" for c in chain[1:])
    if yes:
        return text, f"{who} is one of the {chain[0]}, {proof}. Yes.\n"
    return text, f"{who} is one of the {chain[0]}, {proof}. Nothing is said of {asked}. Unknown.\n"


def calendar(rng: random.Random) -> Item:
    day, n = rng.randrange(7), rng.randint(2, 120)
    back = rng.random() < 0.4
    end = (day - n if back else day + n) % 7
    event = rng.choice(("fair", "meeting", "concert", "exam", "match", "wedding", "market", "launch"))
    text = f"Today is {w.DAY[day]}. The {event} {'was' if back else 'is in'} {n} days{' ago' if back else ''}. Which weekday is that?\n"
    return (
        text,
        f"{n} = {n // 7} * 7 + {n % 7}, so {n % 7} days {'before' if back else 'after'} {w.DAY[day]}: {w.DAY[end]}.\n",
    )


def moves(rng: random.Random) -> Item:
    x = y = 0
    who, steps, trace = rng.choice((w.name(rng), "The robot", f"The {rng.choice(w.ANIMAL)}")), [], []
    for _ in range(rng.randint(3, 6)):
        n, (dx, dy, label) = (
            rng.randint(1, 12),
            rng.choice(((0, 1, "north"), (0, -1, "south"), (1, 0, "east"), (-1, 0, "west"))),
        )
        x, y = x + n * dx, y + n * dy
        steps.append(f"{n} {label}")
        trace.append(f"({x}, {y})")
    return f"{who} starts at (0, 0) and goes {', then '.join(steps)}. Where does it end?\n", f"{' -> '.join(trace)}\n"


def rules(rng: random.Random) -> Item:
    colours, animals = rng.sample(w.COLOUR, 3), rng.sample(w.ANIMAL, 3)
    places = rng.sample(w.PLACE, 3)
    text = "".join(
        f"If the lamp is {c}, the {a} goes to the {p}. " for c, a, p in zip(colours, animals, places, strict=True)
    )
    i = rng.randrange(4)
    if i == 3:
        other = rng.choice([c for c in w.COLOUR if c not in colours])
        return text + f"The lamp is {other}. What follows?\n", f"No rule speaks of {other}, so nothing follows.\n"
    return (
        text + f"The lamp is {colours[i]}. What follows?\n",
        f"The rule for {colours[i]} applies: the {animals[i]} goes to the {places[i]}.\n",
    )


def truth(rng: random.Random) -> Item:
    values = {v: rng.random() < 0.5 for v in rng.sample("pqrstabc", 3)}
    a, b, c = values
    form = rng.choice(("{} and ({} or {})", "not {} or ({} and {})", "({} or {}) and not {}", "{} and not ({} and {})"))
    expression = form.format(a, b, c)
    inner = form.format(*(str(v) for v in values.values()))
    result = eval(inner, {"__builtins__": {}})  # the text is built from the four forms above only
    given = ", ".join(f"{k} = {v}" for k, v in values.items())
    return f"Given {given}, evaluate: {expression}\n", f"{inner} is {result}.\n"


def schedule(rng: random.Random) -> Item:
    people, start = w.names(rng, 3), rng.randint(6, 11) * 60 + rng.choice((0, 10, 15, 20, 30, 45))
    t, lines, facts = start, [], []
    for p in people:
        d = rng.randint(2, 18) * 5
        job = f"{rng.choice(w.VERB)[2]} the {rng.choice(w.THING)}"
        facts.append(f"{p} {job} for {d} minutes.")
        lines.append(f"{p} from {t // 60:02d}:{t % 60:02d} to {(t + d) // 60:02d}:{(t + d) % 60:02d}")
        t += d
    text = f"Work begins at {start // 60:02d}:{start % 60:02d}. " + " Then ".join(facts) + " When is all done?\n"
    return text, "; ".join(lines) + f". All is done at {t // 60:02d}:{t % 60:02d}.\n"


def odd_one_out(rng: random.Random) -> Item:
    pools = {
        "animals": w.ANIMAL,
        "foods": w.FOOD,
        "colours": w.COLOUR,
        "cities": w.CITY,
        "jobs": w.JOB,
        "tools": w.THING,
    }
    main, other = rng.sample(sorted(pools), 2)
    rows = rng.sample(pools[main], rng.randint(3, 6))
    odd = rng.choice([x for x in pools[other] if x not in pools[main]])
    rows.insert(rng.randrange(len(rows) + 1), odd)
    ask = rng.choice(("Which word does not belong: ", "Find the odd one out: ", "Odd one out? "))
    return ask + ", ".join(rows) + "\n", f"{odd}, because the others are {main}.\n"


KINDS: list[Callable[[random.Random], Item]] = [
    order, tracking, syllogism, calendar, moves, rules, truth, schedule, odd_one_out,
]  # fmt: skip


def item(rng: random.Random, sentences: list[str]) -> Item:
    """One reasoning item; `sentences` is unused (the kinds share one signature)."""
    return rng.choice(KINDS)(rng)
