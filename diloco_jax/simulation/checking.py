"""Watching a world: a failure, a moment, and who is told of what.

A checker is a small class. What it looks at is said by the names of its
methods: `syncer_sends_broadcast(at, message)` is called for every broadcast
that the syncer sends. The verbs are

  sees   an event reaches the machine       island_sees_boundary
  gets   a message reaches the machine      syncer_gets_report
  does   an action leaves the machine       syncer_does_merge
  sends  a message leaves the machine       island_sends_contribution
  notes  a note of this kind leaves it      syncer_notes_round_closed

`syncer_starts(at)` is called before everything of the first event of a new
syncer, and `syncer_ends(at)` after everything of each. The book-keeping
listeners come first, so that the checkers find what the event has changed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m

CRASH, LIVENESS, CORRECTNESS = 127, 128, 129

SYNCER, ISLAND = 'syncer', 'island'


class CheckFailure(AssertionError):  # noqa: N818
  """Something happened that must not. `code` is the process's exit code."""

  def __init__(self, code: int, checker: str, sentence: str):
    super().__init__(f'{checker}: {sentence}')
    self.code = code
    self.checker = checker
    self.sentence = sentence


class Moment:
  """One event of one machine, while it is looked at."""

  __slots__ = ('event', 'life', 'new', 'old', 'who', 'world')

  def __init__(
    self, world: Any, who: str, life: int, old: Any, event: Any, new: Any
  ):
    self.world = world
    self.who = who
    self.life = life
    self.old = old
    self.event = event  # None: the first actions, before any event
    self.new = new

  @property
  def now(self) -> float:
    """By the clock of this machine."""
    return self.new.now


class Checker:
  """Base of all checkers; the first line of its docstring is what it holds."""

  code = CORRECTNESS

  def fail(self, sentence: str) -> None:
    raise CheckFailure(self.code, type(self).__name__, sentence)


_Handler = Callable[[Moment, Any], None]
_Table = dict[Any, tuple[_Handler, ...]]

_EVENTS = {x.__name__: x for x in a.Event.__args__}
_ACTIONS = {x.__name__: x for x in a.Action.__args__}
_THINGS: Mapping[str, Mapping[str, Any] | None] = {
  'sees': _EVENTS,
  'gets': m.MESSAGES,
  'does': _ACTIONS,
  'sends': m.MESSAGES,
  'notes': None,
}


def _class_name(words: str) -> str:
  return ''.join(word.capitalize() for word in words.split('_'))


class _Tables:
  """Who is told of what, for one kind of machine."""

  def __init__(self, role: str, listeners: Iterable[Any]):
    self.sees: _Table = {}
    self.gets: _Table = {}
    self.does: _Table = {}
    self.sends: _Table = {}
    self.notes: _Table = {}
    self.starts: tuple[Callable[[Moment], None], ...] = ()
    self.ends: tuple[Callable[[Moment], None], ...] = ()
    for listener in listeners:
      for name in dir(listener):
        who, _, what = name.partition('_')
        if who == role:
          self._add(what, getattr(listener, name))

  def _add(self, what: str, handler: _Handler) -> None:
    if what in ('starts', 'ends'):
      setattr(self, what, (*getattr(self, what), handler))
      return
    verb, _, words = what.partition('_')
    known = _THINGS[verb]
    key = words if known is None else known[_class_name(words)]
    table = getattr(self, verb)
    table[key] = (*table.get(key, ()), handler)


class Observer:
  """Base of who watches a world; what is not of interest is left out."""

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
    """A machine has reacted; `event` is None before its first one."""

  def on_crash(self, world: Any, who: str) -> None:
    """A process has died."""

  def on_start(self, world: Any, who: str) -> None:
    """A process was started."""


class Watch(Observer):
  """An observer that tells its listeners what they want to know."""

  def __init__(self, listeners: Iterable[Any]):
    self.listeners = tuple(listeners)
    self._syncer = _Tables(SYNCER, self.listeners)
    self._island = _Tables(ISLAND, self.listeners)
    self._life: int | None = None  # of the syncer

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
    tables = self._syncer if who == SYNCER else self._island
    at = Moment(world, who, life, old, event, new)
    if tables is self._syncer and life != self._life:
      self._life = life
      for start in tables.starts:
        start(at)
    kind = type(event)
    if kind is a.Received:
      for tell in tables.gets.get(type(event.message), ()):
        tell(at, event.message)
    for tell in tables.sees.get(kind, ()):
      tell(at, event)
    for action in actions:
      kind = type(action)
      if kind is a.Send:
        for tell in tables.sends.get(type(action.message), ()):
          tell(at, action.message)
      elif kind is a.Note:
        for tell in tables.notes.get(action.kind, ()):
          tell(at, dict(action.fields))
      for tell in tables.does.get(kind, ()):
        tell(at, action)
    for end in tables.ends:
      end(at)

  def on_crash(self, world: Any, who: str) -> None:
    for listener in self.listeners:
      told = getattr(listener, 'crashed', None)
      if told is not None:
        told(world, who)

  def on_start(self, world: Any, who: str) -> None:
    for listener in self.listeners:
      told = getattr(listener, 'started', None)
      if told is not None:
        told(world, who)
