# SPDX-License-Identifier: Apache-2.0
"""Values keep their bytes on the way from recipe, variable and command line into the server's arguments."""

import argparse
import json
import shlex
import string

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aeon_entrypoints import command, variables
from aeon_entrypoints.failure import Refusal
from aeon_entrypoints.recipe import load_recipe
from aeon_entrypoints.resolve import resolve

# What an argument can hold: anything but NUL, and no halves of surrogate pairs.
characters = st.characters(exclude_characters="\0", exclude_categories=("Cs",))
text = st.text(characters, max_size=12) | st.sampled_from(
    ["", " ", "'", '"', "\\", "$HOME", "`id`", "$(id)", "a\nb", "--x", "-1", "=", "{}", "ü→🌳", '{"a": "b"}', "; rm x"]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"x-[a-z]{1,8}", fullmatch=True)


def parsed(argv, flags):
    """As a parser of the server's kind reads it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in flags:
        parser.add_argument(flag, dest=flag)
    return vars(parser.parse_args(argv))


@given(st.dictionaries(names, st.dictionaries(text, json_values) | st.lists(json_values) | text, max_size=4))
def test_flags(flags):
    argv = [part for flag, value in flags.items() for part in command._flag("--" + flag, value)]
    read = parsed(argv, ["--" + flag for flag in flags])
    for flag, value in flags.items():
        found = read["--" + flag]
        assert (found if isinstance(value, str) else json.loads(found)) == value


@given(names, st.booleans())
def test_switches(name, value):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--" + name, dest="x", action=argparse.BooleanOptionalAction)
    assert parser.parse_args(command._flag("--" + name, value)).x is value


@given(st.lists(st.integers(1, 512), min_size=1, max_size=5))
def test_lists_of_words(sizes):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cudagraph-capture-sizes", dest="x", type=int, nargs="+")
    assert parser.parse_args(command._flag("--cudagraph-capture-sizes", sizes)).x == sizes


@pytest.mark.parametrize("value", ["a\0b", {"a": "b"}])
def test_nul_cannot_be_passed_on(value):
    if isinstance(value, dict):
        assert command._flag("--x", value) == ["--x", '{"a":"b"}']
    else:
        with pytest.raises(Refusal, match="NUL"):
            command._flag("--x", value)


@settings(max_examples=60)
@given(st.dictionaries(names, st.dictionaries(text, json_values, min_size=1) | text, max_size=3), st.lists(text))
def test_from_the_recipe_to_the_command(tmp_path_factory, flags, words):
    """YAML, schema, resolution and command building together; arguments after -- come last, untouched."""
    file = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    content = {
        "recipe_version": 1, "name": "round-trip", "description": "made up", "model": "/models/none",
        "defaults": {"device": "cpu"}, "vllm": flags, "modes": {"baseline": {}},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    extra = ["--x", *words]
    resolved = resolve("baseline", load_recipe(file), file, {}, {}, [])
    resolved.extra = extra
    try:
        argv = command.build_argv(resolved)
    except Refusal:  # one of the words is a flag that is the dispatcher's own
        assert any(word.startswith("-") for word in words)
        return
    assert argv[-len(extra) :] == extra
    ours = argv[3 : -len(extra)]
    for flag, value in flags.items():
        found = next(
            (part.partition("=")[2] for part in ours if part.startswith(f"--{flag}=")),
            ours[ours.index("--" + flag) + 1] if "--" + flag in ours else None,
        )
        assert found is not None
        assert (found if isinstance(value, str) else json.loads(found)) == value


@given(st.lists(text, max_size=5))
def test_words_of_the_environment(words):
    environ = {"EXTRA_VLLM_ARGS": shlex.join(words)}
    assert variables.extra_arguments(environ)[0] == words


@given(st.text(string.ascii_letters + " '\"\\", max_size=20))
def test_words_are_split_as_a_shell_would_or_refused(raw):
    try:
        expected = shlex.split(raw)
    except ValueError:
        with pytest.raises(Refusal, match=r"EXTRA_ARGS.*close the quotes"):
            variables.extra_arguments({"EXTRA_ARGS": raw})
    else:
        assert variables.extra_arguments({"EXTRA_ARGS": raw})[0] == expected


def test_the_printed_command_is_the_command(pair, dispatch):
    pair.recipe["vllm"] = {"limit-mm-per-prompt": {"image": 4, "note": 'it\'s "$HOME"\n→'}}
    plan = json.loads(dispatch("ddtree", "--recipe", pair.recipe_file(), "--dry-run", "--", "--x", "a 'b\" c").out)
    words = shlex.split(plan["command"])
    assert words[0] == "env" and words[-len(plan["argv"]) :] == plan["argv"]
    assert dict(word.split("=", 1) for word in words[1 : -len(plan["argv"])]) == plan["env"]
    assert dispatch("ddtree", "--recipe", pair.recipe_file(), "--", "--x", "a 'b\" c").started == plan["argv"]
