"""The command line as a user meets it: help, mistakes, exit codes."""

import contextlib
import io
import pathlib
import subprocess
import sys
import types
from unittest import mock

from absl import flags
from absl.testing import absltest
from absl.testing import parameterized
from ml_collections import config_flags

import diloco_jax
from diloco_jax import command_help
from diloco_jax import command_line
from diloco_jax import config as config_lib
from diloco_jax import errors
from diloco_jax import main

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICKSTART = str(ROOT / 'experiments' / 'configs' / 'quickstart.py')

# The first three lines of a configuration file.
FILE_HEAD = """from diloco_jax import config
def get_config():
  c = config.default_config()
"""


def flags_like_main(argv):
  """Flags as main.py defines them, on their own."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', flag_values=values, sys_argv=argv, lock_config=True
  )
  flags.DEFINE_string('workdir', None, '', flag_values=values)
  flags.DEFINE_bool('async_mode', None, '', flag_values=values)
  return values


def parsed(*words):
  """(configuration, overrides, flags) of `train WORDS`."""
  argv = ['diloco_jax', 'train', *words]
  values = flags_like_main(argv)
  command_line.parse(argv, values)
  overrides = values['config'].override_values if values.config else {}
  return values.config, tuple(overrides), values


class CommandTest(absltest.TestCase):
  """The real program in its own process."""

  def run_program(self, *words):
    return subprocess.run(
      [sys.executable, '-X', 'importtime', '-m', 'diloco_jax', *words],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=False,
    )

  def lines(self, text):
    return [x for x in text.splitlines() if not x.startswith('import time:')]

  def test_help(self):
    for words, wanted in (
      (['--help'], ['Verbs:', 'train', 'simulate', 'Example:', 'quickstart']),
      (['train', '--help'], ['--workdir', '--async_mode=false', 'islands=4']),
    ):
      result = self.run_program(*words)
      self.assertEqual(result.returncode, 0)
      for word in wanted:
        self.assertIn(word, result.stdout)
      self.assertNotIn('jax._src', result.stderr)

  def test_mistakes_exit_with_2_and_import_no_jax(self):
    folder = self.create_tempdir().full_path
    result = self.run_program(
      'train',
      f'--config={QUICKSTART}',
      f'--workdir={folder}',
      '--config.sync.priod=3',
      '--config.inner.lr=fast',
      '--async-mode=false',
      '--config.sync.quorum=9',
    )
    self.assertEqual(result.returncode, 2)
    lines = self.lines(result.stderr)
    self.assertLen(lines, 4, result.stderr[-2000:])
    for line, words in zip(
      lines,
      (
        ('--config.sync.priod', 'did you mean sync.period?'),
        ('--config.inner.lr', 'fast', 'float'),
        ('--async-mode', 'write --async_mode=false'),
        ('sync.quorum', '9', 'islands = 4'),
      ),
      strict=True,
    ):
      for word in words:
        self.assertIn(word, line)
    self.assertNotIn('jax._src', result.stderr)
    self.assertEqual(list(pathlib.Path(folder).iterdir()), [])


class VerbTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], 'verb', 'train'),
    (['trian'], 'trian', 'did you mean train?'),
    (['zzz'], 'zzz', '--help'),
    (['--config=x.py', 'train'], '--config=x.py', 'the verb comes first'),
    (['plan', '--what=ever'], 'plan', 'not in this version'),
    (['goodput'], 'goodput', 'not in this version'),
  )
  def test_other_verbs(self, words, *wanted):
    with self.assertRaises(errors.UserError) as caught:
      command_line.parse(['diloco_jax', *words], flags_like_main([]))
    self.assertLen(caught.exception.problems, 1)
    for word in wanted:
      self.assertIn(word, str(caught.exception))

  @parameterized.parameters(
    ['--help'], ['-h'], ['help'], ['train', '--help'], ['zzz', '--helpfull']
  )
  def test_help_is_never_a_mistake(self, *words):
    with (
      contextlib.redirect_stdout(io.StringIO()) as out,
      self.assertRaises(SystemExit) as caught,
    ):
      command_line.parse(['diloco_jax', *words], flags_like_main([]))
    self.assertEqual(caught.exception.code, 0)
    self.assertIn('--config=FILE', out.getvalue())

  def test_help_names_defaults_that_are_true(self):
    flat = config_lib.check(config_lib.default_config())[0]
    for line in command_help.TRAIN_HELP.splitlines():
      word = line.split()[0] if line.startswith('    ') else ''
      path, equals, value = word.partition('=')
      if equals and path in flat:
        self.assertEqual(str(flat[path]), value)
    for path in ('sync.period', 'sync.fragments', 'sync.overlap', 'sync.adopt'):
      self.assertIn(path, command_help.TRAIN_HELP)
      self.assertIn(path, flat)


class FlagTest(parameterized.TestCase):
  def problems(self, *words):
    with self.assertRaises(errors.UserError) as caught:
      parsed(*words)
    for problem in caught.exception.problems:
      self.assertNotIn('\n', str(problem))
    return [str(problem) for problem in caught.exception.problems]

  def config_file(self, text):
    return self.create_tempfile('given.py', text).full_path

  def test_overrides(self):
    config, overrides, values = parsed(
      f'--config={QUICKSTART}',
      '--workdir=x',
      '--config.sync.period=48',
      '--config.inner.lr',
      '0.5',
      '--noconfig.metrics.tensorboard',
      '--async_mode=false',
    )
    self.assertEqual(config.sync.period, 48)
    self.assertEqual(config.inner.lr, 0.5)
    self.assertFalse(config.metrics.tensorboard)
    self.assertFalse(values.async_mode)
    self.assertEqual(
      set(overrides), {'sync.period', 'inner.lr', 'metrics.tensorboard'}
    )

  @parameterized.parameters(
    ('--async-mode=false', 'write --async_mode=false'),
    ('--noasync-mode', 'write --noasync_mode'),
    ('--workdri=x', 'did you mean --workdir?'),
    ('--islands=3', 'did you mean --config.islands?'),
    ('--steps=3', 'did you mean --config.steps?'),
    ('--qqqq', 'see --help'),
    ('--async_mode=perhaps', 'perhaps'),
    ('--config.nothing.like.it=1', 'an unknown key'),
    ('--config.inner.learning=1', 'an unknown key'),
    ('--config.sync.fragmnets=1', 'did you mean sync.fragments?'),
    ('--config.steps=many', 'expected int'),
    ('--config.steps=1.5', 'expected int'),
    ('--config.sync.block=3', 'expected bool'),
    ('--config.outer.lr=x', 'expected float'),
    ('--config.sync=3', 'a section'),
    ('--config.steps', 'no value'),
    ('stray', '--NAME=VALUE'),
  )
  def test_one_wrong_word(self, word, wanted):
    found = self.problems(f'--config={QUICKSTART}', '--workdir=x', word)
    self.assertLen(found, 1)
    self.assertIn(word.split('=')[0], found[0])
    self.assertIn(wanted, found[0])

  def test_a_boolean_takes_no_second_word(self):
    found = self.problems(
      f'--config={QUICKSTART}', '--workdir=x', '--async_mode', 'false'
    )
    self.assertTrue(found[0].startswith('false: '), found)

  def test_a_setting_without_a_file(self):
    (found,) = self.problems('--config.seed=1', '--workdir=x')[:1]
    self.assertIn('--config=FILE', found)

  def test_missing_flags(self):
    config, overrides, values = parsed()
    with self.assertRaises(errors.UserError) as caught:
      command_line.new_run(config, overrides, values.async_mode, values.workdir)
    self.assertEqual(
      [problem.where for problem in caught.exception.problems],
      ['--config', '--workdir'],
    )

  def test_the_workdir_and_the_configuration_are_told_together(self):
    file = self.create_tempfile('file').full_path
    config, overrides, _ = parsed(
      f'--config={QUICKSTART}', '--config.steps=0', '--config.sync.quorum=9'
    )
    with self.assertRaises(errors.UserError) as caught:
      command_line.new_run(config, overrides, None, file)
    self.assertEqual(
      [problem.where for problem in caught.exception.problems],
      ['steps', 'sync.quorum', f'--workdir={file}'],
    )

  @parameterized.parameters(
    ('def get_config(:\n', 'SyntaxError at line 1'),
    ('import nothing_like_it\n', 'ModuleNotFoundError at line 1'),
    ('\nx = 1 / 0\n', 'ZeroDivisionError at line 2'),
    ('def get_config():\n  return {}\n', 'returns dict'),
    ('def get_config():\n  pass\n', 'returns NoneType'),
    ('x = 1\n', 'no get_config()'),
    (
      FILE_HEAD + '  c.sync.period = "long"\n  return c\n',
      'TypeError at line 4',
    ),
  )
  def test_files_that_do_not_load(self, text, wanted):
    file = self.config_file(text)
    found = self.problems(f'--config={file}', '--workdir=x')
    self.assertLen(found, 1 if 'None' in wanted else len(found))
    self.assertTrue(found[0].startswith(f'--config={file}: '), found)
    self.assertIn(wanted, found[0])

  def test_no_file(self):
    folder = self.create_tempdir().full_path
    for path, wanted in (
      ('nothing.py', 'no such file'),
      (folder, 'a folder'),
      (str(ROOT / 'LICENSE'), 'not Python'),
    ):
      found = self.problems(f'--config={path}', '--workdir=x', '--wrokdir=y')
      self.assertLen(found, 2)
      self.assertIn(wanted, found[0])
      self.assertIn('did you mean --workdir?', found[1])

  def test_unknown_keys_of_a_file_are_told_at_once(self):
    file = self.config_file(
      FILE_HEAD + '  c.sync.priod = 3\n  c.prest = 3\n  return c\n'
    )
    config, overrides, _ = parsed(f'--config={file}')
    with self.assertRaises(errors.UserError) as caught:
      command_line.new_run(config, overrides, None, 'nowhere')
    self.assertEqual(
      [p.fix for p in caught.exception.problems],
      ['did you mean preset?', 'did you mean sync.period?'],
    )


class FacadeTest(absltest.TestCase):
  def test_the_public_names(self):
    for name in diloco_jax.__all__:
      self.assertTrue(callable(getattr(diloco_jax, name)), name)
    with self.assertRaisesRegex(AttributeError, 'no attribute'):
      diloco_jax.nothing_like_it  # noqa: B018


class MainTest(absltest.TestCase):
  """From words to the launcher, which is replaced."""

  def run_main(self, *words, result):
    argv = ['diloco_jax', 'train', *words]
    launch = types.ModuleType('diloco_jax.launch')
    launch.train = mock.Mock(**result)
    saved = {name: flags.FLAGS[name].value for name in ('config', 'workdir')}
    before = set(flags.FLAGS)
    with (
      mock.patch.object(sys, 'argv', argv),
      mock.patch.dict(sys.modules, {'diloco_jax.launch': launch}),
      mock.patch('diloco_jax.launch', launch, create=True),
      contextlib.redirect_stderr(io.StringIO()) as err,
    ):
      try:
        code = main.main(argv)
      finally:
        for name in set(flags.FLAGS) - before:
          delattr(flags.FLAGS, name)
        for name, value in saved.items():
          flags.FLAGS[name].value = value
    return code, launch.train, err.getvalue()

  def test_train(self):
    folder = self.create_tempdir().full_path
    code, train, _ = self.run_main(
      f'--config={QUICKSTART}',
      f'--workdir={folder}',
      '--config.islands=3',
      result={'return_value': 7},
    )
    self.assertEqual(code, 7)
    run, workdir = train.call_args.args
    self.assertEqual(run.islands, 3)
    self.assertEqual(run.sync.fragments, 12)
    self.assertEqual(workdir, pathlib.Path(folder))

  def test_ctrl_c_is_130(self):
    code, _, _ = self.run_main(
      f'--config={QUICKSTART}',
      f'--workdir={self.create_tempdir().full_path}',
      result={'side_effect': KeyboardInterrupt},
    )
    self.assertEqual(code, 130)

  def test_a_mistake_found_late_is_2(self):
    problem = errors.Problem('mesh.fsdp', '3', '1 or 2 devices', '')
    code, _, err = self.run_main(
      f'--config={QUICKSTART}',
      f'--workdir={self.create_tempdir().full_path}',
      result={'side_effect': errors.UserError([problem])},
    )
    self.assertEqual((code, err), (2, f'{problem}\n'))


if __name__ == '__main__':
  absltest.main()
