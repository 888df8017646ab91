"""Configuration: presets, every kind of mistake, JSON, hash, resume rules."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax import config as config_lib
from diloco_jax import config_check
from diloco_jax import config_json
from diloco_jax import errors
from diloco_jax import presets
from diloco_jax import run_config
from diloco_jax.algorithm import compress
from diloco_jax.algorithm import outer
from diloco_jax.launch import assembly
from diloco_jax.protocol import settings

ROOT = pathlib.Path(__file__).resolve().parent.parent


def changed(**paths):
  """The default configuration with settings by path, '.' written as '__'."""
  config = config_lib.default_config()
  config.update_from_flattened_dict(
    {path.replace('__', '.'): value for path, value in paths.items()}
  )
  return config


def problems_of(config, **kwargs):
  """{where: problem} of a configuration that must have some."""
  try:
    config_lib.check(config, **kwargs)
  except errors.UserError as e:
    return {problem.where: problem for problem in e.problems}
  raise AssertionError('no problem found')


class DeclarationTest(absltest.TestCase):
  """The declared keys against the options beside the code."""

  def test_sections_have_the_fields_of_their_options(self):
    tree = config_lib.default_config().to_dict()
    for path, cls in run_config.section_classes().items():
      section = tree
      for name in path.split('.') if path else ():
        section = section[name]
      fields = {f.name for f in dataclasses.fields(cls)} - {'given'}
      with self.subTest(path):
        self.assertEqual(set(section), fields)

  def test_defaults_are_those_of_the_options(self):
    """An options class used without a configuration must do the same."""
    config = config_lib.default_config()
    for path, cls in run_config.section_classes().items():
      for field in dataclasses.fields(cls):
        key = run_config.join(path, field.name)
        if field.default is dataclasses.MISSING or key == 'given':
          continue
        value = config
        for name in key.split('.'):
          value = value[name]
        if value is None and key in run_config.GIVEN_PATHS:
          continue
        with self.subTest(key):
          self.assertEqual(value, field.default)

  def test_every_field_is_either_of_the_run_or_of_the_island(self):
    flat = run_config.to_flat(config_lib.resolve(config_lib.default_config()))
    prefixes = (*run_config.RUN_FIELDS, *run_config.ISLAND_FIELDS)
    for path in flat:
      with self.subTest(path):
        self.assertTrue(
          any(path == p or path.startswith(f'{p}.') for p in prefixes)
        )
    for prefix in (*prefixes, *run_config.CHANGEABLE_FIELDS):
      with self.subTest(prefix):
        self.assertTrue(
          any(path == prefix or path.startswith(f'{prefix}.') for path in flat)
        )
    self.assertFalse(run_config.is_run_field('data.batch'))
    self.assertFalse(run_config.is_run_field('mesh.fsdp'))
    self.assertTrue(run_config.is_run_field('data.sequence'))
    self.assertTrue(run_config.is_run_field('inner.lr'))

  def test_choices_are_those_of_the_code(self):
    for path, known in (
      ('sync.upload', compress.CODECS),
      ('sync.download', compress.CODECS),
      ('sync.merge', outer.MERGE_RULES),
      ('task', assembly.TASKS),
    ):
      with self.subTest(path):
        self.assertCountEqual(config_check.CHOICES[path], known)

  def test_checking_imports_no_jax(self):
    code = (
      'import sys; from diloco_jax import config as c, command_line;'
      'c.check(c.default_config()); assert "jax" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)


class PresetTest(parameterized.TestCase):
  # From the papers' tables, written by hand.
  @parameterized.parameters(
    dict(
      preset='decoupled_diloco',
      mode=settings.FREE,
      sync=dict(
        fragments=24, period=24, overlap=2, quorum=1, adopt='rebase', merge='rda'
      ),
      outer=('nesterov', 1.0, 0.5),
    ),
    dict(
      preset='streaming_diloco',
      mode=settings.LOCK_STEP,
      sync=dict(
        fragments=8, period=24, overlap=2, quorum=0, adopt='blend', alpha=0.5,
        merge='mean', grace_steps_max=0.0,
      ),
      outer=('nesterov', 0.4, 0.9),
    ),
    dict(
      preset='diloco',
      mode=settings.LOCK_STEP,
      sync=dict(
        fragments=1, period=30, overlap=0, quorum=0, adopt='overwrite',
        merge='mean', grace_steps_max=0.0,
      ),
      outer=('nesterov', 0.7, 0.9),
    ),
    dict(
      preset='data_parallel',
      mode=settings.LOCK_STEP,
      sync=dict(fragments=1, period=50, overlap=0),
      outer=('sgd', 1.0, 0.0),
    ),
  )  # fmt: skip
  def test_presets(self, preset, mode, sync, outer):
    run = config_lib.resolve(changed(preset=preset))
    self.assertEqual(run.sync.mode, mode)
    for name, value in sync.items():
      self.assertEqual(getattr(run.sync, name), value, name)
    self.assertEqual((run.outer.rule, run.outer.lr, run.outer.momentum), outer)
    self.assertEqual(run.given, ())

  @parameterized.parameters((9_999, 30), (10_000, 500))
  def test_period_of_diloco(self, steps, period):
    run = config_lib.resolve(changed(preset='diloco', steps=steps))
    self.assertEqual(run.sync.period, period)

  @parameterized.parameters(
    (4, 0.0), (8, 0.0), (12, 0.125), (16, 0.25), (24, 0.5), (48, 0.5)
  )
  def test_momentum_falls_with_the_period(self, period, momentum):
    run = config_lib.resolve(changed(sync__period=period))
    self.assertAlmostEqual(run.outer.momentum, momentum)
    self.assertEqual(run.given, ('sync.period',))

  @parameterized.parameters(*presets.PRESET_PATHS)
  def test_any_setting_of_a_preset_can_be_given(self, path):
    values = {
      'sync.fragments': 6, 'sync.period': 48, 'sync.overlap': 1,
      'sync.quorum': 3, 'sync.grace_gamma': 0.25, 'sync.grace_steps_max': 0.5,
      'sync.block': True, 'sync.round_members': 'each',
      'sync.adopt': 'overwrite', 'sync.alpha': 0.75, 'sync.merge': 'mean',
      'outer.rule': 'sgd', 'outer.lr': 0.3, 'outer.momentum': 0.1,
    }  # fmt: skip
    config = config_lib.default_config()
    if path == 'sync.alpha':
      config.sync.adopt = 'blend'
    config.update_from_flattened_dict({path: values[path]})
    run = config_lib.resolve(config)
    self.assertEqual(run_config.to_flat(run)[path], values[path])
    self.assertIn(path, run.given)
    # Saying what the preset says is still saying it.
    same = run_config.to_flat(config_lib.resolve(config_lib.default_config()))
    config = config_lib.default_config()
    if path != 'sync.alpha':
      config.update_from_flattened_dict({path: same[path]})
      self.assertEqual(config_lib.resolve(config).given, (path,))

  def test_data_parallel_is_one_island_with_all_batches(self):
    run = config_lib.resolve(changed(preset='data_parallel', islands=3))
    self.assertEqual((run.island_count, run.island_batch), (1, 24))
    run = config_lib.resolve(changed(islands=3))
    self.assertEqual((run.island_count, run.island_batch), (3, 8))

  def test_data_parallel_syncs_nothing(self):
    config = changed(preset='data_parallel', sync__period=24, outer__lr=0.5)
    self.assertEqual(config_lib.resolve(config).sync.period, 50)
    found = problems_of(config, flags=['sync.period', 'preset'])
    self.assertEqual(set(found), {'--config.sync.period'})


class AsyncModeTest(absltest.TestCase):
  def test_false_is_the_synchronous_preset(self):
    config = changed(
      islands=3, sync__fragments=12, sync__adopt='rebase', outer__momentum=0.5
    )
    run = config_lib.resolve(config, async_mode=False)
    plain = config_lib.resolve(changed(islands=3, preset='diloco'))
    self.assertEqual(run, plain)

  def test_flags_outlive_it(self):
    config = changed(sync__period=50, sync__adopt='rebase')
    run = config_lib.resolve(config, flags=['sync.period'], async_mode=False)
    self.assertEqual(run.sync.period, 50)
    self.assertEqual(run.sync.adopt, 'overwrite')
    self.assertEqual(run.given, ('sync.period',))

  def test_a_synchronous_file_keeps_its_settings(self):
    config = changed(preset='streaming_diloco', sync__period=48)
    run = config_lib.resolve(config, async_mode=False)
    self.assertEqual(run, config_lib.resolve(config))

  def test_contradictions(self):
    config = changed(preset='decoupled_diloco')
    found = problems_of(config, flags=['preset'], async_mode=False)
    self.assertEqual(set(found), {'--async_mode=false'})
    found = problems_of(changed(preset='diloco'), async_mode=True)
    self.assertEqual(set(found), {'--async_mode=true'})


class MistakeTest(parameterized.TestCase):
  @parameterized.parameters(
    # One case a line: settings, where, words of the message.
    (dict(preset='dilocoo'), 'preset', ['diloco', 'did you mean diloco?']),
    (dict(preset='async_diloco'), 'preset', ['not in this version']),
    (dict(launch__runtime='ray'), 'launch.runtime', ['processes, threads']),
    (dict(sync__upload='int3'), 'sync.upload', ['bf16, f32']),
    (dict(sync__adopt='rebas'), 'sync.adopt', ['did you mean rebase?']),
    (dict(sync__merge='median'), 'sync.merge', ['mean, rda']),
    (dict(sync__round_members='x'), 'sync.round_members', ['all, each']),
    (dict(outer__rule='adam'), 'outer.rule', ['nesterov, sgd']),
    (dict(inner__optimizer='lion'), 'inner.optimizer', ['adamw']),
    (dict(task='vision'), 'task', ['language_model']),
    (dict(sync__quorum=5), 'sync.quorum', ['islands = 4']),
    (dict(sync__fragments=5), 'sync.fragments', ['1, 2, 3, 4, 6, 8, 12, 24']),
    (
      dict(sync__block=True, sync__overlap=24),
      'sync.overlap',
      ['sync.period = 24'],
    ),
    (
      dict(sync__round_members='each', sync__overlap=24),
      'sync.overlap',
      ['sync.period = 24'],
    ),
    (dict(sync__round_members='each', sync__quorum=2), 'sync.quorum', ['each']),
    (dict(sync__alpha=0.5), 'sync.alpha', ['blend', 'rebase']),
    (dict(sync__adopt='blend', sync__alpha=1.5), 'sync.alpha', ['<= 1']),
    (dict(steps=0), 'steps', ['>= 1']),
    (dict(islands=0), 'islands', ['>= 1']),
    (dict(islands=5000), 'islands', ['1024']),
    (dict(seed=-1), 'seed', ['>= 0']),
    (dict(inner__lr=-1e-3), 'inner.lr', ['> 0']),
    (dict(inner__lr=float('nan')), 'inner.lr', ['nan', '> 0']),
    (dict(inner__weight_decay=-1.0), 'inner.weight_decay', ['>= 0']),
    (dict(sync__grace_gamma=-1.0), 'sync.grace_gamma', ['>= 0']),
    (dict(launch__step_floor_ms=-1.0), 'launch.step_floor_ms', ['>= 0']),
    (dict(launch__port=70_000), 'launch.port', ['65535']),
    (dict(sync__limits__lease_s=0.5), 'sync.limits.report_every_s', ['0.5']),
    (dict(mesh__data=3), 'data.batch', ['= 3']),
    (dict(mesh__data=2, inner__accumulate=8), 'data.batch', ['= 16']),
    (dict(mesh__fsdp=-1), 'mesh.fsdp', ['mesh.data']),
    (dict(model__heads=5), 'model.width', ['model.heads = 10']),
    (dict(model__width=68), 'model.width', ['model.heads = 8']),
    (dict(model__vocab=100), 'model.vocab', ['>= 256']),
    (dict(mesh__tensor=0), 'mesh.tensor', ['-1']),
    (dict(chaos='storm.py'), 'chaos', ['not in this version']),
    (dict(checkpoint__every_s=5.0), 'checkpoint.every_s', ['this version']),
    (dict(checkpoint__keep=9), 'checkpoint.keep', ['this version']),
  )
  def test_one_mistake_one_line(self, settings_, where, words):
    found = problems_of(changed(**settings_))
    self.assertEqual(list(found), [where])
    line = str(found[where])
    self.assertNotIn('\n', line)
    for word in words:
      self.assertIn(word, line)

  def test_all_mistakes_are_told_at_once(self):
    config = changed(
      steps=0, preset='nothing', sync__quorum=9, inner__lr=-1.0, mesh__data=3
    )
    config.sync.priod = 3
    config.whatever_this_is = 4
    found = problems_of(config)
    self.assertEqual(
      set(found),
      {
        'steps', 'preset', 'sync.quorum', 'inner.lr', 'data.batch',
        'sync.priod', 'whatever_this_is',
      },
    )  # fmt: skip
    self.assertIn('did you mean sync.period?', found['sync.priod'].fix)

  def test_missing_keys_and_wrong_types(self):
    config = config_lib.default_config()
    del config.sync.period
    config.unlock()
    tree = config.to_dict()
    tree['seed'] = 'zero'
    tree['islands'] = None
    tree['steps'] = True
    found = problems_of(type(config)(tree))
    self.assertEqual(set(found), {'sync.period', 'seed', 'islands', 'steps'})

  def test_not_a_configuration(self):
    self.assertEqual(set(problems_of({})), {'get_config()'})

  def test_the_same_key_elsewhere_is_the_nearest(self):
    known = ['sync.period', 'outer.lr', 'inner.lr', 'inner.weight_decay']
    for path, wanted in (
      ('period', 'sync.period'),
      ('outer.period', 'sync.period'),
      ('inner.wieght_decay', 'inner.weight_decay'),
      ('weight_deca', 'inner.weight_decay'),
      ('zzz', ''),
    ):
      with self.subTest(path):
        self.assertEqual(config_check.nearest(path, known), wanted)

  def test_options_own_checks_become_problems(self):
    """What an options class refuses is the user's mistake, not a crash."""
    tree = run_config.to_tree(config_lib.resolve(config_lib.default_config()))
    tree.pop('given')
    tree['sync']['limits']['lease_s'] = 'long'
    tree['extra'] = 1
    with self.assertRaises(errors.UserError) as caught:
      config_json.build(tree)
    self.assertEqual(
      {problem.where for problem in caught.exception.problems},
      {'sync.limits.lease_s', 'extra'},
    )


