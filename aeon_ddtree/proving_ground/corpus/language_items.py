# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  (sentence templates stay on one line)
"""Generated language work: stories from a grammar, letters, questions on a text, word and sentence exercises."""

from __future__ import annotations

import random
from collections.abc import Callable

from aeon_ddtree.proving_ground.corpus import words as w
from aeon_ddtree.proving_ground.corpus.math_items import Item


def noun_phrase(rng: random.Random) -> str:
    """`the patient weaver`, `an old red kettle`, `Olga's lamp`, … without the leading capital."""
    head = rng.choice(rng.choice((w.ANIMAL, w.THING, w.JOB, w.FOOD)))
    inner = " ".join(
        [
            *rng.sample(w.ADJECTIVE, rng.choice((0, 0, 1, 1, 2))),
            *([rng.choice(w.COLOUR)] if rng.random() < 0.15 else []),
            head,
        ]
    )
    kind = rng.random()
    if kind < 0.6:
        return f"the {inner}"
    if kind < 0.8:
        return f"{rng.choice(w.FIRST)}'s {inner}"
    return f"{'an' if inner[0] in 'aeiou' else 'a'} {inner}"


def clause(rng: random.Random, subject: str) -> str:
    """A past-tense clause."""
    verb = rng.choice(w.VERB)[1]
    tail = rng.choice(
        (
            f"near the {rng.choice(w.PLACE)}",
            f"in {rng.choice(w.CITY)}",
            f"before {rng.choice(w.DAY)}",
            f"because of the {rng.choice(w.WEATHER)}",
            f"with {noun_phrase(rng)}",
            f"for {rng.choice(w.FIRST)}",
            f"at {rng.randint(1, 12)} o'clock",
            "",
            "",
        )
    )
    return f"{subject} {verb} {noun_phrase(rng)} {tail}".rstrip()


def sentence(rng: random.Random, subject: str) -> str:
    """One or two clauses as a sentence."""
    text = clause(rng, subject)
    if rng.random() < 0.4:
        link = rng.choice((", and", ", but", " while", " before", " because", " until", ", so"))
        text += f"{link} {clause(rng, noun_phrase(rng))}"
    if rng.random() < 0.2:
        text = f"{rng.choice(('one morning', 'later', 'that night', 'in ' + rng.choice(w.MONTH), 'once more', 'at last'))}, {text}"
    return text[0].upper() + text[1:] + "."


def story(rng: random.Random) -> Item:
    hero, place = w.name(rng), rng.choice(w.PLACE)
    title = f"The {rng.choice(w.ADJECTIVE)} {rng.choice(w.ANIMAL + w.THING)} of {rng.choice(w.CITY)}"
    body = [
        sentence(rng, rng.choice((hero, hero, "the " + rng.choice(w.JOB), noun_phrase(rng))))
        for _ in range(rng.randint(3, 8))
    ]
    opening = rng.choice(
        (
            f"{title}\n\n{hero} lived by the {place}. ",
            f"Write a short story about {hero} and the {place}.\n\n",
            f"Story: {title}.\n",
            f"It was {rng.choice(w.MONTH)}, and there was {rng.choice(w.WEATHER)} over the {place}. ",
        )
    )
    return opening, " ".join(body) + "\n"


def letter(rng: random.Random) -> Item:
    a, b = w.names(rng, 2)
    body = " ".join(sentence(rng, rng.choice(("I", "we", noun_phrase(rng)))) for _ in range(rng.randint(2, 5)))
    head = f"{rng.choice(('Dear', 'Hello', 'Hi'))} {b},\n\n"
    close = rng.choice(("Yours", "Best wishes", "With thanks", "See you in " + rng.choice(w.CITY), "Kind regards"))
    return f"Letter from {a} to {b}, {rng.randint(1, 28)} {rng.choice(w.MONTH)}\n\n{head}", f"{body}\n\n{close},\n{a}\n"


