"""Messages with payloads between a transport and a driver's handles."""

import dataclasses
import itertools
import threading
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m


class Handles:
  """What the handles of one driver stand for; thread-safe."""

  def __init__(self) -> None:
    self._items: dict[int, Any] = {}
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()

  def add(self, item: Any) -> int:
    with self._lock:
      handle = next(self._numbers)
      self._items[handle] = item
      return handle

  def get(self, handle: int) -> Any:
    with self._lock:
      return self._items[handle]

  def replace(self, handle: int, item: Any) -> None:
    """Put another item behind a handle, unless it was released meanwhile."""
    with self._lock:
      if handle in self._items:
        self._items[handle] = item

  def release(self, handle: int) -> None:
    with self._lock:
      self._items.pop(handle, None)

  def __len__(self) -> int:
    return len(self._items)


def received(
  now: float,
  peer: str,
  message: m.Message,
  payload: Any,
  handles: Handles,
) -> a.Received | None:
  """The event of an arrival; None for a bulk message without its payload."""
  if isinstance(message, m.BULK):
    if payload is None:
      return None
    message = dataclasses.replace(message, payload=handles.add(payload))
  return a.Received(now=now, peer=peer, message=message)


def outgoing(action: a.Send, handles: Handles) -> tuple[m.Message, Any]:
  """The message and payload of a Send; handles do not travel."""
  message = action.message
  if not isinstance(message, m.BULK):
    return message, None
  payload = handles.get(message.payload)
  return dataclasses.replace(message, payload=0), payload
