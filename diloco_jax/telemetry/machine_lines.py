"""A machine's lines on the tape: where it began, what it was fed, what it said.

The lines follow from the events alone, to the byte: a tape can be made again
from its own events, and a difference is a line that was lost or altered.
"""

from collections.abc import Mapping
from typing import Any

import xxhash

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import island_state
from diloco_jax.protocol import records
from diloco_jax.protocol import syncer_state
from diloco_jax.protocol.settings import Settings

MACHINE = 'machine'  # a machine begins
CLOSED = 'closed'  # its process has ended the tape itself
SYNCER, ISLAND = 'syncer', 'island'
Actions = tuple[a.Action, ...]


def syncer_fields(state: syncer_state.SyncerState) -> dict[str, Any]:
  """How a syncer begins that remembers nothing."""
  return {
    'role': SYNCER,
    'settings': records.to_plain(state.settings),
    'given': {
      'incarnation': state.incarnation,
      'config_json': state.config_json,
      'has_task': state.has_task,
    },
  }


def island_fields(state: island_state.IslandState) -> dict[str, Any]:
  """How an island begins that was not restored."""
  return {
    'role': ISLAND,
    'settings': records.to_plain(state.settings),
    'given': {
      'nonce': state.nonce,
      'role': state.role,
      'island': state.wanted,
      'step': state.step,
      'tokens': state.step_tokens,
      'has_inner_state': state.has_inner_state,
      'seeds_state': state.seeds_state,
      'samples_per_step': state.samples_per_step,
    },
  }


def settings_of(line: Mapping[str, Any]) -> Settings:
  """Raises MalformedError."""
  return records.settings_from_plain(line['settings'])


def chained(before: str, event: a.Event, actions: Actions) -> str:
  """Digest of an event, of all that was decided on it, and of all before."""
  text = records.to_text([event, actions])
  return xxhash.xxh64_hexdigest(before.encode() + text.encode())


def event_fields(
  event: a.Event, actions: Actions, digest: str
) -> dict[str, Any]:
  return {
    'event': records.to_plain(event),
    'actions': [type(x).__name__ for x in actions],
    'digest': digest,
  }


def decisions(actions: Actions) -> list[tuple[str, dict[str, Any]]]:
  """The lines that actions leave, in their order."""
  told = []
  for action in actions:
    if isinstance(action, a.Note):
      told.append((action.kind, dict(action.fields)))
    elif isinstance(action, a.WriteTape):
      told.append((action.key.partition(':')[0], dict(action.fields)))
  return told
