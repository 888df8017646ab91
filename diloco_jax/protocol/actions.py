"""Events that enter a machine and actions that leave it.

Slow work is an action whose end is another event. Every event carries `now`,
in seconds of the runtime's clock: no machine reads a clock itself.
"""

import dataclasses
from typing import Any, NamedTuple

from diloco_jax.protocol import messages as m

# Events of both machines.


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
  """A message arrived. `peer` names the connection, as the transport does."""

  now: float
  peer: str
  message: m.Message


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
  """The connection is gone. A hint only: membership is by lease."""

  now: float
  peer: str
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PeerFound:
  """Island: the connection to the syncer is there (again)."""

  now: float
  peer: str


@dataclasses.dataclass(frozen=True, slots=True)
class TimerFired:
  """A timer set by SetTimer."""

  now: float
  name: str


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested:
  """Ctrl-C, SIGTERM or a caller asks for a clean stop."""

  now: float
  reason: str


# Events of the syncer.


@dataclasses.dataclass(frozen=True, slots=True)
class Seeded:
  """Θ(0) of every fragment is there."""

  now: float
  digests: tuple[str, ...]  # of the decoded broadcast
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Inspected:
  """A contribution's payload was looked at. reason '' means usable."""

  now: float
  round: m.RoundId
  island: int
  incarnation: int
  reason: str
  norm: float


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
  """The outer step of one round is done."""

  now: float
  round: m.RoundId
  digest_f32: str  # of Θ
  digest: str  # of the decoded broadcast
  handle: int  # the encoded broadcast
  merge_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class TapeWritten:
  """The tape line with this key is durable."""

  now: float
  key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
  """The final parameters are on disk."""

  now: float
  digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class AnchorTaken:
  """An anchor's value was looked at, and is held aside if it is as told."""

  now: float
  fragment: int
  version: m.Version
  ok: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
  """Θ is put together again; as Seeded, for a syncer that came back."""

  now: float
  digests: tuple[str, ...]  # of the decoded broadcast
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotSaved:
  """A snapshot is on disk, or could not be written."""

  now: float
  number: int
  ok: bool
  versions: tuple[m.Version, ...] = ()  # that it holds


# Events of an island.


@dataclasses.dataclass(frozen=True, slots=True)
class StepsFinished:
  """The device has finished all steps up to `step`."""

  now: float
  step: int
  tokens: int
  step_time_s: float
  loss: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
  """Step `step` is dispatched; what happens before the next one?

  May be repeated for one step while the plan says wait.
  """

  now: float
  step: int
  tokens: int  # cumulative


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
  """A capture's Δ is encoded and may be sent. handle: the payload."""

  now: float
  fragment: int
  capture: m.CaptureId
  handle: int
  encode_s: float
  healthy: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
  """A received fragment is decoded, verified and ready to be adopted."""

  now: float
  fragment: int
  version: m.Version
  base: m.Version | None  # anchor that it was prepared against
  capture: m.CaptureId | None  # whose Δ_c is in it
  mode: str  # how it was prepared to be adopted
  ok: bool  # false: the digest is not that of the message


@dataclasses.dataclass(frozen=True, slots=True)
class SeedsReady:
  """The own parameters are encoded, a handle for each fragment."""

  now: float
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AnchorReady:
  """An anchor's value is encoded for the syncer. handle: the payload."""

  now: float
  fragment: int
  version: m.Version
  handle: int


@dataclasses.dataclass(frozen=True, slots=True)
class Donated:
  """The own inner state, of one boundary, is encoded."""

  now: float
  step: int
  digest: str
  handle: int


@dataclasses.dataclass(frozen=True, slots=True)
class DonationTaken:
  """A donated inner state is in place, or is not what it says."""

  now: float
  ok: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointSaved:
  """A checkpoint is committed, or could not be written."""

  now: float
  number: int
  ok: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StateDeclared:
  """The driver is busy with something that is not a step."""

  now: float
  state: str


# Actions of both machines.


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
  """Send a message to a connection; `priority` orders bulk, 0 first."""

  peer: str
  message: m.Message
  priority: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SetTimer:
  """Ask for TimerFired(name) at `at`; a later one replaces it."""

  name: str
  at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
  """A handle is no longer needed."""

  handle: int


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
  """A decision, for people: log line, metrics and tape."""

  kind: str
  fields: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
  """The machine is done; leave the loop."""

  reason: str


# Actions of the syncer.


