"""What may enter a merge (section 5.5): reasons, norms, repeat offenders."""

import math
import statistics

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.turn import Turn

# Reasons that say that a contribution's content is bad. The others happen to
# healthy islands: they were late, or the round was closed before them.
OFFENCES = (
  'layout', 'shape', 'dtype', 'nonfinite', 'outlier', 'timeline', 'repeated',
  'counts',
)  # fmt: skip


def problem(
  turn: Turn,
  c: m.Contribution,
  rnd: s.Round | None,
  member: s.Member | None,
) -> str:
  """Why this contribution is refused before it is looked at; '' if not."""
  if c.fingerprint != turn.settings.fingerprint:
    return 'layout'
  if rnd is None or rnd.phase != s.COLLECTING:
    return 'late'
  if member is None or member.incarnation != c.incarnation:
    return 'round'
  if member.status == s.GONE:
    return 'gone'
  # A member whose connection was lost is pending again; what it had already
  # sent may still come.
  if member.status not in (s.ASKED, s.PENDING):
    return 'round'
  if c.fragment != rnd.fragment:
    return 'round'
  if c.c_steps < 1 or c.c_tokens < 0 or c.capture.incarnation != c.incarnation:
    return 'counts'
  return _base_problem(turn, c)


def _base_problem(turn: Turn, c: m.Contribution) -> str:
  piece = turn.fragments[c.fragment]
  incarnation = turn.get().incarnation
  if c.base > piece.version or c.base.incarnation != incarnation:
    return 'timeline'
  own = piece.included.get(c.island)
  if own is not None and own.incarnation == c.incarnation:
    if c.base < own.version:
      return 'stale_base'
    if c.capture <= own.capture:
      return 'repeated'
  return 'stale' if turn.is_stale(c.island, c.fragment, c.base) else ''


def outlier(turn: Turn, fragment: int, norm: float) -> str:
  """Whether a norm is far outside the recent distribution."""
  if not math.isfinite(norm):
    return 'nonfinite'
  norms = turn.fragments[fragment].norms
  if len(norms) < turn.limits.norm_window_min:
    return ''
  bound = turn.limits.norm_factor_max * statistics.median(norms)
  return 'outlier' if norm > bound > 0 else ''


def remember_norm(turn: Turn, fragment: int, norm: float) -> None:
  piece = turn.fragments[fragment]
  turn.fragments[fragment] = piece._replace(
    norms=(*piece.norms, norm)[-turn.limits.norm_window :]
  )


def count_offence(turn: Turn, index: int, reason: str) -> None:
  """Count bad content, in a row; `membership` quarantines repeat offenders."""
  if reason in OFFENCES:
    turn.island(index, offences=turn.islands[index].offences + 1)