def comprehension(rng: random.Random) -> Item:
    facts = []
    for person in w.names(rng, rng.randint(2, 4)):
        facts.append(
            (person, rng.choice(w.JOB), rng.choice(w.CITY), rng.choice(w.VERB)[1], noun_phrase(rng), rng.choice(w.DAY))
        )
    text = " ".join(f"{p}, a {j} from {c}, {v} {o} on {d}." for p, j, c, v, o, d in facts)
    p, j, c, v, o, d = rng.choice(facts)
    question, answer = rng.choice(
        (
            (f"Where is {p} from?", f"{p} is from {c}."),
            (f"What is the job of {p}?", f"{p} is a {j}."),
            (f"Who {v} {o}?", f"{p} did, on {d}."),
            (f"What did {p} do on {d}?", f"{p} {v} {o}."),
            ("List the people and their towns.", "; ".join(f"{f[0]}: {f[2]}" for f in facts) + "."),
        )
    )
    return f"Text: {text}\nQuestion: {question}\n", f"Answer: {answer}\n"


def sentence_work(rng: random.Random, sentences: list[str]) -> Item:
    text = rng.choice(sentences) if sentences and rng.random() < 0.7 else sentence(rng, noun_phrase(rng))
    bare = text.rstrip(".")
    parts = bare.split()
    longest = max(parts, key=len)
    task, answer = rng.choice(
        (
            ("Sort the words", " ".join(sorted(parts, key=str.lower))),
            ("Reverse the word order", " ".join(reversed(parts))),
            ("Upper case", text.upper()),
            ("Longest word", f"{longest} ({len(longest)} letters)"),
            ("Number of words", f"{len(parts)}"),
            ("First letters", " ".join(p[0] for p in parts)),
            ("Every second word", " ".join(parts[1::2])),
            ("Split into lines", "\n".join(f"{i}. {p}" for i, p in enumerate(parts, 1))),
            ("Hide the longest word", text.replace(longest, "_" * len(longest))),
            ("Copy", text),
            ("As a title", " ".join(p.capitalize() for p in parts)),
        )
    )
    quote = rng.choice(('"{}"', "{}", "<{}>", "[{}]")).format(text)
    return f"{task}: {quote}\n", f"{answer}\n"


def word_work(rng: random.Random) -> Item:
    word = rng.choice(
        rng.choice((w.THING, w.FOOD, w.ANIMAL, w.ADJECTIVE, w.PLACE, [w.nonce(rng, 2) for _ in range(9)]))
    )
    rows = rng.sample(rng.choice((w.THING, w.FOOD, w.ANIMAL, w.JOB, w.CITY, w.FIRST)), rng.randint(4, 9))
    verb = rng.choice(w.VERB)
    who, thing = rng.choice(w.FIRST), noun_phrase(rng)
    return rng.choice(
        (
            (
                f"Spell {word} and count its letters, as in {rng.choice(w.FIRST)}'s book.\n",
                f"{'-'.join(word)}: {len(word)} letters.\n",
            ),
            (f"Alphabetical order: {', '.join(rows)}\n", f"{', '.join(sorted(rows))}\n"),
            (
                f"Words with more than five letters in: {' '.join(rows)}\n",
                f"{' '.join(r for r in rows if len(r) > 5) or 'none'}\n",
            ),
            (f"Lengths: {' '.join(rows)}\n", f"{', '.join(f'{r} {len(r)}' for r in rows)}\n"),
            (f"Past tense: {who} {verb[2]} {thing}.\n", f"{who} {verb[1]} {thing}.\n"),
            (f"Make a question: {who} {verb[1]} {thing}.\n", f"Did {who} {verb[0]} {thing}?\n"),
            (f"Negate: {who} {verb[1]} {thing}.\n", f"{who} did not {verb[0]} {thing}.\n"),
            (
                f"Passive: {who} {verb[1]} {thing} for {rng.choice(w.FIRST)}.\n",
                f"{thing[0].upper() + thing[1:]} was handled by {who}.\n",
            ),
        )
    )


KINDS: list[Callable[[random.Random], Item]] = [story, story, letter, comprehension, comprehension, word_work]


def item(rng: random.Random, sentences: list[str]) -> Item:
    """One language item; some work on a sentence drawn from `sentences` (the documentation's)."""
    if rng.random() < 0.3:
        return sentence_work(rng, sentences)
    return rng.choice(KINDS)(rng)
