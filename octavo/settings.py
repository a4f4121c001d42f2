"""Settings as frozen dataclasses: typed overrides from the command line, plain values out to JSON and in from JSON or TOML.

The fields themselves type a value: `1e3` is an int where an int is wanted, `none` is None where None is allowed, and a wrong path
or value raises `ValueError` that lists the closest names or the values that would do. Besides groups (dataclasses) a field may be

- `dict[str, Group]`: groups by names that the user chose, such as `sources.books.weight`;
- `dict[str, Any]`: free arguments, such as `sources.books.filters.language`, whose values are JSON, or else text;
- `tuple[str, ...]`: a list, on the command line separated by commas.

A field whose name is a word of Python, `from_`, is the setting `from`. A group that has it begins from something that decides other
settings; it names those in `DECIDED_BY_FROM`, and setting `from`, which is always done first, makes them None.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import keyword
import math
import types
import typing
from typing import Any, Literal, TypeVar

from octavo.formats import FORMATS, Format
from octavo.recipe import RECIPES, Recipe, get_recipe

C = TypeVar("C")


def override(config: C, assignments: typing.Iterable[str]) -> C:
    """`config` with each `path=value` of `assignments` applied in order, those of a `from` before all others.

    Raises `ValueError` for a path that no field has (with the closest names) and for a value that the field cannot take.
    """
    for assignment in sorted(assignments, key=lambda text: not text.partition("=")[0].strip().endswith(".from")):
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ValueError(f"--set takes path=value, such as optim.lr=3e-4; {assignment!r} is not of that form")
        config = _assign(config, path.strip().split("."), text.strip(), path.strip())
    return config


def _assign(config: Any, names: list[str], text: str, path: str) -> Any:
    name, *rest = names
    kinds = _kinds(type(config))
    if name not in kinds:
        group = path.removesuffix(".".join(names))
        raise ValueError(f"no setting is called {path!r}; {_closest(name, group, list(kinds))}")
    value, kind = getattr(config, _attribute(name)), kinds[name]
    new: Any
    if rest and typing.get_origin(kind) is dict:
        new = _assign_entry(value, typing.get_args(kind)[1], rest, text, path)
    elif rest:
        if not dataclasses.is_dataclass(value) or isinstance(value, Format):
            raise ValueError(f"no setting is called {path!r}: {path.removesuffix('.' + '.'.join(rest))} has no parts")
        new = _assign(value, rest, text, path)
        if isinstance(new, Recipe) and rest != ["name"]:
            # A changed recipe must not go by the name of the one it was.
            new = dataclasses.replace(new, name=f"{new.name},{'.'.join(rest)}={text}")
    else:
        new = _parse(kind, text, path)
    decided = dict.fromkeys(config.DECIDED_BY_FROM) if name == "from" and new is not None else {}
    return dataclasses.replace(config, **decided, **{_attribute(name): new})


def _kinds(group: type) -> dict[str, Any]:
    """The types of a group's settings by their names."""
    hints = typing.get_type_hints(group)
    return {_setting(f.name): hints[f.name] for f in dataclasses.fields(group)}


def _setting(attribute: str) -> str:
    return attribute[:-1] if keyword.iskeyword(attribute[:-1]) else attribute


def _attribute(setting: str) -> str:
    return f"{setting}_" if keyword.iskeyword(setting) else setting


