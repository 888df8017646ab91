"""What islands and the syncer say to each other.

Every message is frozen and holds ids, versions, counts and payload *handles*;
never arrays. A handle is a number that only the local driver understands: it
is not sent, the receiving driver puts its own in its place. 0 means none.

Units: `_s` seconds, `steps` inner steps, `tokens` tokens. `token_params` are
tokens times parameters, summed over fragments: exact integers, from which a
reader gets tokens by dividing by the number of parameters.
"""

import dataclasses
from typing import NamedTuple

PROTOCOL_VERSION = 1


class Version(NamedTuple):
  """The version of a fragment, ordered lexicographically."""

  incarnation: int  # of the syncer that made it; never reused
  merges: int  # of this fragment so far


class RoundId(NamedTuple):
  """One attempt to merge one fragment."""

  incarnation: int  # of the syncer
  number: int


class CaptureId(NamedTuple):
  """A copy of one fragment of one island at a step boundary."""

  incarnation: int  # of the island
  number: int


class SampleRange(NamedTuple):
  """Samples begin <= i < end of a lane; lane m of `lanes` owns i % lanes == m."""

  lane: int
  lanes: int
  begin: int
  end: int  # -1: open ended


# What an island says that it is doing. All but `training` are checked by the
# syncer: `waiting` against the slot, the others against a limit of time.
TRAINING = 'training'
WAITING = 'waiting'
COMPILING = 'compiling'
RESTORING = 'restoring'
SAVING = 'saving'
EVALUATING = 'evaluating'
ISLAND_STATES = (
  TRAINING, WAITING, COMPILING, RESTORING, SAVING, EVALUATING,
)  # fmt: skip

ISLAND = 'island'
EVALUATOR = 'evaluator'
ROLES = (ISLAND, EVALUATOR)

# How a newcomer gets its state (section 5.10).
FRESH = 'fresh'  # the run is at its start: parameters from the syncer
OWN_CHECKPOINT = 'own_checkpoint'
PEER_STATE = 'peer_state'
PARAMETERS_ONLY = 'parameters_only'
ENTRIES = (FRESH, OWN_CHECKPOINT, PEER_STATE, PARAMETERS_ONLY)


# Before joining.


@dataclasses.dataclass(frozen=True, slots=True)
class AskConfig:
  """Island -> syncer: what is this run? `given` are its own `run` fields."""

  protocol_version: int
  given: tuple[tuple[str, str], ...] = ()  # (dotted path, JSON value)


@dataclasses.dataclass(frozen=True, slots=True)
class RunConfig:
  """Syncer -> island: the configuration of the run."""

  config_json: str
  config_hash: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
  """Island -> syncer: I want to join. Repeated with one nonce: one joining."""

  protocol_version: int
  role: str
  island: int  # the wanted index; -1: any free one
  nonce: str  # drawn once per process, tells a repeat from a restart
  fingerprint: str  # of the fragment layout
  config_hash: str
  step: int = 0  # cumulative inner steps of a restored checkpoint
  tokens: int = 0
  versions: tuple[Version, ...] = ()  # anchors held (restored or kept)
  digests: tuple[str, ...] = ()  # of those anchors
  has_inner_state: bool = False
  seeds_state: bool = False  # it can give Θ(0), where the syncer has no task
  global_step: int = 0  # that the checkpoint was saved at
  samples_per_step: int = 0  # its batch; 0: the data position is its own affair


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
  """Syncer -> island: you cannot join. Final for this process."""

  reason: str
  detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
  """Syncer -> island: who you are. The newest fragments follow."""

  island: int
  incarnation: int
  syncer_incarnation: int
  entry: str  # one of ENTRIES
  versions: tuple[Version, ...]  # newest of each fragment
  lease_s: float
  report_every_s: float
  seed_wanted: bool = False  # send Θ(0) as Seed messages


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """Syncer -> island: you hold every fragment; train.

  Also sent to re-admit an island whose lease had lapsed. In lock step it voids
  the outstanding captures, and `next_slot` is due `slot_steps` steps later.
  """

  island: int
  incarnation: int
  global_step: int
  rate_index: int  # learning-rate index of a newcomer
  rewarm_steps: int  # > 0: ramp the inner rate, the moments are new
  next_slot: int
  due_step: int  # in the island's own step count; -1: n steps from now
  stop_step: int  # lock step: stop at this inner step; -1: only when told
  samples: SampleRange
  seq: int = 1  # grows with each new one; a repeat changes nothing


