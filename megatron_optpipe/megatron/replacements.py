"""The book of what was put in the place of what, so that it can be listed and taken back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Replacements:
    """Sets attributes and remembers the former values.

    A plain object instead of bare ``setattr`` calls for two reasons: a user can print what was
    replaced, and a test can put everything back.
    """

    def __init__(self) -> None:
        self._former: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value`` and remember what stood there (or that nothing did)."""
        # An inherited attribute counts as absent: taking it back means deleting our own again.
        self._former.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def put_item(self, mapping: dict[str, Any], key: str, value: Any) -> None:
        """The same for an entry of a dictionary, such as ``sys.modules``."""
        self._former.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def names(self) -> list[str]:
        """Full names of everything replaced, in order, each once."""
        seen: dict[str, None] = {}
        for owner, name, _ in self._former:
            seen[name if isinstance(owner, dict) else f"{_name_of(owner)}.{name}"] = None
        return list(seen)

    def undo(self) -> None:
        """Put every former value back, the last replaced first."""
        while self._former:
            owner, name, value = self._former.pop()
            if isinstance(owner, dict):
                if value is _ABSENT:
                    owner.pop(name, None)
                else:
                    owner[name] = value
            elif value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _name_of(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(getattr(owner, "__name__", owner))
