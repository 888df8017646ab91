"""From words on the command line to a checked configuration, or to one line
for every mistake. Imports no jax before all of that is done.
"""

from collections.abc import Container, Sequence
import difflib
import importlib.util
import pathlib
import sys
import traceback
from typing import Any, NamedTuple, NoReturn

from absl import flags
from ml_collections import ConfigDict

from diloco_jax import command_help
from diloco_jax import config as config_lib
from diloco_jax import config_check
from diloco_jax import errors
from diloco_jax.errors import Problem
from diloco_jax.run_config import RunConfig

TRAIN = 'train'
SYNCER = 'syncer'
ISLAND = 'island'
REPORT = 'report'
NEW_RUN_VERBS = (TRAIN, SYNCER)  # they take a configuration and a new folder
SIMULATE = 'simulate'
REPLAY = 'replay'
# Their few flags are parsed by `plain_verbs`.
PLAIN_VERBS = (ISLAND, REPORT, SIMULATE, REPLAY)
VERBS = (*NEW_RUN_VERBS, *PLAIN_VERBS, *command_help.LATER_VERBS)

HELP_FLAGS = ('--help', '-help', '-h', '--helpshort', '--helpfull')
FLAGS = ('config', 'workdir', 'async_mode')
# The types that settings have.
PARSERS: dict[type, flags.ArgumentParser] = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
  str: flags.ArgumentParser(),
}


def _show_help(argv: Sequence[str]) -> NoReturn:
  sys.stdout.write(command_help.TEXTS.get(argv[1], command_help.HELP))
  sys.exit(0)


def parse(argv: Sequence[str], flag_values: flags.FlagValues) -> list[str]:
  """Parses the flags in place; returns what is left: program and verb.

  Raises:
    UserError: every mistake in the words themselves.
  """
  if argv[1:2] == ['help'] or any(word in HELP_FLAGS for word in argv[1:]):
    _show_help(argv)
  verb = argv[1] if len(argv) > 1 else ''
  if verb in PLAIN_VERBS:
    return list(argv)
  if verb not in NEW_RUN_VERBS:
    raise errors.UserError([_verb_problem(verb)])
  try:
    # The verb comes first, so the rest parses as flags in any style.
    rest = flag_values([argv[0], *argv[2:]])
    # A file that cannot be loaded would show only when the value is used.
    config = flag_values['config']
    if config.present and not isinstance(config.value, ConfigDict):
      raise flags.Error('--config: no ConfigDict')
    if len(rest) > 1:
      raise flags.Error(f'unexpected {rest[1:]}')
  except Exception as e:
    # absl, ml_collections and configuration files raise all kinds.
    problems = _diagnose(argv[2:], flag_values)
    raise errors.UserError(
      problems or [Problem('command line', '', str(e), 'see --help')]
    ) from e
  return [argv[0], verb]


def _verb_problem(verb: str) -> Problem:
  expected = f'one of {", ".join(VERBS)}'
  if verb in command_help.LATER_VERBS:
    present = ', '.join((*NEW_RUN_VERBS, *PLAIN_VERBS))
    return Problem(verb, 'a verb that is not in this version', present, '')
  if not verb or verb.startswith('-'):
    fix = 'the verb comes first: python -m diloco_jax train ...; see --help'
    return Problem('verb', verb or 'nothing', expected, fix)
  close = difflib.get_close_matches(verb, VERBS, n=1)
  fix = f'did you mean {close[0]}?' if close else 'see --help'
  return Problem('verb', verb, expected, fix)


def _load(path: str) -> tuple[Any, list[Problem]]:
  """What get_config() of a file returns, or what is wrong with the file."""
  where = f'--config={path}'
  file = pathlib.Path(path.split(':', 1)[0])
  if not file.is_file():
    got = 'a folder' if file.is_dir() else 'no such file'
    fix = 'see experiments/configs/'
    return None, [Problem(where, got, 'a Python file', fix)]
  spec = importlib.util.spec_from_file_location('config_file', file)
  if spec is None or spec.loader is None:
    return None, [Problem(where, 'not Python', 'a file named *.py', '')]
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    if not hasattr(module, 'get_config'):
      fix = 'define get_config(), see experiments/configs/tiny.py'
      return None, [Problem(where, 'no get_config()', 'a function', fix)]
    config = module.get_config(*path.split(':', 1)[1:])
  except Exception as e:  # whatever the user's file raises
    return None, [_file_problem(where, str(file), e)]
  if not isinstance(config, ConfigDict):
    got = f'get_config() returns {type(config).__name__}'
    fix = 'return default_config() with changes'
    return None, [Problem(where, got, 'a ConfigDict', fix)]
  return config, []


def _file_problem(where: str, file: str, error: Exception) -> Problem:
  line = error.lineno if isinstance(error, SyntaxError) else None
  for frame in traceback.extract_tb(error.__traceback__):
    if pathlib.Path(frame.filename) == pathlib.Path(file):
      line = frame.lineno
  message = str(error.args[0])[:160] if error.args else ''
  return Problem(
    where,
    f'{type(error).__name__} at line {line}: {message}',
    'a file that loads',
    '',
  )


class Word(NamedTuple):
  """One flag, or a word that is none (then without a name)."""

  name: str  # without dashes
  value: str | None
  text: str  # as written


def split_words(words: Sequence[str], booleans: Container[str]) -> list[Word]:
  """Flags with their values; `booleans` take no value from the next word."""
  found: list[Word] = []
  rest = list(words)
  while rest:
    text = rest.pop(0)
    name, equals, value = text.lstrip('-').partition('=')
    if not text.startswith('-'):
      found.append(Word('', None, text))
    elif equals:
      found.append(Word(name, value, text))
    elif name in booleans or not rest or rest[0].startswith('-'):
      found.append(Word(name, None, text))
    else:
      found.append(Word(name, rest.pop(0), text))
  return found


