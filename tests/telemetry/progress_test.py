"""What people see of a run, on a terminal and in a log."""

import io
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from rich import console as console_lib

from diloco_jax.telemetry import lines
from diloco_jax.telemetry import progress as progress_lib
from diloco_jax.telemetry import view as view_lib
from tests.telemetry import synthetic_run as synthetic

PACE_SENTENCE = (
  'warning: fragments are merged every 66.1 steps, configured 24: rounds take'
  ' 5.5 steps; sync.overlap=6 would do, or 3 steps between rounds'
)
INFO = progress_lib.RunInfo(
  islands=2, steps=8, period=4, preset='decoupled_diloco'
)


class ProgressTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    self.now_s = 0.0
    self.stream = io.StringIO()

  def progress(self, info=INFO, console=None):
    return progress_lib.Progress(
      view_lib.RunView(self.workdir),
      info,
      self.stream,
      clock=lambda: self.now_s,
      console=console,
    )

  def append(self, name, *rows):
    path = self.workdir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'ab') as file:
      for row in rows:
        file.write(lines.encode_line(row))

  def told(self):
    return self.stream.getvalue().splitlines()


class LogTest(ProgressTestCase):
  def test_decisions_at_once_and_a_status_every_ten_seconds(self):
    synthetic.write_run(self.workdir, tape_lines=synthetic.tape()[:3])
    shown = self.progress()
    shown.start()
    shown.poll()
    first = [
      '[    0s] syncer started (incarnation 1)',
      '[    0s] island 0 joined (incarnation 1, fresh)',
      '[    0s] island 1 joined (incarnation 1, fresh)',
      '[    6s] eval at step 4: loss 3.0000, accuracy 0.3000',
      '[   14s] eval at step 8: loss 2.5000, accuracy 0.4000',
    ]
    self.assertEqual(self.told(), first)
    for self.now_s in (1.0, 5.0, 9.9):
      shown.poll()
    self.assertEqual(self.told(), first)
    self.now_s = 10.0
    shown.poll()
    status = (
      '[   14s] step 8/8 loss 3.500 200 tok/s live 2/2 goodput 0.79 left 0s'
    )
    self.assertEqual(self.told(), [*first, status])
    shown.note('stopping')
    self.append('tape/syncer.jsonl', *synthetic.tape()[3:])
    shown.stop()
    self.assertEqual(self.told()[6], 'stopping')
    self.assertIn('[   13s] island 0 left: finished', self.told())
    self.assertIn(
      '[   13s] finished: steps, global step 8, 6 merges', self.told()
    )
    self.assertNotIn('\x1b', self.stream.getvalue())

  def test_status_fits_in_80_columns(self):
    row = {
      **synthetic.row(359_999.0, 1, 99_999_999, 10, 12345.678),
      'tokens_per_s': 987_654_321.0,
    }
    self.append('metrics/island_0.jsonl', row)
    self.append(
      'metrics/syncer.jsonl',
      {'t_s': 1.0, 'global_step': 1},
      {'t_s': 359_999.0, 'global_step': 9_999_999},
    )
    shown = self.progress(
      progress_lib.RunInfo(islands=1024, steps=99_999_999, period=500)
    )
    shown.poll()
    self.assertLessEqual(len(shown.status_line()), 80)

  def test_a_run_that_stands_still_does_not_fill_the_log(self):
    synthetic.write_run(self.workdir, tape_lines=[])
    shown = self.progress()
    shown.poll()
    for self.now_s in range(10, 200, 10):
      shown.poll()
    self.assertLen([x for x in self.told() if 'goodput' in x], 1)

  def test_alike_lines_are_held_back_and_counted(self):
    shown = self.progress()
    refused = synthetic.tape()[6]
    self.assertEqual(refused['kind'], 'refused')
    for self.now_s in range(8):
      self.append('tape/syncer.jsonl', refused)
      shown.poll()
    line = '[    5s] island 1: contribution to fragment 1 refused: norm'
    self.assertEqual(self.told(), [line] * 3)
    self.now_s = 70.0
    self.append('tape/syncer.jsonl', refused, refused, refused, refused)
    shown.poll()
    self.assertIn(f'{line} (5 more alike)', self.told())
    shown.stop()
    self.assertEqual(self.told()[-1], '1 lines like those above not shown')

  def test_a_burst_is_cut_short(self):
    shown = self.progress()
    self.append(
      'tape/syncer.jsonl',
      *(
        synthetic.line(1.0, 'joined', island=k, incarnation=1, entry='fresh')
        for k in range(500)
      ),
    )
    shown.poll()
    self.assertLen(self.told(), progress_lib.LINES_MAX + 1)
    self.assertEqual(self.told()[-1], '... and more, of 500 in a short time')

  @parameterized.parameters(
    (
      'pace_warning',
      {
        'round_steps': 5.5, 'period': 24, 'reached': 66.1,
        'overlap_that_would_do': 6, 'stride_that_would_do': 3,
      },
      PACE_SENTENCE,
    ),
    ('lapsed', {'island': 3, 'silent_s': 15.2},
     'island 3 lapsed: no progress for 15.2 s'),
    ('left', {'island': -1, 'reason': 'finished'}, 'evaluator left: finished'),
    ('started_without', {'missing': 2},
     'warning: started without 2 of the islands'),
    ('hello_refused', {'reason': 'full', 'detail': 'every place is taken'},
     'a newcomer was refused: every place is taken'),
    ('quarantined', {'island': 1, 'offences': 3},
     'island 1 quarantined after repeated refusals'),
    ('readmitted', {'island': 1}, 'island 1 is back'),
  )  # fmt: skip
  def test_sentences(self, kind, fields, sentence):
    self.append('tape/syncer.jsonl', synthetic.line(1.0, kind, **fields))
    self.progress().poll()
    self.assertEqual(self.told(), [f'[    1s] {sentence}'])

  def test_every_decision_has_a_sentence_even_with_fields_missing(self):
    self.assertContainsSubset(view_lib.TOLD, progress_lib.SENTENCES)
    for kind, sentence in progress_lib.SENTENCES.items():
      with self.subTest(kind):
        self.assertNotEmpty(sentence({'t_s': 0.0, 'kind': kind}))


