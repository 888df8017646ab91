"""`_replace` of named tuples, several times as fast.

The states have dozens of fields, and are replaced at every event.
"""

from collections.abc import Mapping
import functools
from typing import Any, TypeVar

T = TypeVar('T', bound=tuple[Any, ...])


@functools.cache
def _places(cls: type) -> dict[str, int]:
  fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
  return {name: place for place, name in enumerate(fields)}


def replaced(record: T, fields: Mapping[str, Any]) -> T:
  """A named tuple with some fields changed. Raises KeyError for an unknown."""
  cls = type(record)
  places = _places(cls)
  values = list(record)
  for name, value in fields.items():
    values[places[name]] = value
  return tuple.__new__(cls, values)
