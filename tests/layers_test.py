"""House rules that a machine can check: layers, sizes, forbidden imports."""

import ast
import importlib
import pathlib
import subprocess
import sys

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / 'diloco_jax'

# Imports go down only, and units of one level do not import each other. The
# files that make up one unit are listed under its name.
LEVELS = {
  'algorithm': 0,
  'protocol': 0,
  'errors': 0,
  'models': 1,
  'data': 1,
  'transport': 1,
  'storage': 1,
  'telemetry': 1,
  'runtime': 1,
  'tasks': 2,
  'island': 2,
  'syncer': 2,
  'chaos': 2,
  'simulation': 3,
  'config': 4,
  'launch': 5,
  'main': 6,
}
UNITS = {
  'presets': 'config',
  'config_check': 'config',
  'config_json': 'config',
  'run_config': 'config',
  'command_help': 'main',
  'command_line': 'main',
  'plain_verbs': 'main',
  '__main__': 'main',
}
# The facade names things of every level, and imports them when asked for.
FACADE = 'diloco_jax'

# Mathematics: no clock, files, configuration or logging.
ALGORITHM_MAY = {'jax', 'optax', 'numpy', 'ml_dtypes', 'xxhash'}
PURE_MAY_NOT = {
  'asyncio', 'logging', 'multiprocessing', 'os', 'pathlib', 'random',
  'secrets', 'signal', 'socket', 'subprocess', 'tempfile', 'threading', 'time',
  'uuid',
}  # fmt: skip
# Code from the wire or from a file, and flags below the command line.
NOBODY_MAY = {'pickle', 'cloudpickle', 'dill', 'marshal', 'shelve'}

LINES_MAX = 400
FUNCTION_LINES_MAX = 70
# A state machine may be longer where a split would hide it: path -> lines,
# each with its reason.
LONG_FILES = {
  # The vocabulary of both machines: a list, not logic.
  'diloco_jax/protocol/actions.py': 500,
  'diloco_jax/protocol/messages.py': 420,
  # A round from opening to closing, in the three modes that share it.
  'diloco_jax/protocol/rounds.py': 520,
}
# 'path:function' -> lines, each with its reason.
LONG_FUNCTIONS: dict[str, int] = {}


def python_files(root):
  return sorted(
    path for path in root.rglob('*.py') if '__pycache__' not in path.parts
  )


def tree_of(path):
  return ast.parse(path.read_text(encoding='utf-8'), filename=str(path))


def module_name(path):
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def unit_of(module):
  """The unit of a dotted name below diloco_jax; None for the facade."""
  parts = module.split('.')
  if len(parts) == 1:
    return None
  return UNITS.get(parts[1], parts[1])


def is_import(node):
  return isinstance(node, (ast.Import, ast.ImportFrom))


def imports_of(tree):
  """(dotted name, line) of everything imported, wherever it stands."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name, node.lineno
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        yield '.' * node.level + (node.module or ''), node.lineno
      elif node.module == FACADE:
        # `from diloco_jax import x`: x is the module meant.
        for alias in node.names:
          yield f'{FACADE}.{alias.name}', node.lineno
      else:
        yield node.module, node.lineno


def layer_problems(module, tree):
  """What is wrong with the imports of one module, as lines of text."""
  unit = unit_of(module)
  if unit is None:
    return
  if unit not in LEVELS:
    yield f'{module}: {unit} has no level; add it to the table'
    return
  for name, line in imports_of(tree):
    if name.startswith('.'):
      yield f'{module}:{line}: relative import {name}'
    if name.split('.')[0] != FACADE:
      continue
    other = unit_of(name)
    if other is None or other.startswith('__version__') or other == unit:
      continue
    if other not in LEVELS:
      yield f'{module}:{line}: {name} has no level'
    elif LEVELS[other] >= LEVELS[unit]:
      yield (
        f'{module}:{line}: {unit} (L{LEVELS[unit]}) imports'
        f' {other} (L{LEVELS[other]})'
      )


def pure_problems(module, tree):
  """protocol/: standard library only; algorithm/: mathematics only."""
  unit = unit_of(module)
  for name, line in imports_of(tree):
    top = name.split('.')[0]
    if top in NOBODY_MAY:
      yield f'{module}:{line}: imports {name}'
    if unit not in ('protocol', 'algorithm') or top == FACADE:
      continue
    allowed = ALGORITHM_MAY if unit == 'algorithm' else set()
    if top in PURE_MAY_NOT or not (
      top in sys.stdlib_module_names or top in allowed
    ):
      yield f'{module}:{line}: {unit} imports {name}'


def size_problems(path, text, tree):
  """Files and functions over the house's limits."""
  name = str(path)
  lines = text.count('\n')
  limit = LONG_FILES.get(name, LINES_MAX)
  if lines > limit:
    yield f'{name}: {lines} lines, at most {limit}'
  for node in ast.walk(tree):
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      continue
    lines = node.end_lineno - node.lineno + 1
    limit = LONG_FUNCTIONS.get(f'{name}:{node.name}', FUNCTION_LINES_MAX)
    if lines > limit:
      yield f'{name}:{node.lineno} {node.name}: {lines} lines, at most {limit}'