class LayoutTest(parameterized.TestCase):
  @parameterized.parameters((24, 24), (23, 12), (14, 12), (11, 8), (1, 1))
  def test_p_of_a_preset_is_lowered(self, tensors, fragments):
    run = config_lib.resolve(config_lib.default_config())
    laid_out, messages = config_lib.resolve_layout(run, tensors)
    self.assertEqual(laid_out.sync.fragments, fragments)
    self.assertLen(messages, 0 if fragments == 24 else 1)
    self.assertEqual(
      dataclasses.replace(laid_out, sync=run.sync), run, 'nothing else changes'
    )

  def test_p_of_a_preset_follows_a_given_h(self):
    run = config_lib.resolve(changed(sync__period=30))
    laid_out, messages = config_lib.resolve_layout(run, 100)
    self.assertEqual(laid_out.sync.fragments, 15)
    self.assertIn('15', messages[0])

  def test_a_given_p_is_taken_or_refused(self):
    run = config_lib.resolve(changed(sync__fragments=12))
    self.assertEqual(config_lib.resolve_layout(run, 12), (run, ()))
    with self.assertRaises(errors.UserError) as caught:
      config_lib.resolve_layout(run, 11)
    (problem,) = caught.exception.problems
    self.assertEqual(problem.where, 'sync.fragments')
    self.assertIn('1, 2, 3, 4, 6, 8', problem.expected)
    self.assertNotIn('12', problem.expected)

  def test_protocol_settings(self):
    run = config_lib.resolve(
      changed(islands=3, sync__fragments=2, inner__rewarm=7)
    )
    got = config_lib.protocol_settings(run, (10, 12), 'abc')
    self.assertEqual((got.islands, got.fragments, got.stride), (3, 2, 12))
    self.assertEqual((got.fingerprint, got.rewarm_steps), ('abc', 7))
    self.assertEqual(got.config_hash, run_config.config_hash(run))
    self.assertEqual(got.mode, settings.FREE)
    with self.assertRaises(AssertionError):
      config_lib.protocol_settings(run, (10, 12, 14), 'abc')

  def test_blending_with_nothing_is_overwriting(self):
    run = config_lib.resolve(
      changed(sync__fragments=1, sync__adopt='blend', sync__alpha=0.0)
    )
    got = config_lib.protocol_settings(run, (10,), 'abc')
    self.assertEqual(got.adopt, settings.OVERWRITE)


class JsonTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.run_config = config_lib.resolve(
      changed(sync__fragments=12, metrics__reference=1.5)
    )

  def test_round_trip(self):
    text = config_json.to_json(self.run_config)
    self.assertEqual(config_json.from_json(text), self.run_config)
    self.assertEqual(config_json.to_json(self.run_config), text)

  def test_strict(self):
    tree = json.loads(config_json.to_json(self.run_config))
    bad = {
      'unknown': lambda t: t.update(nonsense=1),
      'missing': lambda t: t['sync'].pop('period'),
      'type': lambda t: t.update(seed='0'),
      'boolean': lambda t: t.update(seed=True),
      'section': lambda t: t.update(sync=3),
      'given': lambda t: t.update(given=['seed']),
      'no given': lambda t: t.pop('given'),
      'not finite': lambda t: t['inner'].update(lr=float('inf')),
    }
    for name, spoil in bad.items():
      spoilt = json.loads(json.dumps(tree))
      spoil(spoilt)
      with self.subTest(name), self.assertRaises(errors.UserError):
        config_json.from_json(json.dumps(spoilt))
    for text in ('', '[]', '3', '{', '[' * 100_000):
      with self.subTest(text[:5]), self.assertRaises(errors.UserError):
        config_json.from_json(text)

  def test_hash_and_differing_keys_agree(self):
    plain = config_lib.default_config()
    base = config_lib.resolve(plain)
    for path, value, differs in (
      ('seed', 1, True),
      ('inner.lr', 0.1, True),
      ('sync.period', 48, True),
      ('sync.limits.lease_s', 99.0, True),
      ('model.width', 128, True),
      ('data.sequence', 64, True),
      ('steps', 700, False),
      ('islands', 5, False),
      ('metrics.eval_every_s', 1.0, False),
      ('metrics.tensorboard', False, False),
      ('data.batch', 16, False),
      ('mesh.data', 1, False),
      ('launch.runtime', 'threads', False),
    ):
      config = config_lib.default_config()
      config.update_from_flattened_dict({path: value})
      other = config_lib.resolve(config)
      with self.subTest(path):
        keys = run_config.differing_keys(base, other)
        self.assertEqual(keys, (path,) if differs else ())
        same = run_config.config_hash(base) == run_config.config_hash(other)
        self.assertEqual(same, not differs)

  def test_the_schedule_follows_steps_unless_given(self):
    run = config_lib.resolve(changed(steps=700))
    self.assertEqual(run.inner.total_steps, 700)
    self.assertEqual(run.given, ())
    given = config_lib.resolve(changed(steps=700, inner__total_steps=900))
    self.assertEqual(given.inner.total_steps, 900)
    self.assertEqual(
      run_config.differing_keys(run, given), ('inner.total_steps',)
    )

  def test_saying_what_the_preset_says_is_no_other_configuration(self):
    said = config_lib.resolve(changed(sync__period=24))
    left = config_lib.resolve(config_lib.default_config())
    self.assertNotEqual(said, left)
    self.assertEqual(run_config.config_hash(said), run_config.config_hash(left))

  def test_what_an_island_set_on_its_own(self):
    found = config_json.check_given(
      self.run_config,
      (
        ('sync.period', '24'),
        ('inner.lr', '0.006'),
        ('data.batch', '99'),
        ('launch.runtime', '"threads"'),
        ('seed', '7'),
        ('outer.lr', '"high"'),
        ('preset', 'not json'),
        ('no.such', '1'),
      ),
    )
    self.assertEqual(
      [problem.where for problem in found],
      ['--config.seed', '--config.outer.lr', '--config.preset',
       '--config.no.such'],
    )  # fmt: skip
    self.assertIn('0, as the run has it', str(found[0]))


