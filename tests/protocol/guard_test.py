"""Rule 5.5: what may not enter a merge, and why."""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.protocol import guard
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import recovery
from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.settings import Settings
from diloco_jax.protocol.turn import Turn

ROUND = m.RoundId(2, 7)
SETTINGS = Settings(
  islands=2, sizes=(4, 4), fingerprint='layout', config_hash='c', period=4,
  overlap=1, steps=40,
)  # fmt: skip
# Island 0, incarnation 3, is asked for fragment 1 at version (2, 10); its last
# inclusion is capture 5 in (2, 6).
GIVEN = m.Contribution(
  island=0, incarnation=3, round=ROUND, fragment=1, capture=m.CaptureId(3, 6),
  base=m.Version(2, 8), c_steps=4, c_tokens=400, held_s=0.0, encode_s=0.0,
  fingerprint='layout', payload=9,
)  # fmt: skip


def island(key, incarnation=3):
  return s.Island(
    id=key, incarnation=incarnation, nonce=str(key), peer=f'c{key}',
    status=s.LIVE, entry=m.FRESH, since=0.0, lease_until=99.0,
  )  # fmt: skip


def fragment(**fields):
  return s.Fragment(
    version=m.Version(2, 10), digest='d', handle=1,
    included={0: recovery.Inclusion(3, m.Version(2, 6), m.CaptureId(3, 5))},
  )._replace(**fields)  # fmt: skip


def turn(piece=None, settings=SETTINGS, islands=2):
  state = s.initial(settings, incarnation=2)._replace(
    fragments=(fragment(), piece or fragment()),
    islands={key: island(key) for key in range(islands)},
  )
  return Turn(state, 1.0)


def rnd(status=s.ASKED, incarnation=3, **fields):
  member = s.Member(island=0, incarnation=incarnation, status=status)
  return s.Round(
    id=ROUND, fragment=1, slot=3, opened_at=0.0, timeout_at=9.0, quorum=1,
    members=(member,),
  )._replace(**fields)  # fmt: skip


def problem(given=GIVEN, round_=None, *, on=None, member=True):
  round_ = round_ or rnd()
  return guard.problem(
    on or turn(), given, round_, round_.members[0] if member else None
  )


class ProblemTest(parameterized.TestCase):
  def test_nothing_wrong(self):
    self.assertEqual(problem(), '')

  @parameterized.parameters(
    ({'fingerprint': 'other'}, 'layout'),
    ({'fragment': 0}, 'round'),
    ({'fragment': 99}, 'round'),
    ({'fragment': -1}, 'round'),
    ({'incarnation': 2}, 'round'),
    ({'c_steps': 0}, 'counts'),
    ({'c_steps': -4}, 'counts'),
    ({'c_tokens': -1}, 'counts'),
    ({'capture': m.CaptureId(2, 6)}, 'counts'),
    ({'base': m.Version(2, 11)}, 'timeline'),  # from the future
    ({'base': m.Version(1, 9)}, 'timeline'),  # of an older syncer
    ({'base': m.Version(3, 0)}, 'timeline'),  # of a syncer to come
    ({'base': m.Version(2, 5)}, 'stale_base'),
    ({'capture': m.CaptureId(3, 5)}, 'repeated'),
    ({'capture': m.CaptureId(3, 4)}, 'repeated'),
  )
  def test_contribution(self, changes, reason):
    self.assertEqual(problem(dataclasses.replace(GIVEN, **changes)), reason)

  def test_round(self):
    self.assertEqual(guard.problem(turn(), GIVEN, None, None), 'late')
    self.assertEqual(problem(member=False), 'round')
    self.assertEqual(problem(round_=rnd(incarnation=2)), 'round')
    for phase in (s.QUEUED, s.MERGING, s.TAPING):
      self.assertEqual(problem(round_=rnd(phase=phase)), 'late', phase)

  @parameterized.parameters(
    (s.GONE, 'gone'), (s.DECLINED, 'round'), (s.REFUSED, 'round')
  )
  def test_member(self, status, reason):
    self.assertEqual(problem(round_=rnd(status)), reason)

  def test_the_own_last_merge_is_allowed_as_base(self):
    given = dataclasses.replace(GIVEN, base=m.Version(2, 6))
    self.assertEqual(problem(given), '')

  def test_an_older_incarnations_merge_binds_nobody(self):
    old = {0: recovery.Inclusion(2, m.Version(2, 9), m.CaptureId(2, 50))}
    on = turn(fragment(included=old))
    self.assertEqual(problem(on=on), '')


class StalenessTest(parameterized.TestCase):
  def stale(self, limit, *, declined=(), mode='free', islands=2, base=8):
    settings = dataclasses.replace(SETTINGS, staleness_max=limit, mode=mode)
    on = turn(fragment(declined={0: declined}), settings, islands)
    given = dataclasses.replace(GIVEN, base=m.Version(2, base))
    return problem(given, on=on)

  @parameterized.parameters((-1, ''), (0, 'stale'), (1, 'stale'), (2, ''))
  def test_two_versions_behind(self, limit, reason):
    self.assertEqual(self.stale(limit), reason)

  def test_versions_without_own_steps_do_not_count(self):
    self.assertEqual(self.stale(1, declined=(9,)), '')
    self.assertEqual(self.stale(0, declined=(9, 10)), '')
    # Those before the base do not help.
    self.assertEqual(self.stale(1, declined=(7, 8)), 'stale')

  def test_each_divides_by_the_live_islands(self):
    self.assertEqual(self.stale(1, mode='each', islands=2), '')
    self.assertEqual(self.stale(1, mode='each', islands=1), 'stale')


class OutlierTest(absltest.TestCase):
  def with_norms(self, *norms):
    return turn(fragment(norms=norms))

  def test_not_finite(self):
    for norm in (math.nan, math.inf, -math.inf):
      self.assertEqual(guard.outlier(turn(), 1, norm), 'nonfinite')

  def test_too_few_norms_say_nothing(self):
    self.assertEqual(guard.outlier(self.with_norms(*[1.0] * 7), 1, 1e9), '')

  def test_beyond_the_factor(self):
    on = self.with_norms(*[1.0] * 4, *[2.0] * 4)  # median 1.5, bound 30
    self.assertEqual(guard.outlier(on, 1, 30.0), '')
    self.assertEqual(guard.outlier(on, 1, 30.1), 'outlier')
    self.assertEqual(guard.outlier(on, 1, 0.0), '')

  def test_zeros_set_no_bound(self):
    self.assertEqual(guard.outlier(self.with_norms(*[0.0] * 8), 1, 5.0), '')

  def test_window_is_bounded_and_by_fragment(self):
    on = turn()
    for k in range(100):
      guard.remember_norm(on, 1, float(k))
    self.assertEqual(
      on.fragments[1].norms, tuple(float(k) for k in range(84, 100))
    )
    self.assertEqual(on.fragments[0].norms, ())


class OffenceTest(absltest.TestCase):
  def test_only_bad_content_counts(self):
    on = turn()
    for reason in ('late', 'gone', 'round', 'stale', 'stale_base'):
      guard.count_offence(on, 0, reason)
    self.assertEqual(on.islands[0].offences, 0)
    for reason in ('nonfinite', 'shape', 'outlier', 'layout', 'dtype'):
      guard.count_offence(on, 0, reason)
    self.assertEqual(on.islands[0].offences, 5)
    self.assertEqual(on.islands[1].offences, 0)


if __name__ == '__main__':
  absltest.main()
