"""What can be said of each option: its flag, variable, kind, bounds in words.

Knows: how annotations (`Meta`, `Literal`, unions with None) describe a field.
Does not know: which options there are, or where values come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

ENV_PREFIX = "LOONGD_"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the configuration as the command line and the file show it.

    Args:
        name: the field, and the key of the file.
        kind: `int`, `float`, `str`, `bool` or `list`; what an optional field holds when set.
        default: the field's default; None when the daemon decides.
        help: the field's description.
        choices: the legal words of a Literal, in the order of its declaration.
        expected: what a value must be, in words for an error.
    """

    name: str
    kind: str
    default: Any
    help: str
    choices: tuple[str, ...]
    expected: str

    @property
    def flag(self) -> str:
        """The long flag: `--max-model-len` for `max_model_len`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable: `LOONGD_MAX_MODEL_LEN` for `max_model_len`."""
        return ENV_PREFIX + self.name.upper()


def _unwrap(hint: Any) -> tuple[Any, dict[str, Any]]:
    """The bare type of an annotation (without `| None`), and its bounds and description."""
    bounds: dict[str, Any] = {}
    while True:
        if get_origin(hint) is Annotated:
            hint, *metas = get_args(hint)
            for meta in metas:
                found = {k: getattr(meta, k) for k in ("gt", "ge", "le", "description")}
                bounds.update({k: v for k, v in found.items() if v is not None})
        elif get_origin(hint) in {Union, UnionType}:
            hint = next(arm for arm in get_args(hint) if arm is not NoneType)
        else:
            return hint, bounds


def _in_words(bare: Any, bounds: Mapping[str, Any], choices: tuple[str, ...]) -> str:
    if choices:
        return "expected " + " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
    if bare is bool:
        return "expected true or false"
    if bare is str:
        return "expected a text"
    if get_origin(bare) is list:
        return "expected a list of texts"
    words = "expected a whole number" if bare is int else "expected a number"
    if "ge" in bounds and "le" in bounds:
        return f"{words} from {bounds['ge']} to {bounds['le']}"
    limits = [f"above {bounds['gt']:g}"] if "gt" in bounds else []
    limits += [f"of at least {bounds['ge']:g}"] if "ge" in bounds else []
    limits += [f"at most {bounds['le']:g}"] if "le" in bounds else []
    return " ".join([words, " and ".join(limits)]).strip()


def options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """All fields of a configuration, each with a default and a described annotation."""
    hints = get_type_hints(struct, include_extras=True)
    blank = struct()
    found = {}
    for name in struct.__struct_fields__:
        bare, bounds = _unwrap(hints[name])
        choices = get_args(bare) if get_origin(bare) is Literal else ()
        origin = get_origin(bare)
        found[name] = Option(
            name=name,
            kind="str" if origin is Literal else (origin or bare).__name__,
            default=getattr(blank, name),
            help=bounds["description"],
            choices=choices,
            expected=_in_words(bare, bounds, choices),
        )
    return found