class ConfigFilesTest(parameterized.TestCase):
  """Every file in experiments/configs loads, resolves and says what it is."""

  FILES = tuple(sorted((ROOT / 'experiments' / 'configs').glob('*.py')))

  def load(self, path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

  @parameterized.parameters(*((path.name,) for path in FILES))
  def test_file(self, name):
    path = ROOT / 'experiments' / 'configs' / name
    module = self.load(path)
    run = config_lib.resolve(module.get_config())
    self.assertEqual(
      run_config.config_hash(run),
      run_config.config_hash(config_lib.resolve(module.get_config())),
    )
    self.assertIn(f'--config=experiments/configs/{name}', module.__doc__)
    for words in ('Command:', 'Expected time:', 'Hardware:', 'Result:'):
      self.assertIn(words, module.__doc__)

  def test_files_named_after_a_preset_are_that_preset(self):
    stems = {path.stem for path in self.FILES}
    self.assertContainsSubset({'quickstart', 'tiny'}, stems)
    for path in self.FILES:
      if path.stem in presets.PRESETS:
        config = self.load(path).get_config()
        self.assertEqual(config.preset, path.stem)
        self.assertEqual(config_lib.resolve(config).given, ())

  def test_quickstart(self):
    (path,) = (path for path in self.FILES if path.stem == 'quickstart')
    config = self.load(path).get_config()
    run = config_lib.resolve(config)
    self.assertEqual((run.islands, run.steps), (4, 600))
    self.assertEqual(
      (run.sync.fragments, run.sync.period, run.sync.overlap), (12, 24, 2)
    )
    self.assertEqual((run.outer.lr, run.outer.momentum), (1.0, 0.0))
    waiting = config_lib.resolve(config, async_mode=False)
    self.assertEqual(waiting.preset, 'diloco')
    self.assertEqual((waiting.islands, waiting.steps), (4, 600))
    self.assertEqual((waiting.sync.fragments, waiting.sync.period), (1, 30))


class WorkdirTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.run_config = config_lib.resolve(config_lib.default_config())
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def message(self, folder):
    with self.assertRaises(errors.UserError) as caught:
      config_lib.check_workdir(self.run_config, folder)
    (problem,) = caught.exception.problems
    return str(problem)

  def test_new_and_empty_folders_are_fine(self):
    config_lib.check_workdir(self.run_config, self.folder)
    config_lib.check_workdir(self.run_config, self.folder / 'a' / 'b')

  def test_files_are_not(self):
    file = self.folder / 'file'
    file.write_text('')
    self.assertIn('is a file', self.message(file))
    self.assertIn('is a file', self.message(file / 'below'))

  def test_a_run_of_the_same_configuration(self):
    config_json.save(self.run_config, self.folder)
    self.assertEqual(config_json.load(self.folder), self.run_config)
    self.assertIn('a run of this configuration', self.message(self.folder))

  def test_a_run_of_another_configuration(self):
    config_json.save(self.run_config, self.folder)
    self.run_config = config_lib.resolve(changed(inner__lr=0.5, steps=9))
    message = self.message(self.folder)
    self.assertIn('inner.lr (0.006 there, 0.5 here)', message)
    self.assertNotIn('steps', message)

  def test_a_run_that_cannot_be_read(self):
    for text in ('{', '[]', '{"config": {"seed": 1}}'):
      (self.folder / 'config.json').write_text(text)
      self.assertIn('cannot read', self.message(self.folder))
    (self.folder / 'config.json').unlink()
    (self.folder / 'tape').mkdir()
    self.assertIn('cannot read', self.message(self.folder))

  def test_the_file_has_the_hash(self):
    config_json.save(self.run_config, self.folder)
    saved = json.loads((self.folder / 'config.json').read_text())
    self.assertEqual(
      saved['config_hash'], run_config.config_hash(self.run_config)
    )
    self.assertEqual([p.name for p in self.folder.iterdir()], ['config.json'])


if __name__ == '__main__':
  absltest.main()
