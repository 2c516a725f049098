# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  (sentence templates stay on one line)
"""Generated JSON: records of many shapes, invented schemas with nesting, extraction from text, edits of records."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from aeon_ddtree.proving_ground.corpus import words as w
from aeon_ddtree.proving_ground.corpus.language_items import noun_phrase, sentence
from aeon_ddtree.proving_ground.corpus.math_items import Item

Record = dict[str, Any]

_KEYS = [
    "id",
    "name",
    "title",
    "owner",
    "city",
    "street",
    "email",
    "phone",
    "date",
    "time",
    "status",
    "level",
    "score",
    "price",
    "weight",
    "size",
    "colour",
    "kind",
    "tags",
    "items",
    "note",
    "comment",
    "url",
    "path",
    "host",
    "port",
    "user",
    "group",
    "role",
    "version",
    "enabled",
    "visible",
    "count",
    "total",
    "rate",
    "limit",
    "offset",
    "unit",
    "lang",
    "code",
    "parent",
    "children",
    "source",
    "target",
    "width",
    "height",
    "depth",
    "start",
    "end",
    "author",
    "editor",
    "message",
    "reason",
    "error",
    "retries",
    "timeout",
]


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1980, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _text(rng: random.Random, sentences: list[str]) -> str:
    return rng.choice(sentences) if sentences and rng.random() < 0.5 else sentence(rng, noun_phrase(rng))


def _scalar(rng: random.Random, sentences: list[str]) -> Any:
    return rng.choice(
        (
            lambda: w.number(rng),
            lambda: round(rng.uniform(-90, 900), rng.randint(1, 4)),
            lambda: rng.random() < 0.5,
            lambda: None,
            lambda: w.name(rng),
            lambda: rng.choice(w.CITY),
            lambda: noun_phrase(rng),
            lambda: _date(rng),
            lambda: f"{w.nonce(rng)}-{rng.randint(0, 9999)}",
            lambda: _text(rng, sentences),
            lambda: f"{rng.getrandbits(32):08x}",
            lambda: f"{w.nonce(rng)}@{w.nonce(rng)}.{rng.choice(('com', 'org', 'net', 'eu'))}",
            lambda: (
                f"/{rng.choice(w.PLACE)}/{w.nonce(rng)}/{rng.choice(w.THING)}.{rng.choice(('txt', 'csv', 'json', 'py', 'log'))}"
            ),
        )
    )()


def invented(rng: random.Random, sentences: list[str], depth: int = 0) -> Record:
    """A record of an invented schema, nested up to three deep."""
    keys = rng.sample(_KEYS, rng.randint(2, 6 - depth))
    if rng.random() < 0.3:
        keys[-1] = f"{rng.choice(w.ADJECTIVE)}_{rng.choice(w.THING)}"
    record: Record = {}
    for key in keys:
        shape = rng.random()
        if shape < 0.14 and depth < 2:
            record[key] = invented(rng, sentences, depth + 1)
        elif shape < 0.24:
            record[key] = [_scalar(rng, []) for _ in range(rng.randint(0, 4))]
        elif shape < 0.30 and depth < 2:
            record[key] = [invented(rng, [], depth + 2) for _ in range(rng.randint(1, 2))]
        else:
            record[key] = _scalar(rng, sentences)
    return record


def person(rng: random.Random, sentences: list[str]) -> Record:
    return {
        "name": w.name(rng),
        "age": rng.randint(18, 90),
        "city": rng.choice(w.CITY),
        "job": rng.choice(w.JOB),
        "note": _text(rng, sentences),
    }


def order(rng: random.Random, sentences: list[str]) -> Record:
    goods = rng.sample(w.FOOD + w.THING, rng.randint(1, 4))
    rows: list[Record] = [
        {"item": g, "quantity": rng.randint(1, 40), "price": round(rng.uniform(0.2, 99), 2)} for g in goods
    ]
    return {
        "order": rng.randint(1000, 99999),
        "customer": w.name(rng),
        "date": _date(rng),
        "lines": rows,
        "total": round(sum(r["quantity"] * r["price"] for r in rows), 2),
    }


def event(rng: random.Random, sentences: list[str]) -> Record:
    return {
        "time": f"{_date(rng)}T{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}Z",
        "level": rng.choice(("debug", "info", "warning", "error")),
        "service": f"{rng.choice(w.PLACE)}-{w.nonce(rng)}",
        "message": _text(rng, sentences),
        "latency_ms": round(rng.expovariate(0.01), 1),
        "request": f"{rng.getrandbits(40):010x}",
    }


def place(rng: random.Random, sentences: list[str]) -> Record:
    return {
        "place": f"{rng.choice(w.ADJECTIVE)} {rng.choice(w.PLACE)}",
        "town": rng.choice(w.CITY),
        "lat": round(rng.uniform(-80, 80), 4),
        "lon": round(rng.uniform(-180, 180), 4),
        "open": {
            d[:3].lower(): f"{rng.randint(6, 11)}-{rng.randint(14, 23)}" for d in rng.sample(w.DAY, rng.randint(1, 4))
        },
        "sells": rng.sample(w.FOOD + w.THING, rng.randint(1, 5)),
    }


SHAPES: list[Callable[[random.Random, list[str]], Record]] = [invented, invented, invented, person, order, event, place]


def _dump(rng: random.Random, value: Any) -> str:
    style = rng.random()
    if style < 0.45:
        return json.dumps(value, indent=2)
    if style < 0.6:
        return json.dumps(value, indent=4)
    return json.dumps(value) if style < 0.9 else json.dumps(value, separators=(",", ":"))


def _record(rng: random.Random, sentences: list[str]) -> Item:
    shape = rng.choice(SHAPES)
    record = shape(rng, sentences)
    ask = rng.choice(
        (
            f"Write a JSON record with the keys {', '.join(record)}.\n",
            f"JSON ({shape.__name__}):\n",
            f"```json {w.nonce(rng)}.json\n",
            f"Record {rng.randint(1, 99999)} as JSON:\n",
            f"Return a JSON object for {w.name(rng)}, keys {list(record)}:\n",
        )
    )
    return ask, _dump(rng, record) + ("\n```\n" if ask.startswith("```") else "\n")


def _rows(rng: random.Random, sentences: list[str]) -> Item:
    shape = rng.choice(SHAPES)
    rows = [shape(rng, sentences) for _ in range(rng.randint(2, 4))]
    head = f"{len(rows)} lines of JSON from {w.nonce(rng)}.jsonl:\n"
    return head, "\n".join(json.dumps(r) for r in rows) + "\n"


def _extract(rng: random.Random, sentences: list[str]) -> Item:
    who, job, city, date = w.name(rng), rng.choice(w.JOB), rng.choice(w.CITY), _date(rng)
    thing, n, cost = rng.choice(w.THING + w.FOOD), rng.randint(1, 500), round(rng.uniform(1, 900), 2)
    text, record = rng.choice(
        (
            (f"On {date} the {job} {who} of {city} ordered {n} {thing}s for {cost} euros.",
             {"date": date, "who": who, "job": job, "city": city, "what": thing, "count": n, "euros": cost}),
            (f"{who} ({job}, {city}) wrote: {_text(rng, sentences)}", {"who": who, "job": job, "city": city}),
            (f"Lost in {city}: {noun_phrase(rng)}. Reward {cost}. Call {who} at {n}-{rng.randint(1000, 9999)}.",
             {"city": city, "reward": cost, "contact": who}),
            (f"{who} moved from {city} to {rng.choice(w.CITY)} on {date} with {n} {thing}s.",
             {"who": who, "from": city, "date": date, "goods": {thing: n}}),
        )
    )  # fmt: skip
    keys = rng.sample(sorted(record), rng.randint(2, len(record)))
    return f"Extract {', '.join(keys)} as JSON.\nText: {text}\n", _dump(rng, {k: record[k] for k in keys}) + "\n"


def _edit(rng: random.Random, sentences: list[str]) -> Item:
    record = rng.choice((person, place, invented))(rng, [])
    key = rng.choice(sorted(record))
    text = json.dumps(record)
    kind = rng.randrange(3)
    if kind == 0:
        return f"Remove the key {key} from {text}\n", json.dumps({k: v for k, v in record.items() if k != key}) + "\n"
    if kind == 1:
        value = _scalar(rng, [])
        return f"Set {key} to {json.dumps(value)} in {text}\n", json.dumps({**record, key: value}) + "\n"
    return f"What is {key} in {text}\n", json.dumps(record[key]) + "\n"


def item(rng: random.Random, sentences: list[str]) -> Item:
    """One JSON item; free-text values are drawn from `sentences` half the time."""
    return rng.choice((_record, _record, _record, _rows, _extract, _extract, _edit))(rng, sentences)
