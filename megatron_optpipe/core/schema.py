"""Reading the contract's JSON strictly: no duplicate keys, no NaN, the schema's shape."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_optpipe.core.errors import OptPipeError

MAX_SHOWN_VALUE = 60
"""Longest value, in characters, that an error message quotes."""


def read_json(path: str | Path, error: type[OptPipeError]) -> Any:
    """Parse a JSON file, refusing what JSON forbids and Python would let pass.

    Raises ``error`` with one line that names the file, for a file that cannot be read, is not
    UTF-8, is not JSON, repeats a key, or holds NaN or an infinity.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise error(f"{path}: key {key!r} appears twice in one object; keep one of them")
            seen[key] = value
        return seen

    def constant(text: str) -> float:
        raise error(f"{path}: {text} is not a JSON number; every number must be finite")

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise error(f"{path}: {_cut(text)} is too large; every number must be finite")
        return value

    def integer(text: str) -> int:
        number(text)  # what is no float cannot be compared with one either
        return int(text)

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(f"{path}: cannot be read ({reason}); give a readable JSON file") from None
    except UnicodeDecodeError as failure:
        raise error(f"{path}: byte {failure.start} is not UTF-8; save the file as UTF-8") from None
    try:
        return json.loads(
            text,
            object_pairs_hook=pairs,
            parse_constant=constant,
            parse_float=number,
            parse_int=integer,
        )
    except json.JSONDecodeError as failure:
        where = f"line {failure.lineno} column {failure.colno}"
        raise error(f"{path}: broken JSON at {where}: {failure.msg}; write the file anew") from None
    except RecursionError:
        raise error(f"{path}: nested too deeply; this is not a file of the contract") from None
    except OptPipeError:
        raise


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    text = resources.files("megatron_optpipe.core.schemas").joinpath(name).read_text()
    return Draft202012Validator(json.loads(text))


def shown(value: Any) -> str:
    """A value as an error message quotes it: JSON, cut to one short line."""
    return _cut(json.dumps(value, ensure_ascii=True, default=repr))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 3] + "..."


def require_schema(document: Any, name: str, error: type[OptPipeError]) -> None:
    """Raise ``error`` with one line (field, value, rule, remedy) if ``document`` has not the shape
    that the schema file ``name`` states."""
    from jsonschema.exceptions import best_match

    failure = best_match(_validator(name).iter_errors(document))
    if failure is None:
        return
    field = failure.json_path.removeprefix("$").removeprefix(".") or "the document"
    rule = _rule_text(failure)
    raise error(f"{field} = {shown(failure.instance)}: {rule}")


def _rule_text(failure: Any) -> str:
    """The broken rule and its remedy, in words, for one jsonschema error."""
    rule, bound = failure.validator, failure.validator_value
    if rule == "additionalProperties":
        known = sorted(failure.schema.get("properties", {}))
        extra = sorted(set(failure.instance) - set(known))
        return f"unknown key {extra[0]!r}; known keys are {', '.join(known)}"
    if rule == "required":
        missing = [key for key in bound if key not in failure.instance]
        return f"key {missing[0]!r} is missing; add it"
    texts = {
        "type": f"must be of type {bound}",
        "const": f"must be {shown(bound)}",
        "enum": f"must be one of {shown(bound)}",
        "minimum": f"must be at least {bound}",
        "exclusiveMinimum": f"must be greater than {bound}",
        "minItems": f"must have at least {bound} entries",
        "maxItems": f"must have at most {bound} entries",
        "pattern": f"must match {bound}",
    }
    return texts.get(rule, f"breaks the rule {rule!r} of the schema") + "; correct the file"


def canonical_number(value: Any) -> Any:
    """A number as canonical JSON writes it: a whole number without a fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