class TerminalTest(ProgressTestCase):
  def console(self, width=80, height=24, **options):
    return console_lib.Console(
      file=self.stream, force_terminal=True, width=width, height=height,
      record=True, color_system='standard', highlight=False, **options,
    )  # fmt: skip

  def drawn(self, **options):
    """The lines of one drawing of the table."""
    console = self.console(**options)
    shown = self.progress(console=console)
    shown.poll()
    console.export_text()  # forget the decisions
    console.print(shown.render())
    return [line.rstrip() for line in console.export_text().splitlines()]

  def run_once(self, **options):
    """What a terminal gets, without its control codes."""
    console = self.console(**options)
    shown = self.progress(console=console)
    shown.start()
    shown.poll()
    shown.note('a note')
    shown.stop()
    return console.export_text()

  def test_a_row_an_island_and_the_run_above(self):
    synthetic.write_run(self.workdir, tape_lines=synthetic.tape()[:-3])
    told = self.drawn()
    self.assertEqual(
      told[:-2],
      [
        'decoupled_diloco: step 8/8 | merges 6 | period 4.2 of 4 | left 0s',
        'goodput 0.792 | up 350B | down 25B | refused 3 | eval 2.5000',
        'island  step    loss  tok/s  anchors  state',
      ],
    )
    self.assertEqual(
      told[-2].split(), ['0', '12', '3.5000', '100', '0s', 'left']
    )
    self.assertEqual(told[-1].split(), ['1', '7', '-', '100', '0s', 'left'])

  def test_states_of_live_and_of_lapsed_islands(self):
    tape = synthetic.tape()[:10]
    self.assertEqual(tape[-1]['kind'], 'lapsed')
    synthetic.write_run(self.workdir, tape_lines=tape)
    told = self.drawn()
    self.assertEqual(told[-2].split()[-1], 'training')
    self.assertEqual(told[-1].split()[-1], 'lapsed')

  def test_nothing_is_wider_than_the_terminal(self):
    synthetic.write_run(self.workdir)
    row = synthetic.row(12.0, 1, 123_456_789, 10, 12345.678)
    self.append('metrics/island_0.jsonl', {**row, 'state': 'x' * 200})
    self.append('tape/syncer.jsonl',
                synthetic.line(12.0, 'joined', island=0, incarnation=1,
                               entry='y' * 200))  # fmt: skip
    told = self.drawn()
    self.assertRegex(told[-2], '123456789 .* xxx+…$')
    for line in told:
      self.assertLessEqual(len(line), 80)

  def test_decisions_stand_above_the_table_and_the_table_stays(self):
    synthetic.write_run(self.workdir)
    told = self.run_once()
    lapsed = '[    8s] island 1 lapsed: no progress for 3.0 s\n'
    self.assertEqual(told.count(lapsed), 1)
    self.assertEqual(told.count('a note\n'), 1)
    self.assertGreater(told.rindex('step 8/8'), told.index(lapsed))
    # The cursor is given back.
    self.assertIn('\x1b[?25h', self.stream.getvalue())

  def test_many_islands_do_not_overflow_the_screen(self):
    islands = dict.fromkeys(range(100), synthetic.ISLANDS[0])
    synthetic.write_run(self.workdir, islands=islands)
    told = self.drawn(height=20)
    self.assertEqual(told[-1].split(), ['...', '88', 'more'])
    self.assertEqual(told[-2].split()[0], '11')

  def test_no_colour_where_it_is_not_wanted(self):
    synthetic.write_run(self.workdir)
    with mock.patch.dict(os.environ, {'NO_COLOR': '1'}):
      self.run_once()
    self.assertIn('lapsed', self.stream.getvalue())
    self.assertNotIn('\x1b[1;31m', self.stream.getvalue())

  def test_colour_otherwise(self):
    synthetic.write_run(self.workdir)
    with mock.patch.dict(os.environ):
      os.environ.pop('NO_COLOR', None)
      self.run_once()
    self.assertIn('\x1b[1;31mleft', self.stream.getvalue())

  def test_a_stream_that_is_no_terminal_gets_no_table(self):
    with mock.patch.dict(os.environ, {'FORCE_COLOR': '1'}):
      shown = self.progress()
      shown.start()
      shown.poll()
      shown.stop()
    self.assertNotIn('\x1b', self.stream.getvalue())


class NumbersTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, '-'), (0, '0'), (999, '999'), (1234, '1.23k'), (1.5e6, '1.5M'),
    (2e9, '2G'), (-5e3, '-5k'),
  )  # fmt: skip
  def test_counts(self, value, text):
    self.assertEqual(progress_lib.count_text(value), text)

  @parameterized.parameters(
    (None, '-'), (0.4, '0s'), (59.6, '1m00s'), (65, '1m05s'),
    (3725, '1h02m'), (90_000, '25h00m'),
  )  # fmt: skip
  def test_durations(self, value, text):
    self.assertEqual(progress_lib.duration_text(value), text)


if __name__ == '__main__':
  absltest.main()