class LayersTest(absltest.TestCase):
  def assertNoProblems(self, problems):
    problems = list(problems)
    self.assertEmpty(problems, '\n' + '\n'.join(problems))

  def test_imports_go_down(self):
    self.assertNoProblems(
      problem
      for path in python_files(PACKAGE)
      for problem in layer_problems(module_name(path), tree_of(path))
    )

  def test_protocol_and_algorithm_stay_pure(self):
    self.assertNoProblems(
      problem
      for path in python_files(PACKAGE)
      for problem in pure_problems(module_name(path), tree_of(path))
    )

  def test_the_facade_imports_nothing_when_imported(self):
    tree = tree_of(PACKAGE / '__init__.py')
    top = ast.Module([n for n in tree.body if is_import(n)], [])
    for name, _ in imports_of(top):
      self.assertIn(name.split('.')[0], sys.stdlib_module_names)

  def test_flags_are_read_in_main_only(self):
    self.assertNoProblems(
      f'{module_name(path)}:{line}: imports {name}'
      for path in python_files(PACKAGE)
      for name, line in imports_of(tree_of(path))
      if unit_of(module_name(path)) != 'main'
      and name.startswith(('absl.flags', 'ml_collections.config_flags'))
    )
    # `from absl import flags` names the package; look at what it takes.
    self.assertNoProblems(
      f'{module_name(path)}:{node.lineno}: imports flags'
      for path in python_files(PACKAGE)
      for node in ast.walk(tree_of(path))
      if isinstance(node, ast.ImportFrom)
      and unit_of(module_name(path)) != 'main'
      and {alias.name for alias in node.names} & {'flags', 'config_flags'}
    )

  def test_every_file_compiles(self):
    roots = [ROOT / d for d in ('diloco_jax', 'experiments', 'tests', 'colabs')]
    files = [ROOT / 'setup.py']
    for root in roots:
      files.extend(python_files(root))
    self.assertGreater(len(files), 5)
    for path in files:
      with self.subTest(str(path.relative_to(ROOT))):
        compile(path.read_text(encoding='utf-8'), str(path), 'exec')

  def test_every_module_imports(self):
    for path in python_files(PACKAGE):
      name = module_name(path)
      if not name.endswith('__main__'):
        with self.subTest(name):
          importlib.import_module(name)

  def test_parts_without_arrays_import_no_jax(self):
    code = (
      'import sys, diloco_jax, diloco_jax.errors, diloco_jax.protocol.syncer,'
      ' diloco_jax.protocol.island, diloco_jax.main;'
      ' assert "jax" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)

  def test_sizes(self):
    self.assertNoProblems(
      problem
      for path in python_files(PACKAGE)
      for problem in size_problems(
        path.relative_to(ROOT), path.read_text(encoding='utf-8'), tree_of(path)
      )
    )

  def test_every_package_has_an_init(self):
    """Without one, setup.py would leave it out."""
    for folder in {path.parent for path in python_files(PACKAGE)}:
      with self.subTest(str(folder.relative_to(ROOT))):
        self.assertTrue((folder / '__init__.py').is_file())

  def test_excuses_are_needed(self):
    for name in LONG_FILES:
      with self.subTest(name):
        text = (ROOT / name).read_text(encoding='utf-8')
        self.assertGreater(text.count('\n'), LINES_MAX, 'drop the excuse')

  def test_main_is_short(self):
    for name in ('main.py', '__main__.py'):
      text = (PACKAGE / name).read_text(encoding='utf-8')
      self.assertLess(text.count('\n'), 60, name)


class RulesCanFailTest(absltest.TestCase):
  """The checks above, shown code that breaks each rule."""

  def layers(self, module, code):
    return list(layer_problems(module, ast.parse(code)))

  def test_upward_and_sideways_imports_are_found(self):
    bad = [
      ('diloco_jax.algorithm.merge', 'import diloco_jax.island.hook'),
      ('diloco_jax.island.hook', 'from diloco_jax import config'),
      ('diloco_jax.island.hook', 'from diloco_jax.tasks import base'),
      ('diloco_jax.protocol.syncer', 'from diloco_jax import errors'),
      ('diloco_jax.syncer.driver', 'def f():\n  import diloco_jax.launch'),
      ('diloco_jax.presets', 'from diloco_jax.command_line import x'),
      ('diloco_jax.data.x', 'from . import corpus'),
      ('diloco_jax.nowhere', ''),
    ]
    for module, code in bad:
      with self.subTest(module):
        self.assertLen(self.layers(module, code), 1)

  def test_downward_imports_are_fine(self):
    good = [
      ('diloco_jax.tasks.lm', 'from diloco_jax.models import transformer'),
      ('diloco_jax.config', 'from diloco_jax import presets, errors'),
      ('diloco_jax.main', 'from diloco_jax import launch, command_line'),
      ('diloco_jax.island.a', 'from diloco_jax.island import b'),
    ]
    for module, code in good:
      with self.subTest(module):
        self.assertEmpty(self.layers(module, code))

  def test_impure_imports_are_found(self):
    bad = [
      ('diloco_jax.protocol.x', 'import numpy'),
      ('diloco_jax.protocol.x', 'from time import monotonic'),
      ('diloco_jax.algorithm.x', 'import grpc'),
      ('diloco_jax.algorithm.x', 'import logging'),
      ('diloco_jax.launch.x', 'import pickle'),
    ]
    for module, code in bad:
      with self.subTest(code):
        self.assertLen(list(pure_problems(module, ast.parse(code))), 1)

  def test_long_files_and_functions_are_found(self):
    code = 'def f():\n' + '  x = 1\n' * 400
    found = list(size_problems('diloco_jax/x.py', code, ast.parse(code)))
    self.assertLen(found, 2)


if __name__ == '__main__':
  absltest.main()