def _diagnose(
  words: Sequence[str], flag_values: flags.FlagValues
) -> list[Problem]:
  """Every mistake among the words after the verb, and in what they ask for."""
  problems: list[Problem] = []
  config = None
  paths = [
    word.value for word in split_words(words, ()) if word.name == 'config'
  ]
  if paths and paths[-1]:
    config, problems = _load(paths[-1])
  types = config_lib.leaf_types(config or config_lib.default_config())
  booleans = {name for name in flag_values if flag_values[name].boolean}
  booleans |= {f'config.{path}' for path in types if types[path] is bool}
  booleans |= {f'no{name}' for name in booleans}
  values: dict[str, Any] = {}  # of the words that are right
  for word in split_words(words, booleans):
    name = word.name.removeprefix('no') if word.name in booleans else word.name
    if not name:
      got = 'a word that is no flag'
      found = [Problem(word.text, got, '--NAME=VALUE', 'see --help')]
    elif name.startswith('config.'):
      found = _override_problems(word, name, types)
      if not paths:
        fix = 'give --config=FILE before it'
        found.append(Problem(word.text, 'no file to change', '', fix))
    else:
      found = _flag_problems(word, name, flag_values)
    problems += found
    if not found:
      values[name] = name == word.name if word.value is None else word.value
  if config is not None:
    problems += _carried_out(config, types, values)
  return problems


def _carried_out(
  config: ConfigDict, types: dict[str, type], values: dict[str, Any]
) -> list[Problem]:
  """Mistakes in the configuration that the right words make."""
  overrides = {
    path: PARSERS[types[path]].parse(value)
    for name, value in values.items()
    if (path := name.removeprefix('config.')) != name
  }
  config.update_from_flattened_dict(overrides)
  async_mode = values.get('async_mode')
  if async_mode is not None:
    async_mode = PARSERS[bool].parse(async_mode)
  return _run_problems(
    config, tuple(overrides), async_mode, values.get('workdir')
  )


def _value_problems(
  word: Word, parser: flags.ArgumentParser, kind: str
) -> list[Problem]:
  where = f'--{word.name}'
  if kind == 'bool' and word.value is None:
    return []
  if word.value is None:
    return [Problem(where, 'no value', f'{where}={kind.upper()}', '')]
  try:
    parser.parse(word.value)
  except (ValueError, TypeError):
    return [Problem(where, word.value or "''", kind, '')]
  return []


def _override_problems(
  word: Word, name: str, types: dict[str, type]
) -> list[Problem]:
  path = name.removeprefix('config.')
  if path in types:
    return _value_problems(word, PARSERS[types[path]], types[path].__name__)
  inside = [key for key in types if key.startswith(f'{path}.')]
  if inside:
    fix = f'for example --config.{inside[0]}=VALUE'
    return [Problem(f'--{word.name}', 'a section', 'a setting in it', fix)]
  return [config_check.unknown_key(f'--{word.name}', path, types)]


def _flag_problems(
  word: Word, name: str, flag_values: flags.FlagValues
) -> list[Problem]:
  if name in flag_values:
    if name == 'config' and word.value:
      return []  # what it holds is looked at elsewhere
    flag = flag_values[name]
    kind = 'bool' if flag.boolean else flag.flag_type()
    return _value_problems(word, flag.parser, kind)
  twin = word.name.replace('-', '_')
  value = '' if word.value is None else f'={word.value}'
  if twin.removeprefix('no') in FLAGS:
    fix = f'write --{twin}{value}'
  elif close := difflib.get_close_matches(twin, FLAGS, n=1):
    fix = f'did you mean --{close[0]}?'
  else:
    keys = config_lib.leaf_types(config_lib.default_config())
    key = config_check.nearest(word.name, keys)
    fix = f'did you mean --config.{key}?' if key else 'see --help'
  return [Problem(f'--{word.name}', 'an unknown flag', '', fix)]


def _run_problems(
  config: ConfigDict | None,
  overrides: tuple[str, ...],
  async_mode: bool | None,
  workdir: str | None,
) -> list[Problem]:
  problems: list[Problem] = []
  if config is None:
    fix = 'for example --config=experiments/configs/quickstart.py'
    problems.append(Problem('--config', 'nothing', 'a Python file', fix))
  if not workdir:
    fix = 'for example --workdir=runs/first'
    problems.append(Problem('--workdir', 'nothing', 'a new folder', fix))
  try:
    if config is not None:
      config_lib.check(config, overrides, async_mode)
  except errors.UserError as e:
    problems.extend(e.problems)
  try:
    if workdir:
      config_lib.check_folder(pathlib.Path(workdir))
  except errors.UserError as e:
    problems.extend(e.problems)
  return problems


def new_run(
  config: ConfigDict | None,
  overrides: tuple[str, ...],
  async_mode: bool | None,
  workdir: str | None,
) -> RunConfig:
  """The configuration of a new run. Raises UserError with all problems.

  Args:
    config: of --config with its overrides; None where it is missing.
    overrides: dotted paths set on the command line.
    async_mode: of --async_mode; None where it is missing.
    workdir: of --workdir; None where it is missing.
  """
  problems = _run_problems(config, overrides, async_mode, workdir)
  if problems:
    raise errors.UserError(problems)
  assert config is not None
  assert workdir is not None
  run = config_lib.resolve(config, flags=overrides, async_mode=async_mode)
  config_lib.check_workdir(run, pathlib.Path(workdir))
  return run