class MergeInput(NamedTuple):
  """One island's share of a merge."""

  island: int
  weight: float
  handle: int


@dataclasses.dataclass(frozen=True, slots=True)
class TakeSeeds:
  """Θ(0) is what an island sent, by fragment. Ends in Seeded."""

  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Inspect:
  """Check a payload: shapes, dtype, finiteness, norm. Ends in Inspected."""

  round: m.RoundId
  island: int
  incarnation: int
  fragment: int
  handle: int


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
  """Outer step of a fragment, inputs in island-id order. Ends in Merged."""

  round: m.RoundId
  fragment: int
  parent: m.Version
  version: m.Version
  inputs: tuple[MergeInput, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WriteTape:
  """Make a line durable. Ends in TapeWritten(key)."""

  key: str
  fields: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TakeAnchor:
  """Verify an anchor's value and hold it aside. Ends in AnchorTaken."""

  fragment: int
  version: m.Version
  digest: str
  handle: int


START, SNAPSHOT, ANCHOR = 'start', 'snapshot', 'anchor'


class RestoreOrder(NamedTuple):
  """Where one fragment's value comes from after a restart."""

  fragment: int
  source: str  # START (from task and seed), SNAPSHOT, or ANCHOR (held aside)
  version: m.Version
  momentum: bool  # take b from the snapshot; else it starts at zero


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
  """Put Θ and b together again. Ends in Restored."""

  orders: tuple[RestoreOrder, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SaveSnapshot:
  """Write Θ, b and these versions to disk. Ends in SnapshotSaved."""

  number: int
  versions: tuple[m.Version, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Export:
  """Write the final parameters. Ends in Exported."""

  global_step: int


# Actions of an island.


class CaptureOrder(NamedTuple):
  """Copy fragment `fragment` at this boundary, under this id."""

  fragment: int
  capture: m.CaptureId


class AdoptOrder(NamedTuple):
  """Put the staged version of a fragment in place at this boundary."""

  fragment: int
  version: m.Version


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
  """What happens at the boundary after step `step`: adopt, then capture."""

  step: int
  adopt: tuple[AdoptOrder, ...] = ()
  capture: tuple[CaptureOrder, ...] = ()
  stop: bool = False
  wait: bool = False  # ask again: nothing may be dispatched yet
  donate: bool = False  # copy the inner state. Ends in Donated
  save: int = 0  # write checkpoint number `save`. Ends in CheckpointSaved


@dataclasses.dataclass(frozen=True, slots=True)
class Encode:
  """Compute and encode Δ = anchor - capture. Ends in Encoded."""

  fragment: int
  capture: m.CaptureId


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
  """Decode and prepare a received fragment. Ends in Staged.

  mode: overwrite, blend or rebase; capture: whose Δ_c is added back.
  """

  fragment: int
  version: m.Version
  digest: str
  handle: int
  mode: str
  base: m.Version | None
  capture: m.CaptureId | None


@dataclasses.dataclass(frozen=True, slots=True)
class DropCapture:
  """A capture is resolved: forget what was kept of it."""

  fragment: int
  capture: m.CaptureId


@dataclasses.dataclass(frozen=True, slots=True)
class GiveSeeds:
  """Encode the own parameters: they become Θ(0). Ends in SeedsReady."""


@dataclasses.dataclass(frozen=True, slots=True)
class GiveAnchor:
  """Encode the anchor of a fragment, in f32. Ends in AnchorReady."""

  fragment: int
  version: m.Version


@dataclasses.dataclass(frozen=True, slots=True)
class TakeDonation:
  """Check a donated inner state and put it in place. Ends in DonationTaken."""

  digest: str
  handle: int


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
  """Training may start (or go on, after a lapsed lease) from here."""

  start: m.Start


Event = (
  Received | PeerLost | PeerFound | TimerFired | StopRequested | Seeded
  | Inspected | Merged | TapeWritten | Exported | AnchorTaken | Restored
  | SnapshotSaved | StepsFinished | Boundary | Encoded | Staged | SeedsReady
  | StateDeclared | AnchorReady | Donated | DonationTaken | CheckpointSaved
)  # fmt: skip
Action = (
  Send | SetTimer | Release | Note | Stop | Inspect | Merge | WriteTape
  | TakeSeeds | Export | TakeAnchor | Restore | SaveSnapshot | StepPlan
  | Encode | Stage | DropCapture | GiveSeeds | GiveAnchor | TakeDonation
  | Begin
)  # fmt: skip
