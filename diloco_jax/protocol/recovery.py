"""What a syncer remembers: the tape, read back after a restart (section 5.9).

`read_tape` turns the lines of all earlier incarnations into one Memory: which
versions of each fragment were made, by whom, along one ancestry, and who was
in the run. Lines of other kinds are for people and are skipped.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from diloco_jax.protocol import messages as m
from diloco_jax.protocol.settings import Settings


class TapeError(ValueError):
  """A tape that no syncer of this run has written."""


class Inclusion(NamedTuple):
  """The last merge of a fragment that included one island."""

  incarnation: int  # of the island
  version: m.Version
  capture: m.CaptureId
  slot: int = -1  # of the round
  step: int = 0  # the island's, at the capture


class Share(NamedTuple):
  """What one island gave to one merge."""

  island: int
  incarnation: int
  token_params: int


class Made(NamedTuple):
  """One version of a fragment, as the tape tells of it."""

  version: m.Version
  digest: str  # of the decoded broadcast
  round: m.RoundId | None = None
  slot: int = -1  # newest slot in it
  made_slot: int = -1  # that this merge took; -1: a start or drain value
  owner: int = -1  # `each`
  shares: tuple[Share, ...] = ()
  included: Mapping[int, Inclusion] = {}

  @property
  def is_merge(self) -> bool:
    """Not a start value, nor one that a restart took back."""
    return self.round is not None


class Membership(NamedTuple):
  """The newest incarnation of one island index."""

  incarnation: int
  nonce: str
  entry: str
  begin: int  # first sample of its lease, in its lane
  first_step: int
  samples_per_step: int
  left: bool = False


class Ended(NamedTuple):
  """The last known books of an incarnation that is over."""

  island: int
  incarnation: int
  step: int
  tokens: int
  trained: int
  lost: int
  lost_steps: int
  first_step: int
  carried: int


class Exported(NamedTuple):
  """The run is over, its parameters are on disk."""

  params_digest: str
  reason: str


class Memory(NamedTuple):
  """All that a new incarnation of the syncer needs of the older ones."""

  incarnation: int = 0  # the largest so far; never used again
  history: tuple[tuple[Made, ...], ...] = ()  # per fragment, oldest first
  members: Mapping[int, Membership] = {}
  ended: tuple[Ended, ...] = ()
  merged: Mapping[tuple[int, int], int] = {}  # token_params, per incarnation
  merges: int = 0
  slots: frozenset[int] = frozenset()  # merged or skipped
  next_slot: int = 0
  own_slots: Mapping[int, int] = {}  # `each`: newest merged slot per island
  steps_done: float = 0.0
  exported: Exported | None = None


def read_tape(settings: Settings, lines: Iterable[Mapping[str, Any]]) -> Memory:
  """The memory that these lines are.

  Args:
    settings: of the run.
    lines: of the syncer's tape, in order; JSON values with their `kind`.

  Raises:
    TapeError: a line does not fit those before it.
  """
  reader = _Reader(settings)
  for number, line in enumerate(lines, 1):
    take = _TAKERS.get(line['kind'])
    if take is None:
      continue
    try:
      take(reader, line)
    except (KeyError, TypeError, ValueError, IndexError) as e:
      raise TapeError(f'line {number}, {line["kind"]}: {e!r}') from e
  return reader.memory()


class _Reader:
  """The memory while it is read."""

  def __init__(self, settings: Settings):
    self.settings = settings
    self.fields: dict[str, Any] = {'incarnation': 0, 'merges': 0}
    self.history: list[list[Made]] = []
    self.members: dict[int, Membership] = {}
    self.ended: dict[tuple[int, int], Ended] = {}
    self.merged: dict[tuple[int, int], int] = {}
    self.slots: set[int] = set()
    self.own_slots: dict[int, int] = {}
    self.next_slot = 0
    self.floor: tuple[m.Version, ...] = ()  # of the newest snapshot

  def memory(self) -> Memory:
    return Memory(
      **self.fields,
      history=tuple(tuple(x) for x in self.history),
      members=self.members,
      ended=tuple(self.ended.values()),
      merged=self.merged,
      slots=frozenset(self.slots),
      next_slot=self.next_slot,
      own_slots=self.own_slots,
    )

  def incarnation(self, line: Mapping[str, Any]) -> None:
    number = int(line['incarnation'])
    if number <= self.fields['incarnation']:
      raise ValueError(f'incarnation {number} is not new')
    self.fields['incarnation'] = number

  def seeded(self, line: Mapping[str, Any]) -> None:
    first = m.Version(int(line['incarnation']), 0)
    digests = line['digests']
    if len(digests) != self.settings.fragments:
      raise ValueError(f'{len(digests)} fragments')
    self.history = [[Made(first, str(digest))] for digest in digests]
    self.floor = (first,) * len(digests)

  def snapshot(self, line: Mapping[str, Any]) -> None:
    versions = tuple(m.Version(*x) for x in line['versions'])
    if len(versions) != len(self.history):
      raise ValueError(f'{len(versions)} fragments')
    self.floor = versions

  def admitted(self, line: Mapping[str, Any]) -> None:
    island = int(line['island'])
    self.members[island] = Membership(
      incarnation=int(line['incarnation']),
      nonce=str(line['nonce']),
      entry=str(line['entry']),
      begin=int(line['begin']),
      first_step=int(line['first_step']),
      samples_per_step=int(line['samples_per_step']),
    )

  def left(self, line: Mapping[str, Any]) -> None:
    member = self.members.get(int(line['island']))
    if member is not None and member.incarnation == line['incarnation']:
      self.members[int(line['island'])] = member._replace(left=True)

  def end(self, line: Mapping[str, Any]) -> None:
    ended = Ended(*(int(line[name]) for name in Ended._fields))
    self.ended[ended.island, ended.incarnation] = ended

  def exported(self, line: Mapping[str, Any]) -> None:
    self.fields['exported'] = Exported(
      str(line['params_digest']), str(line['reason'])
    )

  def skipped(self, line: Mapping[str, Any]) -> None:
    self._slot(int(line['slot']))

  def _slot(self, slot: int) -> None:
    self.slots.add(slot)
    self.next_slot = max(self.next_slot, slot + 1)

  def merge(self, line: Mapping[str, Any]) -> None:
    fragment = int(line['fragment'])
    mine = self.history[fragment]
    version, parent = m.Version(*line['version']), m.Version(*line['parent'])
    if mine[-1].version != parent:
      raise ValueError(f'parent {parent}, the last version is {mine[-1][0]}')
    expected = m.Version(self.fields['incarnation'], parent.merges + 1)
    if version != expected:
      raise ValueError(f'version {version} after {parent}')
    included = dict(mine[-1].included)
    shares = []
    size = self.settings.sizes[fragment]
    for island, incarnation, capture, _, tokens, _, step in line['inputs']:
      included[island] = Inclusion(
        incarnation, version, m.CaptureId(incarnation, capture), line['slot'],
        step,
      )  # fmt: skip
      shares.append(Share(island, incarnation, tokens * size))
    owner, drain = int(line['owner']), bool(line['drain'])
    slot = int(line['slot'])
    mine.append(
      Made(
        version=version,
        digest=str(line['digest']),
        round=m.RoundId(*line['round']),
        slot=max(slot, mine[-1].slot) if owner < 0 else -1,
        made_slot=-1 if drain else slot,
        owner=owner,
        shares=tuple(shares),
        included=included,
      )
    )
    self._trim(fragment)
    self._count(shares, 1)
    self.fields['merges'] += 1
    self.fields['steps_done'] = float(line['steps_done'])
    if not drain and owner < 0:
      self._slot(slot)
    if owner >= 0:
      self.own_slots[owner] = max(self.own_slots.get(owner, -1), slot)

  def _trim(self, fragment: int) -> None:
    """Forget what is old and older than the newest snapshot."""
    mine = self.history[fragment]
    while (
      len(mine) > self.settings.limits.history_max
      and mine[0].version < self.floor[fragment]
    ):
      del mine[0]

  def _count(self, shares: Iterable[Share], sign: int) -> None:
    for share in shares:
      key = share.island, share.incarnation
      self.merged[key] = self.merged.get(key, 0) + sign * share.token_params

  def recovered(self, line: Mapping[str, Any]) -> None:
    """A restart took back these versions; what came after them is lost."""
    memory = taken_back(
      self.memory(),
      int(line['incarnation']),
      [m.Version(*x) for x in line['parents']],
      [str(x) for x in line['digests']],
    )
    self.history = [list(x) for x in memory.history]
    self.merged, self.slots = dict(memory.merged), set(memory.slots)
    self.fields['merges'] = memory.merges


def taken_back(
  memory: Memory,
  incarnation: int,
  parents: Sequence[m.Version],
  digests: Sequence[str],
) -> Memory:
  """The memory after a restart took back these versions.

  Each gets the new incarnation and keeps its count. Merges after it are lost:
  what they held counts as not merged, and their slots are open again.

  Raises:
    ValueError: a version is not in the history.
  """
  merged, slots = dict(memory.merged), set(memory.slots)
  merges = memory.merges
  history = []
  for made, parent, digest in zip(
    memory.history, parents, digests, strict=True
  ):
    lost = after(made, parent)
    for x in lost:
      merges -= x.is_merge
      for share in x.shares:
        merged[share.island, share.incarnation] -= share.token_params
      if x.made_slot >= 0 and x.owner < 0:
        slots.discard(x.made_slot)
    kept = made[: len(made) - len(lost)]
    again = kept[-1]._replace(
      version=m.Version(incarnation, parent.merges),
      digest=digest,
      round=None,
      made_slot=-1,
      shares=(),
    )
    history.append((*kept, again))
  return memory._replace(
    history=tuple(history), merged=merged, slots=frozenset(slots), merges=merges
  )


def after(made: Sequence[Made], version: m.Version) -> list[Made]:
  """The versions made after this one. Raises ValueError: it is not there."""
  for place in range(len(made) - 1, -1, -1):
    if made[place].version == version:
      return list(made[place + 1 :])
  raise ValueError(f'{version} is not on the tape')


_TAKERS = {
  'run_started': _Reader.incarnation,
  'seeded': _Reader.seeded,
  'snapshot': _Reader.snapshot,
  'admitted': _Reader.admitted,
  'left': _Reader.left,
  'ended': _Reader.end,
  'slot_skipped': _Reader.skipped,
  'merge': _Reader.merge,
  'recovered': _Reader.recovered,
  'exported': _Reader.exported,
}
