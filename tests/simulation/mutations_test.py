"""Bugs planted in the protocol are caught by the checkers."""

import importlib.util
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from diloco_jax.protocol import invariants
from diloco_jax.simulation import checkers
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checking import CheckFailure
from diloco_jax.simulation.checking import Watch
from diloco_jax.simulation.round_book import RoundBook
from tests.simulation import watched_chaos

STUDY = pathlib.Path(__file__).parents[2] / 'experiments' / 'simulation'


def _module(name):
  spec = importlib.util.spec_from_file_location(name, STUDY / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


planted = _module('planted')
tables = _module('tables')
mutations = _module('mutations')

# Caught within few seeds, by different checkers.
FAST = {
  'pull_without_the_last_merge': 'AskedWithOwnMerge',
  'a_grace_window_that_never_ends': 'WaitingEnds',
  'close_before_the_grace_window': 'ReasonIsTrue',
  'charge_only_the_holders': 'OpeningChargesAll',
  'sum_in_arrival_order': 'MergesAreWhatWasGiven',
  'broadcast_before_the_line_is_durable': 'DurableBeforeBroadcast',
  'reset_the_counters_on_send': 'invariants',
  'offer_merged_work_again': 'NothingIsOfferedTwice',
  'rebase_on_the_kept_capture': 'NamesTheRightCapture',
  'lease_merged_samples_again': 'SamplesAreLeasedOnce',
  'a_newcomer_seeds_state': 'NewcomersSeedNothing',
  'take_back_too_old_a_version': 'MergedWorkComesBack',
}


class MutationsTest(parameterized.TestCase):
  @parameterized.parameters(*FAST.items())
  def test_caught_at_once(self, bug, checker):
    row = mutations.hunt(bug, range(20))
    self.assertEqual(row['checker'], checker)

  def test_a_closed_plant_leaves_nothing_behind(self):
    for plant in planted.BUGS.values():
      with plant():
        pass
    self.assertIsNone(mutations.failure(1))


@pytest.mark.slow
class AllMutationsTest(parameterized.TestCase):
  @parameterized.parameters(*planted.BUGS)
  def test_caught(self, bug):
    row = mutations.hunt(bug, range(500))
    self.assertIsNotNone(row['seeds'], row)


# Found with no other checker looking, which would have been faster.
ALONE = (
  ('StepsEnterOnce', 'merge_the_same_work_twice'),
  ('NothingIsOfferedTwice', 'offer_merged_work_again'),
  ('CountersAreTrue', 'rebase_on_the_kept_capture'),
  ('BasesAreFresh', 'merge_the_same_work_twice'),
  ('BooksBalance', 'keep_the_count_of_what_was_lost'),
  ('AdoptionIsMonotone', 'rebase_on_the_kept_capture'),
)


class AloneTest(parameterized.TestCase):
  @parameterized.parameters(*ALONE)
  def test_caught(self, checker, bug):
    cls = next(x for x in checkers.EARLY + checkers.CHECKERS
               if x.__name__ == checker)  # fmt: skip

    def watch(settings):
      books = Books(settings)
      rounds = RoundBook(settings)
      one = cls(settings, books, rounds)
      early = cls in checkers.EARLY
      return Watch([one, books, rounds] if early else [books, rounds, one])

    def finds(seed):
      """In a world that shares no code with the simulator but its heap."""
      try:
        watched_chaos.run_seed(seed, watch)
      except CheckFailure as e:
        return e.checker == checker
      except (AssertionError, KeyError, TypeError, ValueError):
        pass  # the world itself has fallen over the bug
      return False

    with (
      planted.BUGS[bug](),
      mock.patch.object(invariants, 'check_syncer'),
      mock.patch.object(invariants, 'check_island'),
    ):
      self.assertTrue(any(map(finds, range(40))))


class TableTest(absltest.TestCase):
  def test_what_was_not_found_is_said(self):
    rows = [
      {'bug': 'one_thing', 'seeds': 3, 'checker': 'Bounds'},
      {'bug': 'another', 'seeds': None, 'checker': None},
    ]
    table = tables.of_planted(rows)
    self.assertIn('| one thing | 3 | Bounds |', table)
    self.assertIn('| another | not found | None |', table)


if __name__ == '__main__':
  absltest.main()
