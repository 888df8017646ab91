"""Messages and events as plain JSON-able values, and strictly back.

Values from the network or from a file are checked against the annotations of
the class that they claim to be: an unknown field, a missing field or a wrong
type raises MalformedError. Nothing but the classes in `messages.MESSAGES` can
be made.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any

from diloco_jax.protocol import actions
from diloco_jax.protocol import messages
from diloco_jax.protocol.settings import Settings

LENGTH_MAX = 1 << 20  # items in a tuple, characters in a string


class MalformedError(ValueError):
  """A value from outside does not have the shape it claims."""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)


def to_plain(value: Any) -> Any:
  """Dataclasses become {'_': class name, ...}, tuples become lists."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    plain = {'_': type(value).__name__}
    for field in _hints(type(value)):
      plain[field] = to_plain(getattr(value, field))
    return plain
  if isinstance(value, (tuple, list)):
    return [to_plain(item) for item in value]
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise TypeError(f'cannot record a {type(value).__name__}')


def _shallow(value: Any) -> dict[str, Any]:
  """A dataclass as a dict of its fields, for `json.dumps`."""
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    raise TypeError(f'cannot record a {type(value).__name__}')
  fields = {name: getattr(value, name) for name in _hints(type(value))}
  return {'_': type(value).__name__, **fields}


_ENCODER = json.JSONEncoder(
  default=_shallow, separators=(',', ':'), allow_nan=False
)


def to_json(value: Any) -> str:
  """The JSON of `to_plain`, made by the JSON library's own fast walk.

  Raises:
    TypeError: something in it is no message, event, action or plain value.
    ValueError: a number that is not finite.
  """
  return _ENCODER.encode(value)


_TEXT_ENCODER = json.JSONEncoder(default=_shallow, separators=(',', ':'))


def to_text(value: Any) -> str:
  """As `to_json`, also of numbers that are not finite; for digests only."""
  return _TEXT_ENCODER.encode(value)


def _checked(hint: Any, value: Any, where: str) -> Any:
  origin = typing.get_origin(hint)
  if origin in (typing.Union, types.UnionType):
    options = typing.get_args(hint)
    if value is None and type(None) in options:
      return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) > 1:
      return _one_of({x.__name__: x for x in rest}, value, where)
    return _checked(rest[0], value, where)
  if origin is tuple:
    if not isinstance(value, list) or len(value) > LENGTH_MAX:
      raise MalformedError(f'{where}: expected a list')
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
      return tuple(_checked(args[0], item, where) for item in value)
    if len(args) != len(value):
      raise MalformedError(f'{where}: expected {len(args)} items')
    return tuple(
      _checked(arg, item, where) for arg, item in zip(args, value, strict=True)
    )
  if isinstance(hint, type) and issubclass(hint, tuple):
    fields = _hints(hint)
    if not isinstance(value, list) or len(value) != len(fields):
      raise MalformedError(f'{where}: expected a {hint.__name__}')
    return hint(
      *(
        _checked(field, item, f'{where}.{name}')
        for (name, field), item in zip(fields.items(), value, strict=True)
      )
    )
  if dataclasses.is_dataclass(hint) and isinstance(hint, type):
    return _one_of({hint.__name__: hint}, value, where)
  return _checked_scalar(hint, value, where)


def _one_of(classes: Mapping[str, type], plain: Any, where: str) -> Any:
  """The dataclass that a value claims to be, one of these."""
  if not isinstance(plain, dict) or not isinstance(plain.get('_'), str):
    raise MalformedError(f'expected a {where}')
  cls = classes.get(plain['_'])
  if cls is None:
    raise MalformedError(f'unknown {where} {plain["_"][:40]!r}')
  fields = {name: value for name, value in plain.items() if name != '_'}
  hints = _hints(cls)
  if fields.keys() != hints.keys():
    wrong = sorted(fields.keys() ^ hints.keys())
    raise MalformedError(f'{cls.__name__}: fields differ: {wrong[:8]}')
  return cls(
    **{
      name: _checked(hints[name], value, f'{cls.__name__}.{name}')
      for name, value in fields.items()
    }
  )


def _checked_scalar(hint: Any, value: Any, where: str) -> Any:
  if hint is float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise MalformedError(f'{where}: expected a number')
    try:
      number = float(value)
    except OverflowError:
      number = math.inf
    if not math.isfinite(number):
      raise MalformedError(f'{where}: expected a finite number')
    return number
  if hint is int and isinstance(value, bool):
    raise MalformedError(f'{where}: expected an integer')
  if hint not in (int, bool, str) or not isinstance(value, hint):
    name = getattr(hint, '__name__', str(hint))
    raise MalformedError(f'{where}: expected {name}')
  if hint is int and abs(value) > 1 << 62:
    raise MalformedError(f'{where}: integer out of range')
  if hint is str and len(value) > LENGTH_MAX:
    raise MalformedError(f'{where}: string too long')
  return value


def message_from_plain(plain: Any) -> messages.Message:
  """The message that `to_plain` was given. Raises MalformedError."""
  message: messages.Message = _one_of(messages.MESSAGES, plain, 'message')
  return message


_EVENTS = {x.__name__: x for x in typing.get_args(actions.Event)}


def event_from_plain(plain: Any) -> actions.Event:
  """The event that `to_plain` was given. Raises MalformedError."""
  event: actions.Event = _one_of(_EVENTS, plain, 'machine event')
  return event


def settings_from_plain(plain: Any) -> Settings:
  """The settings that `to_plain` was given. Raises MalformedError."""
  settings: Settings = _one_of({'Settings': Settings}, plain, 'settings record')
  return settings
