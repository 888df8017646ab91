"""report.html: whole, self-contained, escaped, and of interrupted runs too."""

import html
from html import parser
import json
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax import errors
from diloco_jax.telemetry import report
from tests.telemetry import synthetic_run as synthetic

VOID = {'meta', 'path', 'line', 'rect', 'br'}


class Page(parser.HTMLParser):
  """Checks that tags close in order; keeps text by tag, and attributes."""

  def __init__(self, text):
    super().__init__()
    self.open = []
    self.texts = {}
    self.attributes = []
    self.charts = []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.attributes.extend(attrs)
    if tag == 'svg':
      self.charts.append(dict(attrs).get('aria-label'))
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.attributes.extend(attrs)

  def handle_endtag(self, tag):
    if tag not in VOID:
      assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
      self.open.pop()

  def handle_data(self, data):
    if self.open:
      self.texts.setdefault(self.open[-1], []).append(data)


class ReportTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / '<i>run'

  def page(self):
    path = report.write_report(self.workdir)
    self.assertEqual(path, self.workdir / 'report.html')
    self.text = path.read_text(encoding='utf-8')
    page = Page(self.text)
    self.assertEqual(page.open, [])
    return page

  def cells(self, page):
    return page.texts.get('td', [])

  def test_a_whole_run(self):
    synthetic.write_run(self.workdir)
    page = self.page()
    self.assertEqual(
      [x for x in page.charts if x],
      ['Loss by step', 'Loss by time',
       'Which merges each island contributed to',
       'Contributions in each merge', 'How long rounds took',
       'Tokens per second', 'Time in the exchange',
       'Bytes to and from the syncer'],
    )  # fmt: skip
    self.assertEqual(
      page.texts['h2'],
      ['Summary', 'Loss', 'Rounds and merges', 'Faults', 'Throughput',
       'Traffic', 'Configuration'],
    )  # fmt: skip
    cells = self.cells(page)
    for key, value in synthetic.SUMMARY.items():
      if key == 'faults':
        continue
      shown = cells[cells.index(key) + 1]
      if isinstance(value, dict):
        self.assertEqual(json.loads(shown), value)
      elif value is None:
        self.assertEqual(shown, '–')
      elif isinstance(value, float):
        self.assertAlmostEqual(float(shown), value, delta=1e-5 * abs(value))
      else:
        self.assertEqual(shown, str(value))
    # Who was left out and why; the fault; a round in detail.
    text = ' '.join(cells)
    self.assertIn('0 no_steps 1 1 lapsed 1 1 late 1', text)
    self.assertIn('5.2 death island_1 3.8 7.3', text)
    self.assertIn('6.4 1.2 1 grace_over 0 1: late 0.5 0.25', text)
    self.assertIn('SIGKILL', cells)
    self.assertNotIn('class="notice"', self.text)

  def test_it_needs_nothing_from_outside(self):
    synthetic.write_run(self.workdir)
    page = self.page()
    names = {name for name, _ in page.attributes}
    self.assertEmpty(names & {'src', 'href', 'xlink:href', 'onclick', 'srcset'})
    for forbidden in ('<script', '<link', '<img', '@import', 'url(', 'http:'):
      self.assertNotIn(forbidden, self.text)
    self.assertIn('prefers-color-scheme:dark', self.text)
    self.assertIn(('content', 'width=device-width,initial-scale=1'),
                  page.attributes)  # fmt: skip
    # Every colour that is used is defined.
    used = set(re.findall(r'var\(--([a-z0-9]+)\)', self.text))
    defined = set(re.findall(r'--([a-z0-9]+):', self.text))
    self.assertContainsSubset(used, defined)

  def test_what_a_run_wrote_is_escaped(self):
    evil = '<script>alert("1")</script>&'
    config = json.loads(json.dumps(synthetic.CONFIG))
    config['config']['preset'] = evil
    config['config']['model'] = {evil: evil}
    tape = synthetic.tape()
    tape[7]['left_out'] = [[1, evil]]
    tape[7]['reason'] = evil
    tape[-1]['params_digest'] = evil
    processes = [synthetic.process(evil, 0, 1, 0.0, 1.0, evil)]
    synthetic.write_run(
      self.workdir, tape_lines=tape, config=config, processes=processes
    )
    page = self.page()
    self.assertNotIn('<script', self.text)
    self.assertNotIn('<i>', self.text)
    self.assertIn(html.escape(evil), self.text)
    self.assertGreaterEqual(self.cells(page).count(evil), 5)
    self.assertIn(f'model.{evil}', self.cells(page))
    self.assertEqual(page.texts['h1'], [f'{evil} · <i>run'])
    # As written, escaped once and not twice.
    self.assertIn('<b>&"corpus"</b>', self.cells(page))

  def test_an_interrupted_run_says_what_is_missing(self):
    synthetic.write_run(
      self.workdir,
      tape_lines=synthetic.tape()[:9],
      islands={0: synthetic.ISLANDS[0]},
      torn='{"t_s": 3',
      without=['metrics/evaluator.jsonl', 'metrics/syncer.jsonl',
               'processes.json'],
    )  # fmt: skip
    page = self.page()
    self.assertEqual(
      page.texts['li'],
      ['metrics/syncer.jsonl is missing',
       'metrics/evaluator.jsonl is missing',
       'processes.json is missing',
       'the run has not finished, or was interrupted'],
    )  # fmt: skip
    self.assertIn('Loss by step', page.charts)
    self.assertIn('Nothing was recorded.', page.texts['p'])

  def test_any_one_file_is_enough(self):
    names = ['config.json', 'tape/syncer.jsonl', 'metrics/island_0.jsonl']
    others = ['metrics/syncer.jsonl', 'metrics/evaluator.jsonl',
              'processes.json', 'metrics/island_1.jsonl']  # fmt: skip
    for name in names:
      with self.subTest(name):
        workdir = self.workdir / name.replace('/', '_')
        without = [x for x in (*names, *others) if x != name]
        synthetic.write_run(workdir, without=without)
        page = Page(report.write_report(workdir).read_text(encoding='utf-8'))
        self.assertEqual(page.open, [])
        self.assertGreaterEqual(len(page.texts['li']), 5)

  def test_a_malformed_file_is_named_and_read_as_far_as_it_goes(self):
    tape = synthetic.tape()
    synthetic.write_run(self.workdir, tape_lines=tape[:9])
    path = self.workdir / 'tape' / 'syncer.jsonl'
    with open(path, 'a') as file:
      file.write('{"t_s": 7.0, \x00\n')
      for line in tape[9:]:
        file.write(json.dumps(line) + '\n')
    page = self.page()
    self.assertRegex(
      page.texts['li'][0], r'not readable: .*syncer\.jsonl:10: not JSON'
    )
    cells = self.cells(page)
    self.assertEqual(cells[cells.index('merges') + 1], '2')

  def test_books_that_do_not_add_up_are_told(self):
    tape = synthetic.tape()
    tape[-3]['lost_token_params'] += 1
    synthetic.write_run(self.workdir, tape_lines=tape)
    self.assertRegex(
      self.page().texts['li'][0], 'the books do not add up: island 0'
    )

  def test_what_is_no_run_is_the_users_mistake(self):
    with self.assertRaises(errors.UserError):
      report.write_report(self.workdir)


if __name__ == '__main__':
  absltest.main()
