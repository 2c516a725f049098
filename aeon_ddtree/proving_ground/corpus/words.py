# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501, SIM905  (word lists read best as text)
"""Word stock of the generated kinds: closed lists, plus invented names so that the space has no end."""

from __future__ import annotations

import random

FIRST = """Ada Alan Amina Anders Aoife Bela Boris Carla Chen Chidi Clara Dana Diego Dmitri Elif Elena Emil Esra Farid Fatima
Felix Freya Gita Goran Grace Hana Hugo Ibrahim Ines Ingrid Ivan Jana Joao Jonas Julia Kai Karim Keiko Kofi Lars Laila Lena
Leo Lin Lucia Mara Marco Mei Mila Mina Nadia Naomi Nico Nora Olga Omar Oscar Paula Pavel Petra Priya Quinn Rafael Ravi Rosa
Ruth Samir Sara Selma Sven Tara Theo Tomas Uma Vera Viktor Wanda Wei Yara Yusuf Zara Zoe""".split()
CITY = """Oslo Lima Cairo Quito Porto Bergen Dakar Delhi Kyoto Lagos Leeds Malmo Milan Minsk Osaka Paris Perth Prague Riga
Rome Seoul Sofia Split Tunis Turin Vienna Zagreb Accra Basel Bonn Busan Cork Derby Essen Fargo Genoa Ghent Graz Halle Izmir
Kiel Krakow Lille Linz Lyon Nice Omaha Pune Reims Salem Tampa Tartu Ulm Utrecht Vigo York""".split()
ANIMAL = """fox hare owl crow toad newt mole bear wolf deer goat swan duck hen mouse cat dog horse lynx otter seal whale
robin wren badger beaver heron falcon lizard turtle spider beetle moth""".split()
THING = """lamp key map drum rope coin book clock bell boat box brick brush bucket cable candle chair cup desk door engine
flag fork glove hammer hat kettle knife ladder lens mirror nail needle paper pencil pipe plate pump ring ruler saw screw
shelf shoe spoon stone table tent torch towel tray wheel whistle window wire""".split()
FOOD = """apple bean bread butter carrot cheese cherry corn egg fig grape honey leek lemon lentil mango melon oat olive onion
orange pea peach pear pepper plum potato rice salt spinach squash tomato walnut""".split()
COLOUR = "red blue green yellow black white grey brown orange purple silver golden pink amber violet crimson".split()
ADJECTIVE = """old quiet brave small bright heavy narrow gentle clever curious broken distant empty famous frozen hidden
honest hungry lonely lucky modest patient plain proud rapid rough silent simple steady strange tired warm wooden young""".split()
PLACE = """harbour market forest library station valley bridge garden kitchen workshop tower river meadow village cellar
island museum school theatre mountain field canal square orchard mill attic lighthouse bakery""".split()
# base, past, third person
VERB = [
    tuple(v.split("/"))
    for v in """carry/carried/carries find/found/finds paint/painted/paints sell/sold/sells lose/lost/loses
    repair/repaired/repairs borrow/borrowed/borrows hide/hid/hides measure/measured/measures draw/drew/draws
    open/opened/opens close/closed/closes push/pushed/pushes pull/pulled/pulls watch/watched/watches
    wash/washed/washes build/built/builds break/broke/breaks bring/brought/brings buy/bought/buys
    choose/chose/chooses count/counted/counts drop/dropped/drops fix/fixed/fixes give/gave/gives hold/held/holds
    keep/kept/keeps lift/lifted/lifts move/moved/moves need/needed/needs see/saw/sees send/sent/sends
    steal/stole/steals take/took/takes throw/threw/throws want/wanted/wants weigh/weighed/weighs""".split()
]
JOB = """baker carpenter clerk cook doctor driver editor farmer guard judge mason miller nurse painter pilot plumber poet
printer sailor singer smith tailor teacher weaver writer""".split()
DAY = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTH = """January February March April May June July August September October November December""".split()
WEATHER = "rain snow fog wind hail sunshine thunder drizzle frost mist".split()
_ONSET = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w z".split()
_VOWEL = "a e i o u ai ea oo ou".split()
_CODA = ["", "", "l", "n", "r", "s", "m", "k", "nd", "rt", "ck", "x"]


def nonce(rng: random.Random, syllables: int = 0) -> str:
    """An invented lower-case word of 1 … 3 syllables."""
    count = syllables or rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(_ONSET) + rng.choice(_VOWEL) for _ in range(count)) + rng.choice(_CODA)


def name(rng: random.Random) -> str:
    """A first name, sometimes with an invented family name."""
    first = rng.choice(FIRST)
    return f"{first} {nonce(rng).capitalize()}" if rng.random() < 0.25 else first


def names(rng: random.Random, count: int) -> list[str]:
    """`count` different first names."""
    return rng.sample(FIRST, count)


def number(rng: random.Random) -> int:
    """A positive integer whose number of digits varies from one to five, log-uniform."""
    return int(10 ** rng.uniform(0.3, 4.6))
