"""summary.json against figures worked out by hand."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax import errors
from diloco_jax.telemetry import lines
from diloco_jax.telemetry import summary
from tests.telemetry import synthetic_run as synthetic


class SummaryTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def assertSummary(self, made, expected):
    self.assertEqual(list(made), list(expected))  # the keys, and their order
    for key, value in expected.items():
      with self.subTest(key):
        if isinstance(value, float):
          self.assertAlmostEqual(made[key], value, places=9)
        else:
          self.assertEqual(made[key], value)

  def test_a_run_with_a_death(self):
    synthetic.write_run(self.workdir)
    made = summary.summarize(self.workdir)
    self.assertSummary(made, synthetic.SUMMARY)
    self.assertAlmostEqual(
      made['tokens_merged'] + made['tokens_lost'] + made['tokens_pending'],
      made['tokens_trained'],
      places=9,
    )

  def test_torn_last_lines_change_nothing(self):
    synthetic.write_run(self.workdir, torn='{"t_s": 99.0, "kind": "fini')
    self.assertSummary(summary.summarize(self.workdir), synthetic.SUMMARY)

  def test_events_on_the_tape_change_nothing(self):
    tape = synthetic.tape()
    tape[1:1] = [synthetic.line(0.25, 'event', event={}, actions=[])] * 3
    synthetic.write_run(self.workdir, tape_lines=tape)
    self.assertSummary(summary.summarize(self.workdir), synthetic.SUMMARY)

  def test_interrupted_before_the_books_were_closed(self):
    cut = [x for x in synthetic.tape() if x['t_s'] < 12]
    synthetic.write_run(
      self.workdir, tape_lines=cut, without=['metrics/evaluator.jsonl']
    )
    made = summary.summarize(self.workdir, status=summary.INTERRUPTED)
    expected = {
      **synthetic.SUMMARY,
      'status': 'interrupted',
      # Merge lines until 12 s: f0 (400 + 400 + 400), f1 (300 + 300).
      'tokens_merged': (1200 * 300 + 600 * 700) / 1000,
      'tokens_lost': None,
      'tokens_pending': None,
      'tokens_overlap_discarded': None,
      'merges': 4,
      'eval_loss': None,
      'eval_accuracy': None,
      'wall_s': 14.0,
      'islands_live': 8 / 5,
      'islands_participating': 1.0,
      'islands_committed': 1.25,
      'rounds_closed': {
        'all_in': 2, 'empty': 1, 'grace_over': 1, 'quorum_timeout': 1,
      },
      'faults': [
        {**synthetic.SUMMARY['faults'][0], 'first_merge_s': None}
      ],
      'params_digest': None,
    }  # fmt: skip
    self.assertSummary(made, expected)

  def test_a_folder_with_a_configuration_only(self):
    synthetic.write_run(
      self.workdir,
      islands={},
      without=[
        'tape/syncer.jsonl', 'metrics/syncer.jsonl', 'metrics/evaluator.jsonl',
        'processes.json',
      ],
    )  # fmt: skip
    made = summary.summarize(self.workdir)
    known = {
      'preset': 'decoupled_diloco', 'islands': 2, 'steps': 8,
      'eval_loss_reference': 2.25, 'refusals': {}, 'rounds_closed': {},
      'faults': [],
    }  # fmt: skip
    self.assertSummary(made, {**dict.fromkeys(synthetic.SUMMARY), **known})

  @parameterized.parameters(
    ('steps', 'ok'),
    ('token_budget', 'ok'),
    ('SIGINT', 'interrupted'),
    ('failed: no island', 'failed'),
  )
  def test_status_from_the_reason_to_finish(self, reason, status):
    tape = synthetic.tape()
    tape[-1]['reason'] = reason
    synthetic.write_run(self.workdir, tape_lines=tape)
    self.assertEqual(summary.summarize(self.workdir)['status'], status)

  @parameterized.parameters((13.6, 'failed'), (None, None))
  def test_status_without_an_end(self, ended_s, status):
    processes = [synthetic.process('syncer', 0, 1, 0.0, ended_s, None)]
    synthetic.write_run(
      self.workdir, tape_lines=synthetic.tape()[:-1], processes=processes
    )
    self.assertEqual(summary.summarize(self.workdir)['status'], status)

  def test_books_that_do_not_add_up_are_an_error(self):
    tape = synthetic.tape()
    tape[-3]['lost_token_params'] += 1
    synthetic.write_run(self.workdir, tape_lines=tape)
    with self.assertRaisesRegex(
      summary.AccountingError, 'island 0, incarnation 1: trained 1200000 is not'
    ):
      summary.summarize(self.workdir)
    made = summary.summarize(self.workdir, strict=False)
    self.assertEqual(made['tokens_overlap_discarded'], 30.001)

  def test_merges_that_no_total_knows_are_an_error(self):
    tape = synthetic.tape()
    tape[5]['inputs'][0][4] += 1
    synthetic.write_run(self.workdir, tape_lines=tape)
    with self.assertRaisesRegex(
      summary.AccountingError, 'merged 1179900 .* on the tape hold 1180200'
    ):
      summary.summarize(self.workdir)

  def test_the_floor_is_the_step_of_goodput(self):
    config = json.loads(json.dumps(synthetic.CONFIG))
    config['config']['launch']['step_floor_ms'] = 500.0
    synthetic.write_run(self.workdir, config=config)
    made = summary.summarize(self.workdir)
    self.assertAlmostEqual(made['goodput'], 19 / (2 * 12 / 0.5))

  def test_data_parallel_is_one_island_without_a_syncer(self):
    config = json.loads(json.dumps(synthetic.CONFIG))
    config['config']['preset'] = 'data_parallel'
    synthetic.write_run(
      self.workdir,
      config=config,
      islands={0: [synthetic.row(10.0, 1, 10, 10, 4.0)]},
      without=['tape/syncer.jsonl', 'metrics/syncer.jsonl'],
    )
    made = summary.summarize(self.workdir)
    self.assertEqual(made['goodput'], 1.0)
    self.assertEqual(made['tokens_trained'], 1000)
    self.assertIsNone(made['merges'])
    self.assertIsNone(made['tokens_merged'])

  def test_time_without_any_step_is_downtime(self):
    # All islands stand still from 10 s to 50 s: 40 s, less ten median steps.
    islands = {
      0: [
        synthetic.row(10.0, 1, 10, 10, 4.0),
        synthetic.row(50.0, 1, 11, 1, 4),
      ],
      1: [synthetic.row(8.0, 1, 8, 8, 4.0)],
    }
    synthetic.write_run(self.workdir, islands=islands)
    made = summary.summarize(self.workdir)
    self.assertAlmostEqual(made['global_downtime_s'], 30.0)
    self.assertAlmostEqual(made['train_s'], 50.0)

  def test_what_is_no_run_is_the_users_mistake(self):
    self.workdir.mkdir()
    with self.assertRaisesRegex(errors.UserError, 'the folder of a run'):
      summary.summarize(self.workdir)

  def test_a_malformed_line_is_told_with_file_and_line(self):
    synthetic.write_run(self.workdir)
    path = self.workdir / 'metrics' / 'island_0.jsonl'
    path.write_text('{"t_s": 1.0}\nnonsense\n')
    with self.assertRaisesRegex(
      lines.MalformedLineError, r'island_0\.jsonl:2: not JSON'
    ):
      summary.summarize(self.workdir)

  def test_written_summary_is_json_and_replaces_the_old(self):
    synthetic.write_run(self.workdir)
    made = summary.summarize(self.workdir)
    path = summary.write_summary(self.workdir, {**made, 'goodput': 0.1})
    summary.write_summary(self.workdir, {**made, 'eval_loss': float('nan')})
    self.assertEqual(path, self.workdir / 'summary.json')
    read = json.loads(path.read_text())
    self.assertEqual(list(read), list(made))
    self.assertIsNone(read['eval_loss'])
    self.assertEqual(read['goodput'], made['goodput'])
    names = [p.name for p in self.workdir.iterdir() if p.name.startswith('.')]
    self.assertEmpty(names)


if __name__ == '__main__':
  absltest.main()
