"""The state of the syncer: frozen records, replaced as a whole."""

from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.recovery import Exported
from diloco_jax.protocol.recovery import Inclusion
from diloco_jax.protocol.recovery import Memory
from diloco_jax.protocol.settings import Settings

# Phases of a run.
RECOVERING = 'recovering'  # after a restart: who holds what?
SEEDING = 'seeding'  # Θ(0) is not there yet
OPEN = 'open'
DRAINING = 'draining'  # every live island is asked once more
EXPORTING = 'exporting'
FINISHED = 'finished'

# Standing of an island.
ENTERING = 'entering'  # welcomed; does not hold every fragment yet
READY = 'ready'  # holds every fragment, the run has not started
LIVE = 'live'  # joined, and its lease is valid
LAPSED = 'lapsed'
LEFT = 'left'
QUARANTINED = 'quarantined'

# Standing of a member in a round.
PENDING = 'pending'  # not asked yet: it holds too old a version, or no peer
ASKED = 'asked'
INSPECTING = 'inspecting'
CONTRIBUTED = 'contributed'
DECLINED = 'declined'
REFUSED = 'refused'
GONE = 'gone'
LATE = 'late'  # undecided when the round closed
UNDECIDED = (PENDING, ASKED, INSPECTING)

# Phases of a round.
COLLECTING = 'collecting'
QUEUED = 'queued'  # closed; another merge of this fragment runs
MERGING = 'merging'
TAPING = 'taping'  # merged; its tape line is not durable yet

# Why a round closed.
ALL_IN = 'all_in'
GRACE_OVER = 'grace_over'
QUORUM_TIMEOUT = 'quorum_timeout'
EMPTY = 'empty'

NEVER = float('inf')


class Fragment(NamedTuple):
  """What the syncer knows of one fragment."""

  version: m.Version
  digest: str
  handle: int  # the encoded newest value
  round: m.RoundId | None = None
  slot: int = -1
  included: Mapping[int, Inclusion] = {}
  norms: tuple[float, ...] = ()  # of recent contributions
  declined: Mapping[int, tuple[int, ...]] = {}  # counts without its steps


class Island(NamedTuple):
  """What the syncer knows of one island (id >= 0) or evaluator (id < 0)."""

  id: int
  incarnation: int
  nonce: str
  peer: str  # '' while disconnected
  status: str
  entry: str
  since: float  # of the status
  lease_until: float
  state: str = m.RESTORING
  state_since: float = 0.0
  reported_at: float = -NEVER
  seq: int = -1
  step: int = 0
  tokens: int = 0
  baseline: bool = False  # a first report has set the step to count from
  step_time_s: float = 0.0
  credits: int = 0
  versions: tuple[m.Version, ...] = ()
  sent: Mapping[int, tuple[m.Version, float]] = {}  # broadcasts in flight
  slot: int = -1
  captured_slot: int = -1
  opened_slot: int = -1  # `each`: newest slot of this island with a round
  starts: int = 0  # how often it was told to train
  started_at: float = 0.0  # when it was told last
  participating: bool = False
  offences: int = 0  # refused for bad content, in a row
  trained: int = 0  # token_params, as reported
  lost: int = 0
  lost_steps: int = 0
  merged: int = 0  # token_params in merges
  loss: float | None = None
  admitted: bool = True  # its incarnation is durable
  seeds_state: bool = False
  begin: int = 0  # first sample of its lease, in its lane
  first_step: int = 0  # its cumulative step when it was admitted
  samples_per_step: int = 0
  carried: int = 0  # token_params of its predecessor that it brought along
  healthy: bool = True
  has_inner_state: bool = False
  donors: tuple[int, ...] = ()  # asked for their inner state, in order
  donor_asked_at: float = 0.0

  @property
  def is_evaluator(self) -> bool:
    return self.id < 0


class Member(NamedTuple):
  """One island in one round, frozen at opening."""

  island: int
  incarnation: int
  status: str = PENDING
  asked_at: float = 0.0
  contribution: m.Contribution | None = None
  why: str = ''


class Round(NamedTuple):
  """One attempt to merge one fragment."""

  id: m.RoundId
  fragment: int
  slot: int
  opened_at: float
  timeout_at: float
  quorum: int  # K_r, only ever lowered
  members: tuple[Member, ...]  # by island id
  owner: int = -1  # `each`: the island whose round it is
  drain: bool = False
  phase: str = COLLECTING
  quorum_at: float = -1.0
  grace_s: float = 0.0
  grace_until: float = NEVER
  reason: str = ''
  closed_at: float = -1.0
  version: m.Version | None = None
  digest_f32: str = ''
  digest: str = ''
  handle: int = 0

  @property
  def contributed(self) -> tuple[Member, ...]:
    return tuple(x for x in self.members if x.status == CONTRIBUTED)

  @property
  def undecided(self) -> tuple[Member, ...]:
    return tuple(x for x in self.members if x.status in UNDECIDED)