# While training.


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
  """Island -> syncer, after finished steps, and at least every report_every."""

  island: int
  incarnation: int
  seq: int
  step: int  # cumulative inner steps that the device has finished
  tokens: int
  step_time_s: float  # mean over the steps since the last report; 0: none
  versions: tuple[Version, ...]  # anchors held
  state: str = TRAINING
  slot: int = -1  # the slot waited for, in state `waiting`
  captured_slot: int = -1  # lock step: the newest slot captured
  loss: float | None = None
  trained_token_params: int = 0
  pending_token_params: int = 0  # trained and in no capture known as merged
  lost_token_params: int = 0  # dropped by overwriting
  lost_steps: int = 0
  rate_index: int = 0
  healthy: bool = True  # false: own loss or parameters are not finite
  has_inner_state: bool = False  # restored, donated or trained
  carried_token_params: int = 0  # of trained: pending in a restored checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
  """Syncer -> island: give fragment p for this round."""

  island: int
  incarnation: int
  round: RoundId
  fragment: int
  slot: int = -1  # lock step: the slot whose capture is meant
  drain: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
  """Island -> syncer: Δ of one capture, encoded."""

  island: int
  incarnation: int
  round: RoundId
  fragment: int
  capture: CaptureId
  base: Version  # of the anchor that Δ is relative to
  c_steps: int
  c_tokens: int
  held_s: float  # from the pull's arrival to sending
  encode_s: float  # the part of held_s that copying and encoding took
  fingerprint: str
  step: int = 0  # the island's cumulative step at the capture
  payload: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Declined:
  """Island -> syncer: no step since my anchor; nothing to give."""

  island: int
  incarnation: int
  round: RoundId
  fragment: int


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast:
  """Syncer -> island: the newest value of a fragment."""

  island: int
  incarnation: int
  syncer_incarnation: int
  fragment: int
  version: Version
  round: RoundId | None  # that made it; None: a start or recovery value
  slot: int  # lock step: the slot merged; -1 otherwise
  digest: str  # of the decoded value
  named: CaptureId | None  # the last capture of this island in it
  global_step: int
  payload: int = 0


# Reasons that say nothing of the contribution itself.
UNJUDGED = ('late', 'round', 'gone')


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
  """Syncer -> island: your contribution was not merged; Θ follows."""

  island: int
  incarnation: int
  round: RoundId
  fragment: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
  """Syncer -> island: this slot is neither open nor to be retried; go on."""

  island: int
  incarnation: int
  slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lapsed:
  """Syncer -> island, lock step: you are not waited for until a new start.

  What has come is adopted at once; the start waits for it.
  """

  island: int
  incarnation: int
  seq: int  # of the newest start; a newer one ends this


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
  """Island -> syncer: I go, politely."""

  island: int
  incarnation: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
  """Syncer -> island: the run is over. `versions` are the final ones."""

  reason: str
  global_step: int
  versions: tuple[Version, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Superseded:
  """Syncer -> island: your incarnation is over; stop."""

  island: int
  incarnation: int


# Seeding, recovery, donation.


@dataclasses.dataclass(frozen=True, slots=True)
class Seed:
  """Island -> syncer: the start value of one fragment."""

  island: int
  incarnation: int
  fragment: int
  fingerprint: str
  payload: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AskAnchors:
  """Syncer -> island, after a restart: which anchors do you hold?"""

  island: int
  incarnation: int
  syncer_incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Anchors:
  """Island -> syncer. Answering fences older syncer incarnations."""

  island: int
  incarnation: int
  syncer_incarnation: int
  versions: tuple[Version, ...]
  digests: tuple[str, ...]
  step: int
  tokens: int
  training: bool = True  # it has been told to start


@dataclasses.dataclass(frozen=True, slots=True)
class AskAnchor:
  """Syncer -> island: send the value of this anchor."""

  island: int
  incarnation: int
  syncer_incarnation: int
  fragment: int
  version: Version


@dataclasses.dataclass(frozen=True, slots=True)
class AnchorValue:
  """Island -> syncer."""

  island: int
  incarnation: int
  syncer_incarnation: int
  fragment: int
  version: Version
  digest: str
  payload: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AskDonation:
  """Syncer -> healthy island: your inner state, for a newcomer."""

  island: int
  incarnation: int
  recipient: int
  recipient_incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Donation:
  """Healthy island -> syncer -> newcomer: inner state at one boundary."""

  island: int  # the donor
  incarnation: int
  recipient: int
  recipient_incarnation: int
  step: int
  rate_index: int
  versions: tuple[Version, ...]
  digest: str
  payload: int = 0


TO_SYNCER = (
  AskConfig, Hello, Report, Contribution, Declined, Leave, Seed, Anchors,
  AnchorValue, Donation,
)  # fmt: skip
TO_ISLAND = (
  RunConfig, Refusal, Welcome, Start, Pull, Broadcast, Refused, Closed,
  Lapsed, Finished, Superseded, AskAnchors, AskAnchor, AskDonation, Donation,
)  # fmt: skip
# Messages that carry a tensor payload travel on the bulk channel.
BULK = (Contribution, Broadcast, Seed, AnchorValue, Donation)
MESSAGES = {m.__name__: m for m in (*TO_SYNCER, *TO_ISLAND)}

Message = (
  AskConfig | RunConfig | Hello | Refusal | Welcome | Start | Report | Pull
  | Contribution | Declined | Broadcast | Refused | Closed | Lapsed | Leave | Finished
  | Superseded | Seed | AskAnchors | Anchors | AskAnchor | AnchorValue
  | AskDonation | Donation
)  # fmt: skip
