"""Deaths, freezes and cuts, from tapes and process tables made by hand."""

import pathlib

from absl.testing import absltest

from diloco_jax.telemetry import faults
from diloco_jax.telemetry import folder
from tests.telemetry import synthetic_run as synthetic

line = synthetic.line
process = synthetic.process


def joined(t_s, island, incarnation):
  return line(
    t_s, 'joined', island=island, incarnation=incarnation, entry='fresh'
  )


def lapsed(t_s, island, incarnation, silent_s):
  return line(
    t_s, 'lapsed', island=island, incarnation=incarnation, silent_s=silent_s
  )


def readmitted(t_s, island, incarnation):
  return line(t_s, 'readmitted', island=island, incarnation=incarnation)


def merge(t_s, *islands):
  return synthetic.merge(t_s, 1, 0, [(k, 1, 1, 1) for k in islands], [])


def run(tape, processes=(), rows=None):
  return folder.RunFolder(
    workdir=pathlib.Path('.'), config={}, config_hash='', tape=tape,
    islands=rows or {}, syncer=[], evaluator=[], processes=list(processes),
    missing=(), problems=(),
  )  # fmt: skip


class FaultsTest(absltest.TestCase):
  def assertFaults(self, found, *expected):
    self.assertEqual([tuple(fault) for fault in found], list(expected))

  def test_a_run_without_faults_has_none(self):
    tape = [
      joined(1.0, 0, 1),
      merge(5.0, 0),
      line(9.0, 'left', island=0, incarnation=1, reason='finished'),
      line(9.5, 'finished', reason='steps'),
    ]
    # Ends badly, but after it had left; and after the run.
    processes = [
      process('island', 0, 1, 0.0, 9.2, '1'),
      process('syncer', 0, 1, 0.0, 9.6, 'SIGTERM'),
      process('evaluator', 0, None, 0.0, 3.0, 'stopped'),
    ]
    self.assertFaults(faults.find(run(tape, processes)))

  def test_a_killed_process_that_comes_back(self):
    tape = [
      joined(1.0, 0, 1),
      joined(1.0, 1, 1),
      merge(4.0, 0, 1),
      merge(21.0, 0),
      lapsed(25.0, 1, 1, 15.0),
      joined(30.0, 1, 2),
      merge(31.0, 0),
      merge(33.0, 0, 1),
    ]
    processes = [
      process('island', 1, 1, 0.0, 10.5, 'SIGKILL'),
      process('island', 1, 2, 12.0, None, None),
    ]
    expected = (10.5, 'death', 'island_1', 19.5, 22.5)
    self.assertFaults(faults.find(run(tape, processes)), expected)
    # The same where nobody could tell the launcher the incarnation.
    processes[0]['incarnation'] = None
    self.assertFaults(faults.find(run(tape, processes)), expected)

  def test_a_process_that_dies_before_it_joins(self):
    processes = [process('island', 0, None, 0.0, 2.0, '1')]
    tape = [joined(8.0, 0, 1)]
    self.assertFaults(
      faults.find(run(tape, processes)), (2.0, 'death', 'island_0', 6.0, None)
    )

  def test_an_older_death_does_not_explain_a_later_lapse(self):
    processes = [
      process('island', 0, None, 0.0, 2.0, '1'),
      process('island', 0, 1, 3.0, None, None),
    ]
    tape = [joined(8.0, 0, 1), lapsed(40.0, 0, 1, 16.0)]
    self.assertFaults(
      faults.find(run(tape, processes)),
      (2.0, 'death', 'island_0', 6.0, None),
      (24.0, 'freeze', 'island_0', None, None),
    )

  def test_silent_without_steps_and_back_is_a_freeze(self):
    rows = {0: [synthetic.row(t, 1, t, 1, 1.0) for t in (8, 9, 10, 41)]}
    tape = [
      joined(1.0, 0, 1),
      lapsed(25.5, 0, 1, 15.5),
      readmitted(41.0, 0, 1),
      merge(43.0, 0),
    ]
    self.assertFaults(
      faults.find(run(tape, rows=rows)),
      (10.0, 'freeze', 'island_0', 31.0, 33.0),
    )

  def test_silent_but_stepping_is_a_cut(self):
    rows = {0: [synthetic.row(t, 1, t, 1, 1.0) for t in range(1, 60)]}
    tape = [
      joined(1.0, 0, 1),
      lapsed(25.5, 0, 1, 15.5),
      readmitted(41.0, 0, 1),
      merge(43.0, 0),
    ]
    self.assertFaults(
      faults.find(run(tape, rows=rows)), (10.0, 'cut', 'island_0', 31.0, 33.0)
    )

  def test_silent_and_never_seen_again_is_a_death(self):
    tape = [joined(1.0, 0, 1), lapsed(25.5, 0, 1, 15.5), merge(30.0, 1)]
    self.assertFaults(
      faults.find(run(tape)), (10.0, 'death', 'island_0', None, None)
    )

  def test_frozen_twice_is_two_faults(self):
    tape = [
      joined(1.0, 0, 1),
      lapsed(20.0, 0, 1, 15.0),
      readmitted(22.0, 0, 1),
      lapsed(50.0, 0, 1, 15.0),
      readmitted(52.0, 0, 1),
    ]
    self.assertFaults(
      faults.find(run(tape)),
      (5.0, 'freeze', 'island_0', 17.0, None),
      (35.0, 'freeze', 'island_0', 17.0, None),
    )

  def test_a_new_incarnation_that_nothing_announced(self):
    rows = {0: [synthetic.row(t, 1, t, 1, 1.0) for t in (2, 3, 4)]}
    tape = [joined(1.0, 0, 1), joined(6.0, 0, 2), merge(7.0, 0)]
    self.assertFaults(
      faults.find(run(tape, rows=rows)), (4.0, 'death', 'island_0', 2.0, 3.0)
    )

  def test_leaving_and_coming_again_is_no_fault(self):
    tape = [
      joined(1.0, 0, 1),
      line(3.0, 'left', island=0, incarnation=1, reason='SIGTERM'),
      joined(6.0, 0, 2),
    ]
    self.assertFaults(faults.find(run(tape)))

  def test_leaving_with_a_bad_reason_is_a_death(self):
    tape = [
      joined(1.0, 0, 1),
      line(3.0, 'left', island=0, incarnation=1, reason='killed'),
      joined(6.0, 0, 2),
    ]
    self.assertFaults(
      faults.find(run(tape)), (3.0, 'death', 'island_0', 3.0, None)
    )

  def test_a_syncer_that_comes_back(self):
    start = synthetic.tape()[0]
    tape = [
      start,
      merge(5.0, 0),
      {**start, 't_s': 12.0, 'incarnation': 2},
      merge(14.0, 0),
    ]
    processes = [process('syncer', 0, 1, 0.0, 7.5, 'SIGKILL')]
    self.assertFaults(
      faults.find(run(tape, processes)), (7.5, 'death', 'syncer', 4.5, 6.5)
    )
    # Without a process table its last line is the last that is known of it.
    self.assertFaults(
      faults.find(run(tape)), (5.0, 'death', 'syncer', 7.0, 9.0)
    )

  def test_an_evaluator_that_comes_back(self):
    processes = [
      process('evaluator', 0, None, 0.0, 3.0, 'SIGKILL'),
      process('evaluator', 0, None, 4.0, None, None),
    ]
    self.assertFaults(
      faults.find(run([], processes)), (3.0, 'death', 'evaluator', 1.0, None)
    )

  def test_faults_come_by_time(self):
    tape = [joined(1.0, 0, 1), joined(1.0, 1, 1),
            lapsed(40.0, 0, 1, 15.0), lapsed(30.0, 1, 1, 15.0)]  # fmt: skip
    self.assertEqual([x.t_s for x in faults.find(run(tape))], [15.0, 25.0])


if __name__ == '__main__':
  absltest.main()