class Estimates(NamedTuple):
  """Moving averages; None until there is a sample. Seconds."""

  encode_s: float | None = None
  transfer_s: float | None = None
  merge_s: float | None = None
  round_s: float | None = None

  @property
  def sync_s(self) -> float | None:
    """xi_sync = encode + merge + one-way transfer."""
    if self.encode_s is None or self.transfer_s is None:
      return None
    if self.merge_s is None:
      return None
    return self.encode_s + self.transfer_s + self.merge_s


class Fetch(NamedTuple):
  """An anchor's value that was asked for."""

  island: int
  version: m.Version
  since: float
  asked_at: float


class Recovering(NamedTuple):
  """How far the recovery after a restart is."""

  memory: Memory
  snapshot: tuple[tuple[m.Version, str], ...]  # version and digest; () for none
  durable: bool = False  # the incarnation is
  since: float = 0.0
  asked: Mapping[int, float] = {}  # island -> when
  answers: Mapping[int, m.Anchors] = {}
  deciding: bool = False
  fetching: Mapping[int, Fetch] = {}  # by fragment
  taken: Mapping[int, m.Version] = {}  # held aside by the driver
  failed: frozenset[tuple[int, int]] = frozenset()  # (fragment, island)
  orders: tuple[a.RestoreOrder, ...] = ()
  restored: a.Restored | None = None


class SyncerState(NamedTuple):
  """Everything that the syncer's decisions depend on."""

  settings: Settings
  incarnation: int
  config_json: str
  has_task: bool  # it makes Θ(0) itself
  now: float = 0.0
  phase: str = SEEDING
  recovering: Recovering | None = None
  snapshots: int = 0  # numbers given
  snapshot_at: float = -NEVER  # when the newest was begun
  snapshot_merges: int = -1  # merges that it holds
  snapshot_saving: bool = False
  started: bool = False  # the first islands were told to train
  first_ready_at: float = -1.0
  fragments: tuple[Fragment, ...] = ()
  islands: Mapping[int, Island] = {}
  incarnations: Mapping[int, int] = {}  # largest given, per island
  past: tuple[Island, ...] = ()  # ended incarnations
  rounds: Mapping[m.RoundId, Round] = {}
  next_round: int = 0
  next_slot: int = 0  # the next to open for the first time
  retries: tuple[int, ...] = ()  # slots to open again
  slots_done: int = 0  # merged or skipped
  steps_done: float = 0.0  # `each`: sum of c_steps / live islands
  merges: int = 0
  merged_token_params: int = 0
  estimates: Estimates = Estimates()
  refusals: Mapping[str, int] = {}
  closes: Mapping[str, int] = {}
  warned_pace: bool = False
  seeder: int | None = None  # the island that was asked for Θ(0)
  seeds: Mapping[int, int] = {}  # fragment -> handle, sent by an island
  to_drain: tuple[int, ...] = ()  # fragments not yet asked for
  end_reason: str = ''
  ends_at: float = NEVER  # of the drain, then of waiting for leaves
  exported: str = ''  # digest of what is on disk; not said yet
  params_digest: str = ''

  @property
  def global_step(self) -> int:
    """Rounds merged x n, skipped slots included, the drain excluded."""
    if self.settings.mode == 'each':
      return int(self.steps_done)
    return self.slots_done * self.settings.stride

  @property
  def tokens_merged(self) -> int:
    return self.merged_token_params // sum(self.settings.sizes)


def initial(
  settings: Settings,
  *,
  incarnation: int = 1,
  config_json: str = '{}',
  has_task: bool = True,
  memory: Memory | None = None,
  snapshot: tuple[tuple[m.Version, str], ...] | None = None,
) -> SyncerState:
  """The state of a syncer that has not seen any event.

  Args:
    settings: of the run.
    incarnation: larger than any before.
    config_json: what islands are told.
    has_task: it can make Θ(0) itself.
    memory: of earlier incarnations; with a Θ(0) in it the syncer recovers.
    snapshot: version and digest of each fragment on disk.
  """
  state = SyncerState(
    settings=settings,
    incarnation=incarnation,
    config_json=config_json,
    has_task=has_task,
  )
  if memory is None:
    return state
  assert incarnation > memory.incarnation
  known = {x: memory.members[x].incarnation for x in memory.members}
  state = state._replace(incarnations=known)
  if not memory.history:
    return state
  if memory.exported is not None:
    return _at_the_end(state, memory, memory.exported)
  return state._replace(
    phase=RECOVERING,
    recovering=Recovering(memory, snapshot or ()),
    merges=memory.merges,
    next_slot=memory.next_slot,
    slots_done=len(memory.slots),
    steps_done=memory.steps_done,
  )


def _at_the_end(
  state: SyncerState, memory: Memory, exported: Exported
) -> SyncerState:
  """Everything is done; who has not heard of it hears of it now."""
  return state._replace(
    phase=EXPORTING,
    recovering=Recovering(memory, ()),
    exported=exported.params_digest,
    end_reason=exported.reason,
    fragments=tuple(
      Fragment(version=x[-1].version, digest=x[-1].digest, handle=0)
      for x in memory.history
    ),
    merges=memory.merges,
    slots_done=len(memory.slots),
    steps_done=memory.steps_done,
  )
