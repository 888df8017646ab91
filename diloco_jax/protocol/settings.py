"""The settings that both machines read, and the one table of limits."""

import dataclasses

OVERWRITE = 'overwrite'
BLEND = 'blend'
REBASE = 'rebase'
ADOPTIONS = (OVERWRITE, BLEND, REBASE)

FREE = 'free'  # rounds open by credits, nobody waits
LOCK_STEP = 'lock_step'  # every island waits for every slot
EACH = 'each'  # every round is one island's own
MODES = (FREE, LOCK_STEP, EACH)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
  """Every timeout, lease, limit and factor of the protocol, with defaults."""

  lease_s: float = 15.0  # membership lapses this long after the last progress
  compiling_s: float = 600.0  # longest declared compile
  restoring_s: float = 600.0
  saving_s: float = 120.0
  evaluating_s: float = 300.0
  report_every_s: float = 1.0  # an island that does not step reports this often
  start_timeout_s: float = 300.0  # first start waits for all islands this long
  resend_floor_s: float = 2.0  # pulls and broadcasts are repeated after
  resend_steps: float = 8.0  # ... max(floor, this many mean step times)
  quorum_timeout_floor_s: float = 10.0
  quorum_timeout_steps: float = 10.0  # x in max(floor, x * slowest step time)
  drain_timeout_s: float = 60.0  # at the end of a run
  leave_s: float = 20.0  # islands have to leave after `finished`
  hello_retry_s: float = 2.0
  tick_s: float = 0.5  # leases and resends are looked at this often
  standstill_s: float = 5.0  # without a tick: the syncer itself was away
  active_steps: float = 3.0  # an island reported within so many of its steps
  winsor_factor: float = 2.0  # a step time counts at most this times the median
  estimate_decay: float = 0.5  # weight of the newest in moving averages
  norm_window: int = 16  # norms remembered per fragment
  norm_window_min: int = 8  # ... before an outlier is refused
  norm_factor_max: float = 20.0  # a norm is an outlier beyond factor * median
  offences_max: int = 3  # consecutive refusals before quarantine
  quarantine_s: float = 60.0
  islands_max: int = 1024
  evaluators_max: int = 64
  snapshot_every_s: float = 0.0  # of the syncer; 0: none
  checkpoint_every_s: float = 0.0  # of an island; 0: none
  checkpoint_age_periods: float = 20.0  # an older one is not worth restoring
  momentum_merges_max: int = 2  # a snapshot's b is taken this far behind
  history_max: int = 64  # versions of a fragment that recovery considers
  recovery_leases_max: float = 3.0  # that a recovery waits for newcomers
  answer_s: float = 5.0  # an anchor's value that was asked for
  donation_s: float = 30.0  # an inner state that was asked for
  donors_max: int = 0  # tried for one newcomer; 0: nobody is asked
  past_max: int = 256  # ended incarnations whose books are kept open


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
  """The protocol's view of a run's configuration."""

  islands: int
  sizes: tuple[int, ...]  # parameters in each fragment
  fingerprint: str
  config_hash: str
  period: int  # H
  overlap: int  # τ
  steps: int  # global steps
  quorum: int = 1  # K; 0: all live islands
  mode: str = FREE
  adopt: str = REBASE
  grace_gamma: float = 0.8
  grace_steps_max: float = 1.0  # 0: no grace window
  staleness_max: int = -1  # versions; -1: off
  token_budget: int = -1  # merged tokens; -1: none
  rewarm_steps: int = 0  # for a newcomer without moments
  islands_max: int = 0  # 0: as many as `islands`
  limits: Limits = Limits()

  @property
  def fragments(self) -> int:
    """P."""
    return len(self.sizes)

  @property
  def stride(self) -> int:
    """n = H/P, inner steps between rounds."""
    return self.period // len(self.sizes)

  def __post_init__(self) -> None:
    assert self.mode in MODES, self.mode
    assert self.adopt in ADOPTIONS, self.adopt
    assert self.sizes and self.period % len(self.sizes) == 0
    assert self.overlap >= 0 and self.steps >= 1 and self.islands >= 1
    if self.mode != FREE:
      assert self.overlap < self.period
