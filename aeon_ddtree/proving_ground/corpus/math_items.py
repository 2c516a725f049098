# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  (sentence templates stay on one line)
"""Generated arithmetic. An item is `(question, answer)`; their concatenation is the training text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

from aeon_ddtree.proving_ground.corpus import words as w

Item = tuple[str, str]


def _ask(rng: random.Random, expression: str) -> str:
    return rng.choice(
        (
            f"What is {expression}? ",
            f"Compute {expression}.\nAnswer: ",
            f"{expression} = ",
            f"Q: {expression}\nA: ",
            f"Find the value of {expression}: ",
            f">>> {expression}\n",
            f"Work out {expression} step by step.\n",
        )
    )


def addition(rng: random.Random) -> Item:
    terms = [w.number(rng) for _ in range(rng.choice((2, 2, 3, 4)))]
    question = _ask(rng, " + ".join(map(str, terms)))
    if not question.endswith("step.\n"):
        return question, f"{sum(terms)}\n"
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total} + {term} = {total + term}")
        total += term
    return question, "\n".join(steps) + f"\nSo the sum is {total}.\n"


def mixed(rng: random.Random) -> Item:
    a, b, c = w.number(rng), rng.randint(2, 99), rng.randint(2, 999)
    form = rng.randrange(5)
    expression, steps, value = (
        (f"{a} * {b} - {c}", [f"{a} * {b} = {a * b}", f"{a * b} - {c} = {a * b - c}"], a * b - c),
        (f"({a} + {c}) * {b}", [f"{a} + {c} = {a + c}", f"{a + c} * {b} = {(a + c) * b}"], (a + c) * b),
        (f"{a} // {b} + {c}", [f"{a} // {b} = {a // b}", f"{a // b} + {c} = {a // b + c}"], a // b + c),
        (f"{a} % {b}", [f"{b} * {a // b} = {b * (a // b)}", f"{a} - {b * (a // b)} = {a % b}"], a % b),
        (f"{a} - {b} * {c}", [f"{b} * {c} = {b * c}", f"{a} - {b * c} = {a - b * c}"], a - b * c),
    )[form]
    question = _ask(rng, expression)
    if question.endswith("step.\n"):
        return question, "\n".join(steps) + f"\nAnswer: {value}\n"
    return question, f"{value}\n"


def long_multiplication(rng: random.Random) -> Item:
    a, b = rng.randint(12, 9999), rng.randint(12, 999)
    question = rng.choice(
        (f"Multiply {a} by {b}.\n", f"Long multiplication: {a} x {b}\n", f"How much is {a} times {b}?\n")
    )
    lines, parts = [], []
    for power, digit in enumerate(reversed(str(b))):
        part = a * int(digit) * 10**power
        parts.append(part)
        lines.append(f"{a} x {int(digit) * 10**power} = {part}")
    return question, "\n".join(lines) + f"\n{' + '.join(map(str, parts))} = {a * b}\n"


def equation(rng: random.Random) -> Item:
    x, a, b = rng.randint(-40, 60), rng.randint(2, 19), rng.randint(-90, 90)
    v = rng.choice("xyznt")
    sign = f"+ {b}" if b >= 0 else f"- {-b}"
    question = (
        rng.choice(("Solve", "Solve for " + v + ":", "Equation:", "Find " + v + " when"))
        + f" {a}{v} {sign} = {a * x + b}.\n"
    )
    back = f"Subtract {b}" if b >= 0 else f"Add {-b}"
    return question, f"{back}: {a}{v} = {a * x}. Divide by {a}: {v} = {x}.\nCheck: {a} * {x} = {a * x}.\n"


def gcd(rng: random.Random) -> Item:
    k = rng.randint(1, 40)
    a, b = k * rng.randint(2, 60), k * rng.randint(2, 60)
    question = rng.choice(
        (f"gcd({a}, {b})\n", f"Find the greatest common divisor of {a} and {b}.\n", f"Euclid on {a} and {b}:\n")
    )
    lines, x, y = [], a, b
    while y:
        lines.append(f"{x} = {x // y} * {y} + {x % y}")
        x, y = y, x % y
    return question, "\n".join(lines) + f"\nThe gcd is {x}, the lcm is {a * b // x}.\n"


def fraction(rng: random.Random) -> Item:
    a, b = Fraction(rng.randint(1, 20), rng.randint(2, 20)), Fraction(rng.randint(1, 20), rng.randint(2, 20))
    op = rng.choice("+-*/")
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op]
    return _ask(rng, f"({a}) {op} ({b})").replace(" step by step", ""), f"{value} (about {float(value):.4f})\n"


def sequence(rng: random.Random) -> Item:
    start, step, kind = rng.randint(-50, 300), rng.randint(2, 90), rng.randrange(4)
    rows = [
        [start + i * step for i in range(10)],
        [start + i * i for i in range(10)],
        [start + i * (i + step) // 2 for i in range(10)],
        [max(1, abs(start) % 9) * 2**i + step for i in range(10)],
    ][kind]
    question = rng.choice(("Continue the sequence: ", "Next numbers after ", "Pattern: ", "What comes next in "))
    rule = (f"add {step} each time", "the gaps grow by 2", "the gaps grow slowly", "the gaps double")[kind]
    return question + ", ".join(map(str, rows[:6])) + "\n", ", ".join(map(str, rows[6:])) + f" ({rule})\n"


def story(rng: random.Random) -> Item:
    (a, b), item, price, n = w.names(rng, 2), rng.choice(w.FOOD + w.THING), rng.randint(2, 95), rng.randint(3, 48)
    share, paid = rng.randint(2, n - 1), 0
    paid = price * n + rng.randint(1, 60)
    return rng.choice(
        (
            (
                f"{a} buys {n} {item}s at {price} cents each and pays with {paid} cents. How much change is returned?\n",
                f"The cost is {n} * {price} = {n * price} cents, so the change is {paid} - {n * price} = {paid - n * price} cents.\n",
            ),
            (
                f"{a} has {n} {item}s. {b} takes {share} of them, then {a} finds {price} more. How many {item}s has {a} now?\n",
                f"{n} - {share} = {n - share}, and {n - share} + {price} = {n - share + price}. {a} has {n - share + price} {item}s.\n",
            ),
            (
                f"A {rng.choice(w.JOB)} packs {n} boxes of {price} {item}s and gives away {share} boxes. How many {item}s remain?\n",
                f"{n} - {share} = {n - share} boxes remain, which is {n - share} * {price} = {(n - share) * price} {item}s.\n",
            ),
            (
                f"It is {price * 7} km from {rng.choice(w.CITY)} to {rng.choice(w.CITY)}. {a} drives {share + 20} km an hour. How long is the trip?\n",
                f"{price * 7} / {share + 20} = {price * 7 / (share + 20):.2f} hours.\n",
            ),
        )
    )


def statistics(rng: random.Random) -> Item:
    rows = [rng.randint(1, 99) for _ in range(rng.randint(4, 8))]
    s = sorted(rows)
    question = rng.choice(("Describe the data ", "Mean, median and range of ", "Summarise these readings: "))
    median = s[len(s) // 2] if len(s) % 2 else (s[len(s) // 2 - 1] + s[len(s) // 2]) / 2
    return question + f"{rows}\n", (
        f"Sorted: {s}\nSum {sum(rows)}, count {len(rows)}, mean {sum(rows) / len(rows):.2f}, "
        f"median {median}, range {s[-1] - s[0]}.\n"
    )


def base(rng: random.Random) -> Item:
    n, percent = w.number(rng), rng.choice((5, 10, 15, 20, 25, 40, 75))
    return rng.choice(
        (
            (f"Write {n} in binary.\n", f"{n:b}\n"),
            (f"Write {n} in hexadecimal.\n", f"0x{n:x}\n"),
            (f"Convert 0x{n:x} to decimal.\n", f"{n}\n"),
            (f"Factor {n}.\n", f"{n} = {' * '.join(map(str, _factors(n)))}\n"),
            (f"What is the square root of {n}, to three places?\n", f"{math.sqrt(n):.3f}\n"),
            (f"What is {percent}% of {n * 20}?\n", f"{n * 20} * {percent} / 100 = {n * percent / 5:g}\n"),
        )
    )


def _factors(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p = p + 1 if p * p <= n else max(n, 2)
    return found or [1]


KINDS: list[Callable[[random.Random], Item]] = [
    addition, mixed, mixed, long_multiplication, equation, gcd, fraction, sequence, story, story, statistics, base,
]  # fmt: skip


def item(rng: random.Random, sentences: list[str]) -> Item:
    """One arithmetic item; `sentences` is unused (the kinds share one signature)."""
    return rng.choice(KINDS)(rng)
