"""A run's events as text: a hash of all, and the last ones to read."""

from collections import deque
import hashlib
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.simulation.checking import Observer

LINES = 40


def _told(thing: Any) -> str:
  """An event or action without what every one of them has."""
  if isinstance(thing, a.Received):
    return f'<- {thing.message}'
  if isinstance(thing, a.Send):
    return f'-> {thing.message}'
  return f'{thing}'


class Trace(Observer):
  """An observer. Two runs with one digest are the same, event for event."""

  def __init__(self, lines: int = LINES):
    self._hash = hashlib.sha256()
    self._last: deque[str] = deque(maxlen=lines)

  def on_react(
    self,
    world: Any,
    who: str,
    life: int,
    old: Any,
    event: Any,
    new: Any,
    actions: tuple[a.Action, ...],
  ) -> None:
    del old, new
    at = f'{world.kernel.now:.6f}'
    text = f'{at} {who}.{life} {event!r} {actions!r}\n'
    self._hash.update(text.encode())
    told = [_told(x) for x in actions if not isinstance(x, a.SetTimer)]
    if told or not isinstance(event, a.TimerFired):
      self._last.append(
        '\n      '.join([f'{at:>12} {who}.{life}: {_told(event)}', *told])
      )

  def _say(self, world: Any, who: str, what: str) -> None:
    text = f'{world.kernel.now:.6f} {who} {what}\n'
    self._hash.update(text.encode())
    self._last.append(f'{world.kernel.now:12.6f} {who} {what}')

  def on_crash(self, world: Any, who: str) -> None:
    self._say(world, who, 'dies')

  def on_start(self, world: Any, who: str) -> None:
    self._say(world, who, 'starts')

  @property
  def digest(self) -> str:
    return self._hash.hexdigest()

  @property
  def text(self) -> str:
    return '\n'.join(self._last)