def _assign_entry(entries: dict[str, Any], kind: Any, names: list[str], text: str, path: str) -> dict[str, Any]:
    """`entries` with one changed: a known group's setting, or a free argument."""
    name, *rest = names
    if kind is Any:
        inner = entries.get(name)
        nested = inner if isinstance(inner, dict) else {}
        return {**entries, name: _assign_entry(nested, Any, rest, text, path) if rest else _literal(text)}
    if name not in entries:
        raise ValueError(f"no setting is called {path!r}; {_closest(name, '', list(entries))}")
    if not rest:
        raise ValueError(f"{path} is a group of settings; set one of {', '.join(_kinds(kind))} in it")
    return {**entries, name: _assign(entries[name], rest, text, path)}


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _closest(name: str, prefix: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(prefix + other for other in close) + "?"
    return "there are " + ", ".join(known)


def _parse(kind: Any, text: str, path: str) -> Any:
    """`text` as a value of type `kind`, or `ValueError`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in arguments:
            return None
        return _parse(next(a for a in arguments if a is not type(None)), text, path)
    if origin is Literal:
        return _choose(path, text, {str(a): a for a in arguments})
    if origin is tuple:
        return tuple(_parse(arguments[0], part.strip(), path) for part in text.split(",") if part.strip())
    if kind is Recipe:
        return get_recipe(_choose(path, text, {name: name for name in RECIPES}))
    if kind is Format:
        return _choose(path, text, FORMATS)
    if kind is bool:
        return _choose(path, text.lower(), {"true": True, "false": False, "1": True, "0": False})
    if kind is str:
        return text
    if kind in (int, float):
        try:
            number = float(text) if kind is float or "e" in text.lower() else int(text)
        except ValueError:
            number = float("nan")
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise ValueError(f"{path} must be {'an integer' if kind is int else 'a number'}, not {text!r}")
        return kind(number)
    if origin is dict:
        raise ValueError(f"{path} is a group of named settings; set one of them, such as {path}.NAME=VALUE")
    raise ValueError(f"{path} is a group of settings; set one of {', '.join(_kinds(kind))} in it")


def _choose(path: str, text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"{path} cannot be {text!r}; {_closest(text, '', list(choices))}")
    return choices[text]


def to_dict(config: Any) -> Any:
    """A config as plain JSON values: groups become dictionaries, formats their names, tuples lists."""
    if isinstance(config, Format):
        return config.name
    if dataclasses.is_dataclass(config):
        return {_setting(f.name): to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {name: to_dict(value) for name, value in config.items()}
    if isinstance(config, (tuple, list)):
        return [to_dict(value) for value in config]
    return config


def from_dict(kind: type[C], values: dict[str, Any], path: str = "") -> C:
    """The config of type `kind` that `to_dict` turned into `values`; fields that `values` lacks take their defaults.

    Raises `ValueError` that names the setting, below `path`, if it is unknown or of a wrong type.
    """
    kinds = _kinds(kind)
    for name in values:
        if name not in kinds:
            raise ValueError(f"no setting is called {_join(path, name)!r}; {_closest(name, '', list(kinds))}")
    return kind(
        **{_attribute(name): _from_json(kinds[name], value, _join(path, name)) for name, value in values.items()}
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _from_json(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _from_json(next(a for a in arguments if a is not type(None)), value, path)
    if origin is dict or (dataclasses.is_dataclass(kind) and kind is not Format):
        if not isinstance(value, dict):
            raise ValueError(f"{path} must be a group of settings, not {value!r}")
        if origin is dict:
            return {name: _from_json(arguments[1], entry, _join(path, name)) for name, entry in value.items()}
        return from_dict(kind, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path} must be a list, not {value!r}")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise ValueError(f"{path} must be a list of {len(kinds)}, not {value!r}")
        return tuple(_from_json(kind, entry, path) for kind, entry in zip(kinds, value, strict=True))
    if kind in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (kind is float and isinstance(value, float) and math.isfinite(value))):
            raise ValueError(f"{path} must be {'an integer' if kind is int else 'a number'}, not {value!r}")
        return kind(value)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{path} must be true or false, not {value!r}")
    if kind is not bool and not isinstance(value, str):
        raise ValueError(f"{path} must be text, not {value!r}")
    return value if kind in (bool, str) else _parse(kind, value, path)


def require(ok: bool, path: str, value: object, want: str) -> None:
    """Raises `ValueError`, which says what the setting at `path` is and what it must be, unless `ok`."""
    if not ok:
        raise ValueError(f"{path} is {value}: it must be {want}")
