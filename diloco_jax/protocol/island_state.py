"""The state of an island's machine: frozen records."""

from collections.abc import Mapping
from typing import NamedTuple

from diloco_jax.protocol import messages as m
from diloco_jax.protocol.settings import Settings

# Phases.
CALLING = 'calling'  # hello sent, no welcome yet
JOINING = 'joining'  # welcomed, collecting every fragment
TRAINING = 'training'
STOPPED = 'stopped'


class Capture(NamedTuple):
  """What is kept of one capture until it is resolved."""

  id: m.CaptureId
  round: m.RoundId | None  # None: lock step, not pulled yet
  slot: int
  due: int  # lock step: the step of the capture
  c_steps: int
  c_tokens: int
  base: m.Version
  pulled_at: float
  handle: int = 0  # the encoded payload; 0 until it is there
  encode_s: float = 0.0
  detached: bool = False  # overwritten since: its steps left the counters
  closed: bool = False  # lock step: its slot is not waited for any more


class Incoming(NamedTuple):
  """The newest received value of a fragment, not adopted yet."""

  version: m.Version
  round: m.RoundId | None
  slot: int
  digest: str
  named: m.CaptureId | None
  handle: int
  staged: bool = False
  mode: str = ''  # how it is prepared to be adopted
  base: m.Version | None = None  # the anchor it was prepared against
  capture: m.CaptureId | None = None  # whose Δ_c is in it


class Held(NamedTuple):
  """One fragment as this island holds it.

  Counters are kept as offsets: c_steps = step - step0, so that a step costs
  nothing per fragment.
  """

  anchor: m.Version | None = None
  digest: str = ''
  step0: int = 0
  tokens0: int = 0
  capture: Capture | None = None
  incoming: Incoming | None = None
  pull: m.Pull | None = None
  pull_at: float = 0.0


class IslandState(NamedTuple):
  """Everything that an island's decisions depend on."""

  settings: Settings
  role: str
  wanted: int  # index asked for, -1: any
  nonce: str
  has_inner_state: bool
  seeds_state: bool
  held: tuple[Held, ...]
  now: float = 0.0
  phase: str = CALLING
  peer: str = ''
  island: int = -1
  incarnation: int = 0
  syncer_incarnation: int = 0
  lease_s: float = 0.0
  report_every_s: float = 1.0
  state: str = m.RESTORING  # declared
  seq: int = 0
  reported_at: float = 0.0
  boundary: int = 0  # steps dispatched
  tokens: int = 0  # of dispatched steps
  step: int = 0  # steps finished by the device
  step_tokens: int = 0
  step_time_s: float = 0.0
  loss: float | None = None
  healthy: bool = True
  captures: int = 0  # numbers given
  next_slot: int = 0
  due: int = 0  # step of the next slot's capture
  captured_slot: int = -1
  waiting_slot: int = -1  # lock step: what the last boundary waited for
  stop_step: int = -1
  draining: bool = False  # the syncer asks for the last time
  global_step: int = 0  # the newest heard of
  finished: bool = False
  final: tuple[m.Version, ...] = ()  # evaluator: leave when these are held
  stop_reason: str = ''
  starts: int = 0  # number of the newest start
  lapsed: bool = False  # lock step: nobody waits for it until the next start
  tokens_before: int = 0  # trained by older incarnations
  lost: int = 0  # token_params
  lost_steps: int = 0
  merged: int = 0  # token_params known to be merged
  counts: Mapping[str, int] = {}  # of odd things, for the log
  samples_per_step: int = 0
  saved_global_step: int = 0  # of the checkpoint that this came from
  carried: int = 0  # token_params that the checkpoint held as pending
  donation: m.AskDonation | None = None  # asked for, not answered yet
  donating: bool = False  # copied at a boundary, being encoded
  save_due: bool = False
  saves: int = 0  # numbers given
  saving: bool = False


class Checkpoint(NamedTuple):
  """What of the machine is saved with the arrays. Captures are not."""

  step: int
  tokens: int
  global_step: int
  versions: tuple[m.Version, ...]
  digests: tuple[str, ...]
  steps0: tuple[int, ...]
  tokens0: tuple[int, ...]
  island: int
  incarnation: int


def checkpoint(state: IslandState) -> Checkpoint:
  """The machine's part of a checkpoint, at a step boundary."""
  assert all(x.anchor is not None for x in state.held)
  return Checkpoint(
    step=state.boundary,
    tokens=state.tokens,
    global_step=state.global_step,
    versions=tuple(x.anchor for x in state.held if x.anchor is not None),
    digests=tuple(x.digest for x in state.held),
    steps0=tuple(x.step0 for x in state.held),
    tokens0=tuple(x.tokens0 for x in state.held),
    island=state.island,
    incarnation=state.incarnation,
  )


def restored(
  settings: Settings,
  saved: Checkpoint,
  *,
  nonce: str,
  samples_per_step: int = 0,
) -> IslandState:
  """The state of an island that comes back from its own checkpoint."""
  state = initial(
    settings,
    nonce=nonce,
    island=saved.island,
    step=saved.step,
    tokens=saved.tokens,
    has_inner_state=True,
    samples_per_step=samples_per_step,
  )
  held = tuple(
    Held(anchor=version, digest=digest, step0=step0, tokens0=tokens0)
    for version, digest, step0, tokens0 in zip(
      saved.versions, saved.digests, saved.steps0, saved.tokens0, strict=True
    )
  )
  return state._replace(held=held, saved_global_step=saved.global_step)


def initial(
  settings: Settings,
  *,
  nonce: str,
  role: str = m.ISLAND,
  island: int = -1,
  step: int = 0,
  tokens: int = 0,
  has_inner_state: bool = False,
  seeds_state: bool = False,
  samples_per_step: int = 0,
) -> IslandState:
  """The state before anything has happened."""
  return IslandState(
    settings=settings,
    role=role,
    wanted=island,
    nonce=nonce,
    has_inner_state=has_inner_state,
    seeds_state=seeds_state,
    held=(Held(step0=step, tokens0=tokens),) * settings.fragments,
    boundary=step,
    tokens=tokens,
    tokens_before=tokens,
    step=step,
    step_tokens=tokens,
    samples_per_step=samples_per_step,
  )
